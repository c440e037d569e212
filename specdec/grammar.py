"""Grammars of structured output, by llguidance. Free of torch: the gateway checks them too."""

from __future__ import annotations

import json

from llguidance import LLMatcher, LLParserLimits

from specdec.v1 import common_pb2

MAX_GRAMMAR_BYTES = 64 * 1024
TOO_COMPLEX = "is too complex to be followed token by token"


def limits() -> LLParserLimits:
    """How much work a grammar may cause, for each token too. All services use the same."""
    return LLParserLimits(
        max_items_in_row=2000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        # A mask of ambiguous rules costs up to half a second with these.
        step_max_items=20_000,
        max_lexer_states=250_000,
        max_grammar_size=500_000,
        # Error messages would otherwise quote the output.
        verbose_errors=False,
    )


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
    # Lark's text as it is would be taken for something else if it began with a brace.
    return json.dumps({"grammars": [{"lark_grammar": text}]})
