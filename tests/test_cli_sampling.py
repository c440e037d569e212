"""`specdec generate`: the flags that shape the output, and those that ask for more of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf import text_format

from specdec.v1 import gateway_pb2
from tests.cli import scripted, specdec
from tests.stack import Stack, pair


@pytest_asyncio.fixture(scope="module")
async def stack(target_folder: Path, draft_folder: Path) -> AsyncIterator[Stack]:
    """One stack for all tests. What nobody awaited on its event loop fails the last of them."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with pair(target_folder, draft_folder) as running:
        yield running
    assert not reported, reported


async def test_flags_are_sent_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type":"null"}')
    flags = [
        *("--repetition-penalty", "1.5", "--presence-penalty", "-0.5"),
        *("--frequency-penalty", "0.25", "--min-new-tokens", "3", "--include-stop-string"),
        *("--json-schema", f"@{tmp_path / 'schema.json'}"),
    ]
    async with scripted() as server:
        run = await specdec("generate", "x", "--address", server.address, *flags)
        assert run.status == 0, run.err
    [sent] = server.requests
    sent.speculation.SetInParent()
    expected = (
        'text: "x" sampling { repetition_penalty: 1.5 presence_penalty: -0.5 '
        'frequency_penalty: 0.25 grammar { json_schema: "{\\"type\\":\\"null\\"}" } } '
        "stopping { min_new_tokens: 3 include_stop_string: true } speculation {}"
    )
    assert sent == text_format.Parse(expected, gateway_pb2.GenerateRequest())


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--regex", "@a+"], "regex", "@a+"),
        (["--grammar", 'start: "a"'], "ebnf", 'start: "a"'),
        (["--json-schema", "{}"], "json_schema", "{}"),
    ],
)
async def test_a_form_is_sent_as_its_kind(flags: list[str], field: str, value: str) -> None:
    async with scripted() as server:
        run = await specdec("generate", "x", "--address", server.address, *flags)
        assert run.status == 0, run.err
    form = server.requests[0].sampling.grammar
    assert (form.WhichOneof("kind"), getattr(form, field)) == (field, value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logprobs", "2"], "--json only"),
        (["--json", "--logprobs", "-1"], "out of range"),
        (["-n", "-1"], "out of range"),
        (["--regex", "a", "--json-schema", "{}"], "only one of"),
        (["--grammar", "@/no/such/file"], "cannot read /no/such/file"),
        (["--min-new-tokens", "-1"], "out of range"),
    ],
)
async def test_flags_that_cannot_be_are_refused(flags: list[str], message: str) -> None:
    run = await specdec("generate", "x", *flags)
    assert (run.status, run.out) == (2, "")
    assert message in run.err


async def test_a_form_is_kept_and_a_broken_one_named(stack: Stack) -> None:
    base = ("generate", "x", "--address", stack.gateway.address, "--max-new-tokens", "30")
    run = await specdec(*base, "--regex", "[a-c]{4}")
    assert (run.status, bool(re.fullmatch("[a-c]{4}\n", run.out))) == (0, True), run
    broken = await specdec(*base, "--regex", "(a")
    assert "sampling.grammar" in broken.error


async def test_log_probabilities_are_printed_with_json(stack: Stack) -> None:
    flags = ("--json", "--logprobs", "2", "--max-new-tokens", "6", "--seed", "3", "--ignore-eos")
    run = await specdec("generate", "x", "--address", stack.gateway.address, *flags)
    assert run.status == 0, run.err
    answer = json.loads(run.out)
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    assert len(answer["token_ids"]) == 6
    for entry in answer["logprobs"]:
        assert entry["logprob"] < 0
        first, second = entry["top"]
        assert first["logprob"] >= second["logprob"]
        assert first["logprob"] >= entry["logprob"]
        assert set(first) == {"token_id", "logprob"}


async def test_samples_are_a_list_with_json_and_one_after_the_other_without(stack: Stack) -> None:
    base = ("generate", "x", "--address", stack.gateway.address, "--seed", "5")
    flags = ("--regex", "[a-z]{3,9}", "--max-new-tokens", "20")
    one = json.loads((await specdec(*base, *flags, "--json")).out)
    assert "samples" not in one
    assert "logprobs" not in one
    run = await specdec(*base, *flags, "--json", "-n", "3")
    assert run.status == 0, run.err
    answer = json.loads(run.out)
    assert list(answer) == ["samples"]
    texts = [sample["text"] for sample in answer["samples"]]
    assert len(set(texts)) > 1
    assert all(set(sample) == set(one) for sample in answer["samples"])
    assert texts[0] == one["text"]

    shown = await specdec(*base, *flags, "--samples", "3")
    assert shown.status == 0, shown.err
    numbered = [f"[{number}/3]\n{text}\n" for number, text in enumerate(texts, 1)]
    assert shown.out == "\n".join(numbered)
    assert len(re.findall(r"^\[\d/3\] \d+ tokens? in ", shown.err, re.MULTILINE)) == 3
