"""`specdec generate` as people and scripts use it: as a process, on a pipe and on a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from transformers import AutoTokenizer

from specdec.v1 import gateway_pb2
from tests.cli import (
    ACCEPTED,
    BONUS,
    CORRECTION,
    PLAIN,
    PROMPT,
    on_a_terminal,
    scripted,
    specdec,
    started,
)
from tests.stack import free_port, pair, verifier

# --- What is sent -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "request_text"),
    [
        ([PROMPT], f'text: "{PROMPT}" sampling {{}} stopping {{}} speculation {{}}'),
        (
            [
                *("--chat", "--temperature", "0.5", "--top-k", "7", "--top-p", "0.9"),
                *("--min-p", "0.1", "--seed", "18446744073709551615", "--max-new-tokens", "9"),
                *("--stop", "a", "--stop", "b", "--ignore-eos", "--no-speculation"),
                *("--rule", "block", "-k", "3", "hi"),
            ],
            'chat { messages { role: "user" content: "hi" } } '
            "sampling { temperature: 0.5 top_k: 7 top_p: 0.9 min_p: 0.1 "
            "seed: 18446744073709551615 } "
            'stopping { max_new_tokens: 9 stop_strings: "a" stop_strings: "b" ignore_eos: true } '
            "speculation { enabled: false num_draft_tokens: 3 "
            "acceptance_rule: ACCEPTANCE_RULE_BLOCK }",
        ),
        (
            ["hi", "--temperature", "0", "--seed", "0", "-k", "0", "--max-new-tokens", "0"],
            'text: "hi" sampling { temperature: 0 seed: 0 } '
            "stopping { max_new_tokens: 0 } speculation { num_draft_tokens: 0 }",
        ),
    ],
    ids=["nothing", "everything", "zeros"],
)
async def test_flags_are_sent_and_nothing_else(arguments: list[str], request_text: str) -> None:
    async with scripted() as server:
        run = await specdec("generate", "--address", server.address, *arguments)
        assert run.status == 0, run.err
    expected = text_format.Parse(request_text, gateway_pb2.GenerateRequest())
    [sent] = server.requests
    for message in ("sampling", "stopping", "speculation"):
        getattr(sent, message).SetInParent()
    assert sent == expected


async def test_a_prompt_comes_from_standard_input_unchanged() -> None:
    prompt = "  Ünïcode\n\nwith [bold]lines[/bold]\r\n\n"
    async with scripted() as server:
        run = await specdec("generate", "--address", server.address, "-", stdin=prompt)
        assert run.status == 0, run.err
    assert server.requests[0].text == prompt


async def test_a_proxy_is_not_asked_for_a_service_on_this_machine() -> None:
    async with scripted(("hi", PLAIN)) as server:
        closed = f"http://127.0.0.1:{free_port()}"
        run = await specdec("generate", "x", "--address", server.address, http_proxy=closed)
        assert (run.status, run.out) == (0, "hi\n"), run.err


# --- What is shown ------------------------------------------------------------------------------

# What a model may say: markup, an emoji's name, tabs, a line longer than any window, and control
# characters that would clear the screen, set the title, go back, and ring.
TRICKY = (
    ("[bold]not markup[/bold] :smile: http://example.com 'quoted' 123 ", ACCEPTED),
    ("\tif x:\n\t\treturn None  \n", CORRECTION),
    ("long " * 60, BONUS),
    ("\x1b[2J\x1b]0;title\x07\rback\b\x7f\x9b31m", PLAIN),
    ("\n\n  end", ACCEPTED),
)
TRICKY_TEXT = "".join(text for text, _ in TRICKY)


async def test_a_pipe_gets_the_very_text() -> None:
    async with scripted(*TRICKY) as server:
        run = await specdec("generate", "x", "--address", server.address, COLUMNS="40")
    assert run.out == TRICKY_TEXT + "\n"
    assert "\x1b" not in run.err


async def test_a_text_that_ends_with_a_newline_gets_no_second_one() -> None:
    async with scripted(("line\n", PLAIN)) as server:
        run = await specdec("generate", "x", "--address", server.address)
    assert run.out == "line\n"


async def test_a_terminal_gets_the_text_with_control_characters_made_harmless() -> None:
    async with scripted(*TRICKY) as server:
        sent = await on_a_terminal(
            "generate", "x", "--address", server.address, columns=40, NO_COLOR="1"
        )
    harmless = TRICKY_TEXT.replace(
        "\x1b[2J\x1b]0;title\x07\rback\b\x7f\x9b31m", "␛[2J␛]0;title␇␍back␈␡�31m"
    )
    shown, _, rest = sent.partition("  end\n")
    assert shown + "  end" == harmless
    assert "\x1b[3" not in rest


async def test_a_terminal_shows_where_each_token_comes_from() -> None:
    tokens = (("a", ACCEPTED), ("c", CORRECTION), ("b", BONUS), ("p", PLAIN))
    async with scripted(*tokens) as server:
        sent = await on_a_terminal("generate", "x", "--address", server.address)
    green, yellow, cyan = (f"\x1b[{code}m{{}}\x1b[0m" for code in (32, 33, 36))
    assert sent.startswith(green.format("a") + yellow.format("c") + cyan.format("b") + "p\n")
    # The legend has the same colours.
    legend = sent.splitlines()[1]
    assert green.format("accepted") in legend
    assert yellow.format("correction") in legend
    assert cyan.format("bonus") in legend


@pytest.mark.parametrize("switch", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
async def test_colours_can_be_turned_off(switch: dict[str, str]) -> None:
    async with scripted(("a", ACCEPTED), ("c", CORRECTION)) as server:
        sent = await on_a_terminal("generate", "x", "--address", server.address, **switch)
    assert sent.startswith("ac\n")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", sent)
    assert "correction" not in sent, "a legend without colours"


async def test_an_encoding_that_lacks_a_character_is_no_error() -> None:
    async with scripted(("schön 🙂", PLAIN)) as server:
        run = await specdec("generate", "x", "--address", server.address, PYTHONIOENCODING="ascii")
    assert (run.status, run.out) == (0, "sch\\xf6n \\U0001f642\n"), run.err


async def test_a_reader_that_has_gone_is_no_traceback() -> None:
    read, write = os.pipe()
    async with (
        scripted(("line\n", PLAIN), then="hang") as server,
        started("generate", "x", "--address", server.address, stdout=write) as process,
    ):
        os.close(write)
        os.close(read)
        _, err = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, err) == (1, b"")
        await asyncio.wait_for(server.left.wait(), 5)


# --- Interruptions and errors -------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--json",)])
async def test_ctrl_c_ends_a_generation_at_once(flags: tuple[str, ...]) -> None:
    async with (
        scripted(("so far", ACCEPTED), then="hang") as server,
        started("generate", "x", *flags, "--address", server.address) as process,
    ):
        await asyncio.wait_for(server.asked.wait(), 30)
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 130
        assert time.monotonic() - begun < 2
        assert out == (b"" if flags else b"so far\n")
        assert err.strip() == b"stopped"
        await asyncio.wait_for(server.left.wait(), 5)


async def test_a_gateway_that_goes_away_is_named() -> None:
    async with scripted(("so far", PLAIN), then="fail") as server:
        run = await specdec("generate", "x", "--address", server.address)
    assert (run.status, run.out) == (1, "so far\n")
    assert run.err.startswith(f"error: the gateway at {server.address} went away")
    assert run.err.count("\n") == 1


async def test_without_a_gateway_the_error_says_what_to_do() -> None:
    address = f"127.0.0.1:{free_port()}"
    error = (await specdec("generate", "x", "--address", address)).error
    assert error.startswith(f"no gateway at {address}: start one with `specdec up`")
    assert "--address" in error
    unknown = (await specdec("generate", "x", "--address", "no-such-host.invalid:1")).error
    assert unknown.startswith("no gateway at no-such-host.invalid:1: ")


async def test_a_service_that_is_no_gateway_is_recognised(target_folder: Path) -> None:
    async with verifier(target_folder) as (address, _):
        error = (await specdec("generate", "x", "--address", address)).error
    assert error == f"what listens at {address} is not a gateway\n"


async def test_a_gateway_without_a_verifier_is_not_taken_for_none() -> None:
    # The gateway's health is never good here, so tests.stack cannot start it.
    port, nobody = free_port(), free_port()
    async with started(
        *("gateway", "--port", str(port), "--verifier-address", f"127.0.0.1:{nobody}")
    ) as process:
        assert process.stderr is not None
        await asyncio.wait_for(process.stderr.readuntil(b"listening"), 30)
        error = ""
        # The reason that it gives then is of its own connection, not of this one.
        while "failed to connect" not in error:
            error = (await specdec("generate", "x", "--address", f"127.0.0.1:{port}")).error
            assert error.startswith("NOT_READY: no verifier: ")
            assert f"127.0.0.1:{nobody}" in error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["x", "--seed", "18446744073709551616"], "--seed: 18446744073709551616 is out of range"),
        (["x", "--top-k", "-1"], "--top-k: -1 is out of range"),
        (["x", "--rule", "best"], "'--rule': .*'best' is not one of 'rejection', 'block', 'coup"),
        (["x", "--temperature", "hot"], "'--temperature'"),
        (["x", "--heat", "1"], "No such option: --heat"),
        ([], "Missing argument"),
    ],
)
async def test_flags_that_cannot_be_are_named(arguments: list[str], complaint: str) -> None:
    run = await specdec("generate", *arguments)
    assert (run.status, run.out) == (2, "")
    assert re.search(complaint, run.err.splitlines()[-1]), run.err
    assert "Traceback" not in run.err


async def test_input_that_is_not_text_is_refused() -> None:
    error = (await specdec("generate", "-", stdin=b"caf\xe9")).error
    assert error == "standard input is not UTF-8 text\n"
    run = await specdec("generate", os.fsdecode(b"caf\xe9"))
    assert run.status == 2
    assert "PROMPT" in run.err.splitlines()[-1]


async def test_what_the_server_refuses_is_one_line_that_names_every_field(
    target_folder: Path,
) -> None:
    async with pair(target_folder, None) as stack:
        address = stack.gateway.address
        error = (
            await specdec(
                *("generate", "x", "--address", address, "--temperature", "-1", "--top-p", "2"),
                *("--max-new-tokens", "0", "--stop", "", "-k", "999"),
            )
        ).error
        for field in (
            "sampling.temperature: must be within [0, 100]",
            "sampling.top_p: ",
            "stopping.max_new_tokens: ",
            "stopping.stop_strings[0]: ",
            "speculation.num_draft_tokens: ",
        ):
            assert field in error
        assert (
            "text: must not be empty" in (await specdec("generate", "", "--address", address)).error
        )


# --- With real models ---------------------------------------------------------------------------


async def test_json_is_one_object_with_the_documented_keys(
    target_folder: Path, draft_folder: Path
) -> None:
    async with pair(target_folder, draft_folder) as stack:
        run = await specdec(
            *("generate", "--json", "-k", "5", "--seed", "3", "--max-new-tokens", "30"),
            *("--address", stack.gateway.address, PROMPT),
        )
        direct = await stack.generate(PROMPT, k=5, seed=3, max_new_tokens=30)
    assert (run.status, run.err) == (0, "")
    assert run.out.endswith("}\n")
    assert run.out.count("\n") == 1
    answer = json.loads(run.out)
    assert set(answer) == {
        *("text", "token_ids", "finish_reason", "matched", "usage", "seed", "speculation")
    }
    assert answer["text"] == direct.text
    assert answer["token_ids"] == direct.token_ids
    assert answer["seed"] == 3
    assert answer["usage"] == {
        "prompt_tokens": direct.completion.usage.prompt_tokens,
        "cached_tokens": 0,
        "completion_tokens": len(direct.token_ids),
    }
    speculation = answer["speculation"]
    assert set(speculation) == {
        *("acceptance_rule", "rounds", "num_draft_tokens", "num_accepted_tokens"),
        *("acceptance_rate", "mean_acceptance_length", "accepted_per_position"),
        *("drafted_per_position", "fallback_rounds", "fallback_reason", "stale_proposals"),
        *("draft_us", "verify_us", "wire_us", "queue_us", "draft_cached_tokens"),
        *("undrafted_rounds", "run_ahead_hits", "run_ahead_misses"),
        *("verifier_resumptions", "draft_resumptions"),
    }
    assert speculation["acceptance_rule"] == "coupled"
    assert speculation["num_draft_tokens"] == sum(speculation["drafted_per_position"]) > 0
    assert speculation["num_accepted_tokens"] == sum(speculation["accepted_per_position"])
    assert len(speculation["drafted_per_position"]) == 5
    for key in ("draft_us", "verify_us", "wire_us", "queue_us"):
        assert type(speculation[key]) is int
    assert speculation["verify_us"] > 0
    assert speculation["fallback_reason"] == ""


@pytest.mark.slow
async def test_options_have_their_effect(target_folder: Path, draft_folder: Path) -> None:
    async with pair(target_folder, draft_folder) as stack:

        async def generate(*flags: str, stdin: str = "", prompt: str = PROMPT) -> dict[str, Any]:
            run = await specdec(
                *("generate", "--json", "--address", stack.gateway.address),
                *("--max-new-tokens", "24", *flags, prompt),
                stdin=stdin,
            )
            assert run.status == 0, run.err
            answer: dict[str, Any] = json.loads(run.out)
            return answer

        greedy = await generate("--temperature", "0")
        assert greedy["speculation"]["num_draft_tokens"] > 0
        assert len(greedy["token_ids"]) == 24
        assert greedy["finish_reason"] == "length"
        assert greedy["matched"] is None

        plain = await generate("--temperature", "0", "--no-speculation")
        assert plain["token_ids"] == greedy["token_ids"]
        assert plain["speculation"]["num_draft_tokens"] == 0
        assert plain["speculation"]["rounds"] == 24
        assert plain["speculation"]["fallback_rounds"] == 0

        # Each of these leaves the most likely token alone.
        for flag, value in (("--top-k", "1"), ("--top-p", "1e-9"), ("--min-p", "1")):
            assert (await generate(flag, value))["token_ids"] == greedy["token_ids"], flag

        for rule in ("rejection", "block", "coupled"):
            answer = await generate("--rule", rule, "-k", "2", "--seed", "1")
            assert answer["speculation"]["acceptance_rule"] == rule
            assert len(answer["speculation"]["drafted_per_position"]) == 2

        seeded = await generate("--seed", "7", "--temperature", "2")
        assert (await generate("--seed", "7", "--temperature", "2"))["text"] == seeded["text"]
        assert (await generate("--seed", "8", "--temperature", "2"))["text"] != seeded["text"]
        assert (await generate("--seed", "7"))["text"] != seeded["text"]

        stop = greedy["text"][4:6]
        stopped = await generate("--temperature", "0", "--stop", "never", "--stop", stop)
        assert stopped["text"] == greedy["text"][: greedy["text"].index(stop)]
        assert (stopped["finish_reason"], stopped["matched"]) == ("stop", stop)

        piped = await generate("--temperature", "0", stdin=PROMPT, prompt="-")
        assert piped["token_ids"] == greedy["token_ids"]
        chat = await generate("--temperature", "0", "--chat")
        rendered = f"user:{PROMPT}\nassistant:"
        tokenizer = AutoTokenizer.from_pretrained(target_folder)
        assert chat["usage"]["prompt_tokens"] == len(tokenizer.encode(rendered))


async def test_ignore_eos_goes_on_after_the_end(target_folder: Path) -> None:
    async with pair(target_folder, None) as stack:
        for seed in range(200):
            result = await stack.generate(PROMPT, seed=seed, max_new_tokens=40)
            if result.completion.finish_reason == gateway_pb2.FINISH_REASON_STOP:
                break
        flags = ("--json", "--seed", str(seed), "--max-new-tokens", "40")
        command = ("generate", PROMPT, "--address", stack.gateway.address, *flags)
        ended = json.loads((await specdec(*command)).out)
        went_on = json.loads((await specdec(*command, "--ignore-eos")).out)
    assert (ended["finish_reason"], ended["matched"]) == ("stop", 0)
    assert went_on["finish_reason"] == "length"
    assert went_on["token_ids"][: len(ended["token_ids"])] == ended["token_ids"]


async def test_text_and_statistics_go_apart(target_folder: Path, draft_folder: Path) -> None:
    async with pair(target_folder, draft_folder) as stack:
        # Random bytes: the text has about everything in it that a terminal could trip over.
        options: dict[str, Any] = {"seed": 5, "temperature": 3.0, "max_new_tokens": 200}
        direct = await stack.generate(PROMPT, ignore_eos=True, **options)
        run = await specdec(
            *("generate", PROMPT, "--address", stack.gateway.address, "--ignore-eos"),
            *("--seed", "5", "--temperature", "3", "--max-new-tokens", "200"),
        )
    assert run.status == 0
    assert run.out == direct.text + ("" if direct.text.endswith("\n") else "\n")
    assert re.fullmatch(
        r"200 tokens in \d+\.\d s \(\d+\.\d/s\), \d+ rounds, accepted \d+ of \d+ drafted "
        r"\(\d+%\), mean acceptance length \d\.\d\d\n",
        run.err,
    )
