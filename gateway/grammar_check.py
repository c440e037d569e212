"""What is wrong with a grammar that a client sent, found out where it can do no harm.

Run as a program it reads a compiled grammar from standard input and prints what is wrong with it.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from specdec.grammar import TOO_COMPLEX, limits, source
from specdec.v1 import common_pb2

# What a check may use. A grammar within it compiles in about the same time for a model.
_CPU_SECONDS = 3
_WALL_SECONDS = 30
_MEMORY_BYTES = 2 << 30
# Rules that refer to each other in a long chain are compiled recursively. Half of what the threads
# that compile for a model usually have.
_STACK_BYTES = 4 << 20
# How far a check follows a grammar: what gets out of hand usually does so at once.
_STEPS = 64
# Errors travel in the trailers of a call, which are small.
_MAX_MESSAGE = 300


def grammar_fault(grammar: common_pb2.Grammar) -> str | None:
    """What is wrong with a grammar, or None.

    A new one is compiled in a process of its own, which takes some tenths of a second: few bytes
    are enough for a grammar that takes for ever, or more stack than there is.
    """
    try:
        return _fault(source(grammar))
    except ValueError as error:
        return _one_line(str(error))


@lru_cache(maxsize=256)
def _fault(compiled: str) -> str | None:
    try:
        process = subprocess.run(
            [sys.executable, "-m", "gateway.grammar_check"],
            input=compiled.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_WALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # Not to be remembered: the machine may have been busy.
        raise ValueError(TOO_COMPLEX) from None
    if process.returncode != 0:
        return TOO_COMPLEX
    found = process.stdout.decode()
    return _one_line(found) or None


def _check(compiled: str) -> str | None:
    """What is wrong with a grammar as `source` gives it. May take for ever, or crash."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(compiled, limits=limits())
    if is_error:
        return " ".join(messages)
    if any(message.startswith("no tokenizer") for message in messages):
        return "special tokens and token ids cannot be part of it"
    matcher = LLMatcher(LLTokenizer("byte"), compiled, log_level=0, limits=limits())
    for step in range(_STEPS):
        if matcher.is_error():
            return TOO_COMPLEX
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return TOO_COMPLEX if step else "nothing matches it, or it is too complex"
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        if not allowed:
            break
        # Some way through it, the same each time.
        matcher.consume_token(allowed[step * 7919 % len(allowed)])
    return None


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 1] + "…"


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled = sys.stdin.buffer.read().decode()
    found: list[str] = []
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=lambda: found.append(_one_line(_check(compiled) or "")))
    thread.start()
    thread.join()
    # Fails if the check did.
    sys.stdout.buffer.write(found[0].encode())


if __name__ == "__main__":
    _main()
