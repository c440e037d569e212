"""The prompt of a request, as token ids."""

from __future__ import annotations

from gateway.chat_template import TemplateError
from gateway.peers import Target
from specdec.proposals import token_ids_fault
from specdec.v1 import gateway_pb2


def tokenize(
    request: gateway_pb2.GenerateRequest, target: Target
) -> tuple[list[int], str, str | None]:
    """The prompt's token ids, the field they come from, and what is wrong with it."""
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
        field, ids = "text", target.tokenizer.encode(request.text).ids if request.text else []
    else:
        field = "chat.messages"
        if not request.chat.messages:
            return [], field, "must hold at least one message"
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
