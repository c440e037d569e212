"""Requests that cannot be served as they are: refused before any work, naming every fault."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specdec.v1 import gateway_pb2
from specdec.v1.common_pb2 import Grammar
from specdec.v1.gateway_pb2 import (
    ChatInput,
    ChatMessage,
    GenerateRequest,
    LogprobsParams,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    TokenIdsInput,
)
from tests.stack import Stack, pair

# Of the models of tests/conftest.py.
CONTEXT = 512
VOCABULARY = 300
EOS_ID = 0


@pytest_asyncio.fixture(scope="module")
async def stack(target_folder: Path, draft_folder: Path) -> AsyncIterator[Stack]:
    """One stack for all tests. What nobody awaited on its event loop fails the last of them."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with pair(target_folder, draft_folder) as running:
        yield running
    assert not reported, reported


def request(*messages: Message | None, text: str | None = "hello") -> GenerateRequest:
    """A request of a prompt and the messages given, each in the field of its type."""
    made = GenerateRequest(text=text)
    for message in messages:
        for field in GenerateRequest.DESCRIPTOR.fields:
            if message is not None and field.message_type is message.DESCRIPTOR:
                getattr(made, field.name).CopyFrom(message)
    return made


def chat(*messages: tuple[str, str]) -> GenerateRequest:
    turns = [ChatMessage(role=role, content=content) for role, content in messages]
    return request(ChatInput(messages=turns), text=None)


def token_ids(*ids: int) -> GenerateRequest:
    return request(TokenIdsInput(ids=ids), text=None)


def sampling(**params: Any) -> GenerateRequest:
    return request(SamplingParams(**params))


def stopping(**params: Any) -> GenerateRequest:
    return request(StoppingParams(**params))


def speculation(**params: Any) -> GenerateRequest:
    return request(SpeculationParams(**params))


def delimited(number: int, content: bytes) -> bytes:
    """A field of bytes, of a string or of a message, as it is on the wire."""
    assert number < 16
    length = bytearray()
    size = len(content)
    while size >= 128:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def varint(number: int, value: int) -> bytes:
    """A field of a small integer, as it is on the wire."""
    assert value < 128
    key = number << 3
    return bytes([key, value]) if key < 128 else bytes([key & 127 | 128, key >> 7, value])


TEXT = delimited(1, b"hello")
# The numbers of the fields, which a request that no generated class would write is made of.
CHAT, SAMPLING, STOPPING, SPECULATION = 2, 4, 5, 6

Faults = dict[str, str]
"""The fields that are at fault, and a part of what is said about each."""

