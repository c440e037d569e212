"""Grammars of structured output, by llguidance. Free of torch: the gateway checks with it too."""

from __future__ import annotations

from llguidance import LLMatcher

from specdec.v1 import common_pb2

MAX_GRAMMAR_BYTES = 64 * 1024


def source(grammar: common_pb2.Grammar) -> str:
    """A grammar in the form that llguidance compiles.

    Raises:
        ValueError: it is empty, too large, or a JSON schema that is not JSON.
    """
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise ValueError("one of json_schema, regex and ebnf must be set")
    text: str = getattr(grammar, kind)
    if not text.strip():
        raise ValueError("must not be empty")
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"must be at most {MAX_GRAMMAR_BYTES} bytes")
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    return LLMatcher.grammar_from_lark(text)


def fault(grammar: common_pb2.Grammar) -> str | None:
    """What is wrong with a grammar, or None. Compiles it, which takes milliseconds."""
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(source(grammar))
    except ValueError as error:
        is_error, messages = True, [str(error)]
    return " ".join(" ".join(messages).split()) if is_error else None
