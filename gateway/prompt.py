"""The prompt of a request, as token ids."""

from __future__ import annotations

from gateway.chat_template import TemplateError
from gateway.target import Target
from specdec.proposals import token_ids_fault
from specdec.v1 import gateway_pb2

_MAX_MESSAGES = 4096


def tokenize(
    request: gateway_pb2.GenerateRequest, target: Target, max_bytes: int
) -> tuple[list[int], str, str | None]:
    """The prompt's token ids, the field they come from, and what is wrong with it.

    Args:
        request: with the prompt.
        target: whose tokens they are.
        max_bytes: of text. More is refused before it is tokenized, which would take long.
    """
    kind = request.WhichOneof("input")
    limit = target.info.max_context_length - 1
    if kind is None:
        return [], "input", "one of text, chat and token_ids must be set"
    if kind == "token_ids":
        field, ids = "token_ids.ids", list(request.token_ids.ids)
        fault = token_ids_fault(ids, target.info.effective_vocab_size)
        if fault is not None:
            return ids, field, fault
    elif kind == "text":
        field = "text"
        fault = _size_fault(len(request.text.encode()), max_bytes)
        if fault is not None:
            return [], field, fault
        ids = target.tokenizer.encode(request.text).ids if request.text else []
    else:
        field = "chat.messages"
        if not request.chat.messages:
            return [], field, "must hold at least one message"
        if len(request.chat.messages) > _MAX_MESSAGES:
            count = len(request.chat.messages)
            return [], field, f"must be at most {_MAX_MESSAGES} messages, got {count}"
        size = sum(len(f"{m.role}{m.content}".encode()) for m in request.chat.messages)
        fault = _size_fault(size, max_bytes)
        if fault is not None:
            return [], field, fault
        try:
            text = target.chat_template.render(
                [{"role": m.role, "content": m.content} for m in request.chat.messages]
            )
        except TemplateError as error:
            return [], field, f"the model's chat template refuses it: {error}"
        ids = target.tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        return ids, field, "must not be empty"
    if len(ids) > limit:
        return ids, field, f"must be at most {limit} tokens, got {len(ids)}"
    return ids, field, None


def _size_fault(size: int, max_bytes: int) -> str | None:
    return f"must be at most {max_bytes} bytes, got {size}" if size > max_bytes else None