REFUSED: dict[str, tuple[GenerateRequest | bytes, Faults]] = {
    # The prompt.
    "no input": (request(text=None), {"input": "one of text, chat and token_ids must be set"}),
    "empty text": (request(text=""), {"text": "must not be empty"}),
    "no token ids": (token_ids(), {"token_ids.ids": "must not be empty"}),
    "no messages": (chat(), {"chat.messages": "must hold at least one message"}),
    "text too long": (
        request(text="!" * CONTEXT),
        {"text": f"must be at most {CONTEXT - 1} tokens, got {CONTEXT}"},
    ),
    "token ids too long": (
        token_ids(*[1] * CONTEXT),
        {"token_ids.ids": f"must be at most {CONTEXT - 1} tokens, got {CONTEXT}"},
    ),
    "chat too long": (
        chat(("user", "!" * CONTEXT)),
        {"chat.messages": f"must be at most {CONTEXT - 1} tokens, got "},
    ),
    "unknown role": (chat(("user", "a"), ("robot", "b")), {"chat.messages": "unknown role robot"}),
    "token id outside": (
        token_ids(1, VOCABULARY),
        {"token_ids.ids": f"token id {VOCABULARY} is outside the vocabulary of {VOCABULARY}"},
    ),
    "largest token id": (
        token_ids(2**32 - 1),
        {"token_ids.ids": f"token id {2**32 - 1} is outside the vocabulary of {VOCABULARY}"},
    ),
    # Sampling.
    **{
        f"{field} {value}": (
            sampling(**{field: value}),
            {f"sampling.{field}": f"must be within {allowed}, got {value}"},
        )
        for field, allowed, values in (
            ("temperature", "[0, 100]", (-1.0, 101.0, math.nan, math.inf, -math.inf)),
            ("top_p", "(0, 1]", (0.0, -0.5, 1.1, math.nan, math.inf)),
            ("min_p", "[0, 1]", (-0.1, 1.1, math.nan, math.inf)),
            ("repetition_penalty", "[0.01, 10]", (0.0, 5e-324, -1.0, 11.0, math.nan, math.inf)),
            ("presence_penalty", "[-2, 2]", (-2.1, 2.1, math.nan, math.inf)),
            ("frequency_penalty", "[-2, 2]", (-2.1, 2.1, math.nan, -math.inf)),
        )
        for value in values
    },
    **{
        f"{field} outside": (
            sampling(**{field: value}),
            {f"sampling.{field}": f"token id {VOCABULARY} is outside the vocabulary of"},
        )
        for field, value in (
            ("logit_bias", {VOCABULARY: 1.0}),
            ("allowed_token_ids", [1, VOCABULARY]),
            ("suppressed_token_ids", [VOCABULARY]),
        )
    },
    **{
        f"logit_bias of {value}": (
            sampling(logit_bias={7: value, 8: 100.0, 9: -100.0}),
            {"sampling.logit_bias[7]": f"must be within [-100, 100], got {value}"},
        )
        for value in (101.0, -101.0, math.nan, math.inf)
    },
    "all allowed ids suppressed": (
        sampling(allowed_token_ids=[1, 2], suppressed_token_ids=[2, 3, 1]),
        {"sampling.allowed_token_ids": "suppressed_token_ids, and "},
    ),
    "only end tokens allowed before the minimum": (
        request(
            SamplingParams(allowed_token_ids=[EOS_ID, 9]),
            StoppingParams(min_new_tokens=1, stop_token_ids=[9]),
        ),
        {"sampling.allowed_token_ids": "stopping.min_new_tokens for tokens that end"},
    ),
    "all ids suppressed": (
        sampling(suppressed_token_ids=range(VOCABULARY)),
        {"sampling.suppressed_token_ids": "leave no token"},
    ),
    "all ids suppressed but the end token's before the minimum": (
        request(
            SamplingParams(suppressed_token_ids=range(1, VOCABULARY)),
            StoppingParams(min_new_tokens=1),
        ),
        {"sampling.suppressed_token_ids": "leave no token"},
    ),
    "grammar without a kind": (
        sampling(grammar=Grammar()),
        {"sampling.grammar": "one of json_schema, regex and ebnf must be set"},
    ),
    "grammar that is none": (
        sampling(grammar=Grammar(regex="(")),
        {"sampling.grammar": ""},
    ),
    "grammar with what it cannot be combined with": (
        request(
            SamplingParams(
                grammar=Grammar(regex="a"), allowed_token_ids=[70], suppressed_token_ids=[1]
            ),
            StoppingParams(min_new_tokens=1, ignore_eos=True),
        ),
        dict.fromkeys(
            (
                "sampling.allowed_token_ids",
                "sampling.suppressed_token_ids",
                "stopping.min_new_tokens",
                "stopping.ignore_eos",
            ),
            "cannot be combined with sampling.grammar",
        ),
    ),
    # Log-probabilities and samples.
    "too many top logprobs": (
        request(LogprobsParams(num_top=21)),
        {"logprobs.num_top": "must be within [0, 20], got 21"},
    ),
    "unknown logprobs mode": (
        request(LogprobsParams(mode=3)),
        {"logprobs.mode": "must be RAW or PROCESSED, got 3"},
    ),
    "n 0": (GenerateRequest(text="hello", n=0), {"n": "must be within [1, 16], got 0"}),
    "n 17": (GenerateRequest(text="hello", n=17), {"n": "must be within [1, 16], got 17"}),
    # Stopping.
    "min_new_tokens above the maximum": (
        stopping(min_new_tokens=6, max_new_tokens=5),
        {"stopping.min_new_tokens": "must be at most max_new_tokens, 5, got 6"},
    ),
    "min_new_tokens above the maximum by default": (
        stopping(min_new_tokens=257),
        {"stopping.min_new_tokens": "must be at most max_new_tokens, 256, got 257"},
    ),
    "max_new_tokens 0": (
        stopping(max_new_tokens=0),
        {"stopping.max_new_tokens": "must be at least 1, got 0"},
    ),
    "stop token id outside": (
        stopping(stop_token_ids=[VOCABULARY]),
        {"stopping.stop_token_ids": f"outside the vocabulary of {VOCABULARY}"},
    ),
    "too many stop token ids": (
        stopping(stop_token_ids=range(65)),
        {"stopping.stop_token_ids": "must be at most 64 ids"},
    ),
    "empty stop string": (
        stopping(stop_strings=["a", ""]),
        {"stopping.stop_strings[1]": "must be 1 to 256 bytes, got 0"},
    ),
    "stop string too long": (
        stopping(stop_strings=["a" * 257]),
        {"stopping.stop_strings[0]": "must be 1 to 256 bytes, got 257"},
    ),
    "stop string of too many bytes": (
        stopping(stop_strings=["é" * 129]),
        {"stopping.stop_strings[0]": "must be 1 to 256 bytes, got 258"},
    ),
    "too many stop strings": (
        stopping(stop_strings=["a"] * 17),
        {"stopping.stop_strings": "must be at most 16 strings"},
    ),
    # Speculation.
    "unknown rule": (
        speculation(acceptance_rule=99),
        {"speculation.acceptance_rule": "must be one of REJECTION, BLOCK, COUPLED, got 99"},
    ),
    "K above the cap": (
        speculation(num_draft_tokens=33),
        {"speculation.num_draft_tokens": "must be within [0, 32], got 33"},
    ),
    "K above the cap without speculation": (
        speculation(num_draft_tokens=33, enabled=False),
        {"speculation.num_draft_tokens": "must be within [0, 32], got 33"},
    ),
    # What only another client than a generated one can send.
    "malformed text": (
        delimited(1, b"ab\xff"),
        {"text": "must be valid UTF-8; byte 2 is not"},
    ),
    "malformed chat content": (
        delimited(
            CHAT,
            delimited(1, delimited(1, b"user") + delimited(2, b"a"))
            + delimited(1, delimited(1, b"user") + delimited(2, b"\xed\xa0\x80")),
        ),
        {"chat.messages[1].content": "must be valid UTF-8; byte 0 is not"},
    ),
    "malformed role": (
        delimited(CHAT, delimited(1, delimited(1, b"\xc0\x80") + delimited(2, b"a"))),
        {"chat.messages[0].role": "must be valid UTF-8; byte 0 is not"},
    ),
    "malformed stop strings": (
        TEXT
        + delimited(
            STOPPING, delimited(3, b"a\x80") + delimited(3, b"b") + delimited(3, b"\xf0\x9f\x98")
        ),
        {
            "stopping.stop_strings[0]": "must be valid UTF-8; byte 1 is not",
            "stopping.stop_strings[2]": "must be valid UTF-8; byte 0 is not",
        },
    ),
    "garbage": (b"\xff\xff\xff\xff", {"request": "not valid"}),
    "a message that is cut": (
        request(SamplingParams(temperature=0.5)).SerializeToString()[:-1],
        {"request": "not valid"},
    ),
    "unknown field": (TEXT + varint(31, 1), {"#31": "not known to this version"}),
    "unknown nested fields": (
        delimited(
            CHAT,
            varint(7, 1)
            + delimited(1, delimited(1, b"user") + delimited(2, b"a") + delimited(9, b"tool")),
        )
        + delimited(SAMPLING, varint(8, 1))
        + delimited(STOPPING, varint(11, 1))
        + delimited(SPECULATION, varint(12, 1)),
        {
            "chat.#7": "not known to this version",
            "chat.messages[0].#9": "not known to this version",
            "sampling.#8": "not known to this version",
            "stopping.#11": "not known to this version",
            "speculation.#12": "not known to this version",
        },
    ),
    "known field of another type": (
        TEXT + delimited(SAMPLING, varint(1, 1)),
        {"sampling.#1": "not known to this version"},
    ),
    "everything at once": (
        request(
            ChatInput(messages=[ChatMessage(role="robot", content="a")]),
            SamplingParams(temperature=-1.0, top_p=0.0, min_p=2.0),
            StoppingParams(max_new_tokens=0, stop_token_ids=[VOCABULARY], stop_strings=[""]),
            SpeculationParams(num_draft_tokens=1000, acceptance_rule=4),
            text=None,
        ).SerializeToString()
        + varint(31, 1),
        {
            "#31": "not known to this version",
            "chat.messages": "unknown role robot",
            "sampling.temperature": "[0, 100]",
            "sampling.top_p": "(0, 1]",
            "sampling.min_p": "[0, 1]",
            "stopping.max_new_tokens": "at least 1",
            "stopping.stop_token_ids": "outside the vocabulary",
            "stopping.stop_strings[0]": "1 to 256 bytes",
            "speculation.num_draft_tokens": "[0, 32]",
            "speculation.acceptance_rule": "one of REJECTION, BLOCK, COUPLED",
        },
    ),
}


