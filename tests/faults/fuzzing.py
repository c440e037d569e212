"""Messages that no peer should send: serialised ones with broken bytes, and hostile values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

NOT_UTF8 = "@@@@"
"""Becomes bytes that are not UTF-8 once it is serialised."""
_REALS = [
    *(float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 5e-324, 1e-45, -1e-9, 1e-30, 1e-3),
    *(0.5, 1.0, 1.0000001, 2.0, 100.0, 101.0, -1.0, -100.0, 3.4e38, 1e39, 1.7e308),
    *[float("nan")] * 5,
]
_FLOAT_MAX = 3.4e38
_SMALL = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 62, 63, 64, 65, 127, 128]
_EDGES = [298, 299, 300, 301, 319, 320, 321]
"""Ids at and over the edge of a vocabulary of 300 in 320 rows."""
_HUGE = [2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
_STRINGS = [
    *("", " ", "a", "\0", "\x7f\n\r\t", "é" * 60, "😀" * 80, "x" * 257, "y" * 20_000),
    *(NOT_UTF8, "a" + NOT_UTF8 + "b", "{{ 7 * 7 }}{% for %}", "<eos>", "\u202e\ufeff\u0301"),
    *("system", "assistant", "(a+)+$", "[", "a{1,100000}", '{"type": "object"}', '{"$ref": "#"}'),
    *("{", "null", "start: start", 'start: "a"+', "%llguidance {}", "../../etc/passwd"),
]
_MANY = 3000


def serialized(message: Message) -> bytes:
    """The message on the wire, its `NOT_UTF8` strings broken."""
    return message.SerializeToString().replace(NOT_UTF8.encode(), b"\xff\xc0\xfe\x80")


def corrupted(source: random.Random, message: M) -> M:
    """A copy of the message, in which one to three fields have hostile values."""
    found = type(message)()
    found.CopyFrom(message)
    for _ in range(source.choice([1, 1, 1, 2, 3])):
        fields = dict[str, list[Message]]()
        for owner, name in _fields(found):
            fields.setdefault(name, []).append(owner)
        # Each field there is has the same chance, however often it occurs.
        name = source.choice(list(fields))
        owner = source.choice(fields[name])
        _spoil(source, owner, owner.DESCRIPTOR.fields_by_name[name.rpartition(".")[2]])
    return found


def mutated(source: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Serialised bytes after one to three mutations.

    Args:
        source: of randomness.
        data: a message.
        others: what pieces are taken from.
    """
    for _ in range(source.choice([1, 1, 2, 3])):
        data = source.choice(_MUTATIONS)(source, data, source.choice(others))
    return data


def _fields(message: Message) -> Iterator[tuple[Message, str]]:
    """The fields of a message and of those inside it: where, and the full name."""
    for field in message.DESCRIPTOR.fields:
        yield message, field.full_name
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        value = getattr(message, field.name)
        if field.is_repeated:
            for item in list(value)[:3]:
                yield from _fields(item)
        elif message.HasField(field.name):
            yield from _fields(value)


def _spoil(source: random.Random, message: Message, field: FieldDescriptor) -> None:
    value: Any = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, item = field.message_type.fields_by_name["key"], field.message_type.fields
        for _ in range(source.choice([1, 1, 2, 1100])):
            value[_scalar(source, key)] = _scalar(source, item[1])
    elif field.is_repeated:
        _spoil_list(source, value, field)
    elif field.message_type is not None:
        if message.HasField(field.name) and source.random() < 0.6:
            message.ClearField(field.name)
        else:
            value.SetInParent()
    elif source.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(source, field))


def _spoil_list(source: random.Random, items: Any, field: FieldDescriptor) -> None:
    def more() -> list[Any]:
        if field.message_type is None:
            return [_scalar(source, field)]
        return [items[source.randrange(len(items))]] if items else [items.add()]

    match source.choice(["clear", "drop", "twice", "more", "many", *["change"] * 8]):
        case "clear":
            del items[:]
        case "drop" if items:
            del items[source.randrange(len(items))]
        case "twice" if items:
            items.append(items[source.randrange(len(items))])
        case "change" if items and field.message_type is None:
            items[source.randrange(len(items))] = _scalar(source, field)
        case "many":
            items.extend(more() * source.choice([20, 70, _MANY]))
        case _:
            items.extend(more())


