"""What the logs say of a call, and what they must not."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from specdec import logs
from specdec.lm.tokenizer import token_table_sha256
from tests.models import byte_tokens, make_model, permuted_tokens
from tests.stack import pair

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is logged, as JSON lines. Logging is as it was afterwards."""
    root = logging.getLogger()
    before, level, configuration = root.handlers[:], root.level, structlog.get_config()
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    logs.configure("test", "info", "json")
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    structlog.configure(**configuration)


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_one_request_id_leads_through_the_logs_of_all_services(
    target_folder: Path, draft_folder: Path, lines: io.StringIO
) -> None:
    async with pair(target_folder, draft_folder) as stack:
        request = stack.gateway.request(PROMPT, k=3, max_new_tokens=8, ignore_eos=True)
        await stack.gateway.send(request, metadata=(("x-request-id", "mine"),))
    mine = [event for event in events(lines) if event.get("request_id") == "mine"]
    names = [event["event"] for event in mine]
    # One session each at draft and verifier, and the gateway's own two lines.
    assert sorted(names) == sorted(
        ["completion", "generation finished", "session closed", "session closed"]
    )
    (completion,) = (event for event in mine if event["event"] == "completion")
    assert completion["completion_tokens"] == 8
    assert completion["num_draft_tokens"] > 0
    assert all(event["service"] == "test" for event in mine)
    assert len({event["session_id"].partition("-")[0] for event in mine}) == 1


async def test_a_tokenizer_mismatch_is_logged_once_with_both_hashes(
    target_folder: Path, tmp_path: Path, lines: io.StringIO
) -> None:
    table = byte_tokens(300)
    permuted = permuted_tokens(300)
    other = make_model(tmp_path / "permuted", seed=1, rows=300, table=permuted)
    async with pair(target_folder, other) as stack:
        for _ in range(3):
            await stack.generate(PROMPT, k=3, max_new_tokens=8)
    (event,) = (event for event in events(lines) if event["event"] == "no speculation")
    assert token_table_sha256(table) in event["reason"]
    assert token_table_sha256(permuted) in event["reason"]


async def test_prompts_and_outputs_are_not_logged(
    target_folder: Path, draft_folder: Path, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(target_folder, draft_folder) as stack:
        result = await stack.generate("a secret", k=3, max_new_tokens=8, ignore_eos=True)
        assert stack.verifier.runtime is not None

        def broken(*arguments: Any, **options: Any) -> None:
            raise RuntimeError("the device fell off")

        monkeypatch.setattr(stack.verifier.runtime.loaded.model, "forward", broken)
        with pytest.raises(Exception, match="MODEL_FAILURE"):
            await stack.generate("another secret", k=3, max_new_tokens=8)
    text = lines.getvalue()
    assert "the device fell off" in text
    assert "secret" not in text
    assert result.text not in text