async def generate(
    stack: Stack, wanted: GenerateRequest | bytes
) -> list[gateway_pb2.GenerateResponse]:
    """Calls Generate with the bytes of a request, whatever they are."""
    data = wanted if isinstance(wanted, bytes) else wanted.SerializeToString()
    method = stack.gateway.channel.unary_stream(
        "/specdec.v1.GenerationService/Generate",
        request_serializer=bytes,
        response_deserializer=gateway_pb2.GenerateResponse.FromString,
    )
    call = method(data, timeout=30)
    try:
        return [response async for response in call]
    finally:
        call.cancel()


async def refusal(stack: Stack, wanted: GenerateRequest | bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stack, wanted)
    return caught.value


def details(error: grpc.aio.AioRpcError, kind: type[Message]) -> Sequence[Any]:
    """The details of a type that an error carries."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    found = []
    for packed in status.details:
        detail = kind()
        if packed.Unpack(detail):
            found.append(detail)
    return found


def assert_refused(error: grpc.aio.AioRpcError, faults: Faults) -> None:
    """Asserts that exactly these fields are named, with what is wrong about each."""
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    (info,) = details(error, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "specdec.v1")
    (bad_request,) = details(error, error_details_pb2.BadRequest)
    named = {v.field: v.description for v in bad_request.field_violations}
    assert named.keys() == faults.keys()
    assert len(bad_request.field_violations) == len(faults)
    for field, part in faults.items():
        assert part in named[field], field
        # People read the message; it says as much as the details do.
        assert f"{field}: {named[field]}" in (error.details() or "")


async def assert_no_sessions(stack: Stack) -> None:
    """A session that an earlier call had is closed a moment after the call."""
    assert stack.draft is not None
    runtimes = [stack.verifier.runtime, stack.draft.runtime]
    counts: list[int] = []
    for _ in range(50):
        counts = [runtime.num_sessions for runtime in runtimes if runtime is not None]
        if counts == [0, 0]:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"open sessions: {counts}")


async def assert_works(stack: Stack) -> None:
    result = await stack.generate([5, 6, 7], k=4, max_new_tokens=12, ignore_eos=True)
    assert len(result.token_ids) == 12
    assert result.speculation.num_draft_tokens > 0
    assert result.speculation.fallback_rounds == 0


@pytest.mark.parametrize("case", REFUSED)
async def test_a_bad_request_is_refused_with_its_fields_and_what_they_allow(
    stack: Stack, case: str
) -> None:
    wanted, faults = REFUSED[case]
    assert_refused(await refusal(stack, wanted), faults)


async def test_too_many_biases_are_refused_with_their_number(stack: Stack) -> None:
    # More than the models here have token ids, so that this is not the only thing wrong.
    error = await refusal(stack, sampling(logit_bias=dict.fromkeys(range(1025), 1.0)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    (bad_request,) = details(error, error_details_pb2.BadRequest)
    assert {v.field for v in bad_request.field_violations} == {"sampling.logit_bias"}
    said = [v.description for v in bad_request.field_violations]
    assert "must have at most 1024 entries, got 1025" in said


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
async def test_a_tiny_temperature_is_no_error_and_nearly_greedy(stack: Stack, rule: str) -> None:
    options: dict[str, Any] = {"k": 4, "rule": rule, "max_new_tokens": 30, "ignore_eos": True}
    greedy = await stack.generate([5, 6, 7], temperature=0.0, **options)
    result = await stack.generate([5, 6, 7], temperature=1e-308, seed=1, **options)
    assert result.token_ids == greedy.token_ids
    assert result.speculation.fallback_rounds == 0
    assert result.speculation.num_accepted_tokens == greedy.speculation.num_accepted_tokens


async def test_bad_requests_leave_nothing_behind(stack: Stack) -> None:
    errors = await asyncio.gather(*(refusal(stack, wanted) for wanted, _ in REFUSED.values()))
    for error, (_, faults) in zip(errors, REFUSED.values(), strict=True):
        assert_refused(error, faults)
    await assert_no_sessions(stack)
    await assert_works(stack)


async def test_a_bad_request_does_not_disturb_a_running_one(stack: Stack) -> None:
    options: dict[str, Any] = {"k": 4, "seed": 1, "max_new_tokens": 60, "ignore_eos": True}
    expected = await stack.generate([5, 6, 7], **options)
    running = asyncio.create_task(stack.generate([5, 6, 7], **options))
    errors = await asyncio.gather(*(refusal(stack, wanted) for wanted, _ in REFUSED.values()))
    assert {error.code() for error in errors} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert (await running).token_ids == expected.token_ids


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(token_ids(*[1] * (CONTEXT - 1)), id="longest prompt"),
        pytest.param(token_ids(VOCABULARY - 1), id="largest token id"),
        pytest.param(chat(("system", ""), ("user", "a"), ("assistant", "b")), id="known roles"),
        pytest.param(sampling(temperature=0.0, top_p=1.0, min_p=0.0), id="least sampling"),
        pytest.param(sampling(temperature=100.0, top_p=1e-9, min_p=1.0), id="most sampling"),
        *(
            pytest.param(sampling(temperature=temperature), id=f"temperature {temperature}")
            for temperature in (5e-324, 1e-300, 1e-40, 1e-12)
        ),
        pytest.param(sampling(top_k=2**32 - 1, seed=2**64 - 1), id="largest integers"),
        pytest.param(
            stopping(
                max_new_tokens=2**32 - 1,
                stop_token_ids=range(VOCABULARY - 64, VOCABULARY),
                stop_strings=[*"0123456789abcd", "é" * 128, "\x00"],
            ),
            id="most stops",
        ),
        pytest.param(
            sampling(
                repetition_penalty=10.0,
                presence_penalty=2.0,
                frequency_penalty=-2.0,
                logit_bias={0: 100.0, VOCABULARY - 1: -100.0},
                allowed_token_ids=[0, 1, 1, VOCABULARY - 1],
                suppressed_token_ids=[1],
            ),
            id="most processors",
        ),
        pytest.param(sampling(suppressed_token_ids=range(1, VOCABULARY)), id="one token left"),
        pytest.param(sampling(repetition_penalty=0.01), id="smallest repetition penalty"),
        pytest.param(stopping(min_new_tokens=4, max_new_tokens=4), id="largest minimum"),
        pytest.param(request(LogprobsParams(num_top=20, mode=2, prompt=True)), id="most logprobs"),
        pytest.param(speculation(num_draft_tokens=32, acceptance_rule=2), id="largest K"),
    ],
)
async def test_what_is_just_allowed_is_served(stack: Stack, wanted: GenerateRequest) -> None:
    if not wanted.stopping.HasField("max_new_tokens"):
        wanted.stopping.max_new_tokens = 4
    *chunks, end = await generate(stack, wanted)
    assert end.completion.finish_reason != gateway_pb2.FINISH_REASON_UNSPECIFIED
    tokens = sum(len(response.chunk.token_ids) for response in chunks)
    assert 1 <= tokens == end.completion.usage.completion_tokens