def _scalar(source: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return source.choice(_REALS)
        case FieldDescriptor.CPPTYPE_FLOAT:
            value = source.choice(_REALS)
            return value if abs(value) <= _FLOAT_MAX else float("inf")
        case FieldDescriptor.CPPTYPE_UINT32:
            return source.choice([*_SMALL, *_EDGES, *_HUGE])
        case FieldDescriptor.CPPTYPE_UINT64:
            return source.choice([*_SMALL, *_HUGE, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
        case FieldDescriptor.CPPTYPE_ENUM:
            return source.choice([0, 1, 2, 3, 4, 99, -1, 2**31 - 1])
        case FieldDescriptor.CPPTYPE_BOOL:
            return source.random() < 0.5
        case FieldDescriptor.CPPTYPE_STRING:
            value = source.choice(_STRINGS)
            return value.encode() if field.type == FieldDescriptor.TYPE_BYTES else value
    raise AssertionError(f"no hostile values for {field.full_name}")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _at(source: random.Random, data: bytes) -> int:
    return source.randrange(len(data) + 1)


def _flip(source: random.Random, data: bytes, _: bytes) -> bytes:
    if not data:
        return b"\x80"
    at = source.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << source.randrange(8)]) + data[at + 1 :]


def _overwrite(source: random.Random, data: bytes, _: bytes) -> bytes:
    at = _at(source, data)
    return data[:at] + source.choice([b"\0", b"\xff", b"\x7f", b"\x80"]) + data[at + 1 :]


def _cut(source: random.Random, data: bytes, _: bytes) -> bytes:
    return data[: _at(source, data)]


def _drop(source: random.Random, data: bytes, _: bytes) -> bytes:
    begin, end = sorted((_at(source, data), _at(source, data)))
    return data[:begin] + data[end:]


def _repeat(source: random.Random, data: bytes, _: bytes) -> bytes:
    begin, end = sorted((_at(source, data), _at(source, data)))
    return data[:end] + data[begin:end] * source.choice([1, 2, 30]) + data[end:]


def _splice(source: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: _at(source, data)] + other[_at(source, other) :]


def _join(_: random.Random, data: bytes, other: bytes) -> bytes:
    """Both are read, one into the other."""
    return data + other


def _insert_varint(source: random.Random, data: bytes, _: bytes) -> bytes:
    at = _at(source, data)
    huge = source.choice([_varint(2**64 - 1), _varint(2**63), b"\x80" * 11, b"\xff" * 9 + b"\x7f"])
    return data[:at] + huge + data[at:]


def _insert_field(source: random.Random, data: bytes, _: bytes) -> bytes:
    """A field of any number and wire type, also those that there are not."""
    number = source.choice([0, 1, 2, 3, 7, 15, 200, 2**29 - 1])
    tag = _varint(number << 3 | source.randrange(8))
    return data + tag + source.randbytes(source.choice([0, 1, 4, 8]))


def _nest(source: random.Random, data: bytes, _: bytes) -> bytes:
    number = source.randrange(1, 15)
    for _unused in range(source.choice([3, 99, 101, 300])):
        data = _varint(number << 3 | 2) + _varint(len(data)) + data
    return data


def _groups(source: random.Random, data: bytes, _: bytes) -> bytes:
    """Groups are how unknown fields nest."""
    depth, closed = source.choice([3, 99, 101, 5000]), source.random() < 0.7
    return data + b"\xa3\x06" * depth + b"\xa4\x06" * (depth if closed else 0)


_MUTATIONS: Sequence[Callable[[random.Random, bytes, bytes], bytes]] = (
    *(_flip, _overwrite, _cut, _drop, _repeat, _splice, _join),
    *(_insert_varint, _insert_field, _nest, _groups),
)
