"""The command line as people and scripts use it: as a process, on a pipe and on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import text_format
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specdec import services
from specdec.cli.supervisor import Child, ServiceDied, running
from specdec.models.cache import DEFAULT_TARGET_NAME
from specdec.v1 import gateway_pb2, gateway_pb2_grpc
from tests.models import make_model
from tests.stack import draft, free_port, gateway, pair, verifier

SPECDEC = Path(sys.executable).with_name("specdec")
PROMPT = "The quick brown fox"
ACCEPTED = gateway_pb2.TOKEN_ORIGIN_ACCEPTED
CORRECTION = gateway_pb2.TOKEN_ORIGIN_CORRECTION
BONUS = gateway_pb2.TOKEN_ORIGIN_BONUS
PLAIN = gateway_pb2.TOKEN_ORIGIN_PLAIN


# --- Running it ---------------------------------------------------------------------------------


@dataclass
class Run:
    """How a command went."""

    status: int | None
    out: str
    err: str

    @property
    def error(self) -> str:
        """What it said was wrong, which must be one line and all that it said."""
        assert self.status == 1, self
        assert self.out == "", self
        assert re.fullmatch(r"error: [^\n]+\n", self.err), self
        return self.err.removeprefix("error: ")


def environment(**changes: str) -> dict[str, str]:
    """Of a user who has set nothing."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": "1",
        **changes,
    }


@asynccontextmanager
async def started(
    *arguments: str | Path, env: dict[str, str] | None = None, **streams: Any
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A running command, ended with all that it has started when the block ends."""
    streams = {
        "stdin": asyncio.subprocess.PIPE,
        "stdout": asyncio.subprocess.PIPE,
        "stderr": asyncio.subprocess.PIPE,
        **streams,
    }
    process = await asyncio.create_subprocess_exec(
        SPECDEC, *arguments, env=env or environment(), **streams
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 30)
            except TimeoutError:
                process.kill()
        await process.wait()


async def specdec(*arguments: str | Path, stdin: str | bytes = "", **env: str) -> Run:
    """Runs a command on pipes."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    async with started(*arguments, env=environment(**env)) as process:
        out, err = await asyncio.wait_for(process.communicate(given), 60)
        return Run(process.returncode, out.decode(), err.decode())


async def on_a_terminal(*arguments: str | Path, columns: int = 80, **env: str) -> str:
    """Runs a command that succeeds on a pseudo-terminal. Gives all that it sent there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_all() -> bytes:
        read = b""
        try:
            while data := os.read(master, 1 << 16):
                read += data
        except OSError:
            pass  # how the end of a terminal looks
        return read

    try:
        async with started(
            *arguments, env=environment(**env), stdin=slave, stdout=slave, stderr=slave
        ) as process:
            os.close(slave)
            sent = await asyncio.wait_for(asyncio.to_thread(read_all), 60)
            assert await process.wait() == 0, sent
    finally:
        os.close(master)
    return sent.decode().replace("\r\n", "\n")


class Scripted(gateway_pb2_grpc.GenerationServiceServicer):
    """A gateway that says what it was told to say."""

    def __init__(self, tokens: tuple[tuple[str, int], ...], then: str) -> None:
        self._tokens, self._then = tokens, then
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.address = ""

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> Any:
        self.requests.append(request)
        self.asked.set()
        try:
            for index, (text, origin) in enumerate(self._tokens):
                chunk = gateway_pb2.Chunk(
                    text=text, token_texts=[text], token_ids=[index], origins=[origin]
                )
                yield gateway_pb2.GenerateResponse(chunk=chunk)
            if self._then == "hang":
                await asyncio.Event().wait()
            elif self._then == "fail":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            completion = gateway_pb2.Completion(
                finish_reason=gateway_pb2.FINISH_REASON_STOP, matched_token_id=0
            )
            yield gateway_pb2.GenerateResponse(completion=completion)
        finally:
            self.left.set()


@asynccontextmanager
async def scripted(*tokens: tuple[str, int], then: str = "complete") -> AsyncIterator[Scripted]:
    server = grpc.aio.server()
    servicer = Scripted(tokens, then)
    gateway_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield servicer
    finally:
        await server.stop(None)


# --- Help ---------------------------------------------------------------------------------------


async def test_help_fits_a_terminal_and_says_something_of_everything() -> None:
    overview = await specdec("--help", COLUMNS="80")
    commands = ("demo", "up", "generate", "health", "draft", "verifier", "gateway", "models")
    for command in commands:
        assert re.search(rf"^  {command} +\w.*\.$", overview.out, re.MULTILINE), command
    assert "..." not in overview.out.split("Commands:")[1]
    for command in ("demo", "up", "generate", "health", "models"):
        run = await specdec(command, "--help", COLUMNS="80")
        assert (run.status, run.err) == (0, "")
        assert run.out.startswith(f"Usage: specdec {command} ")
        assert max(map(len, run.out.splitlines())) <= 80
        # Every flag has a text, beside it or on the next line.
        flags = re.findall(r"^  (-.*)\n(?=(.*))", run.out, re.MULTILINE)
        assert flags
        for flag, next_line in flags:
            assert re.search(r"\S  +\S", flag) or next_line.startswith(" " * 10), flag


@pytest.mark.slow
async def test_the_help_of_a_service_explains_its_flags_and_variables() -> None:
    run = await specdec("draft", "--help", COLUMNS="80")
    assert (run.status, run.err) == (0, "")
    assert run.out.startswith("usage: specdec draft ")
    flags = set(re.findall(r"^  --([a-z-]+)", run.out, re.MULTILINE))
    assert {"port", "model", "device", "keep-layers"} <= flags
    text = " ".join(run.out.split())
    for flag in flags:
        variable = f"SPECDEC_DRAFT_{flag.replace('-', '_').upper()}"
        assert re.search(rf"--{flag} [^-]*[a-z].* \[env: {variable}\]", text), flag


# --- generate: what is sent ---------------------------------------------------------------------


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


# --- generate: what is shown --------------------------------------------------------------------

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


# --- generate: interruptions and errors ---------------------------------------------------------


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


# --- generate: with real models -----------------------------------------------------------------


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
        *("draft_us", "verify_us", "wire_us", "queue_us"),
    }
    assert speculation["acceptance_rule"] == "coupled"
    assert speculation["num_draft_tokens"] == sum(speculation["drafted_per_position"]) > 0
    assert speculation["num_accepted_tokens"] == sum(speculation["accepted_per_position"])
    assert len(speculation["drafted_per_position"]) == 5
    for key in ("draft_us", "verify_us", "wire_us", "queue_us"):
        assert type(speculation[key]) is int
    assert speculation["verify_us"] > 0
    assert speculation["fallback_reason"] == ""


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


# --- health -------------------------------------------------------------------------------------


def where(gateway: str, draft: str, verifier: str) -> tuple[str, ...]:
    return ("--gateway", gateway, "--draft", draft, "--verifier", verifier)


async def test_health_tells_of_each_service_and_by_its_status(target_folder: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    async with (
        verifier(target_folder) as (verifier_address, _),
        draft(target_folder) as (draft_address, _),
        gateway(verifier_address, draft_address) as front,
    ):
        all_three = where(front.address, draft_address, verifier_address)
        good = await specdec("health", *all_three)
        assert (good.status, good.err) == (0, "")
        for service, line in zip(services.ALL, good.out.splitlines(), strict=True):
            assert re.fullmatch(rf"{service.name} +127\.0\.0\.1:\d+ +ready", line)

        without_draft = where(front.address, nobody, verifier_address)
        bad = await specdec("health", *without_draft)
        assert bad.status == 1
        assert [line.endswith(" ready") for line in bad.out.splitlines()] == [True, False, True]
        assert "nothing answers" in bad.out

        chosen = await specdec("health", "gateway", "verifier", *without_draft)
        assert chosen.status == 0
        assert "draft" not in chosen.out

        swapped = await specdec("health", *where(front.address, verifier_address, draft_address))
        assert swapped.status == 1
        assert "what listens there is not the draft" in swapped.out
        assert "what listens there is not the verifier" in swapped.out

        unknown = await specdec("health", "drafts")
        assert unknown.status == 2
        assert "gateway, draft, verifier" in unknown.err


async def test_health_can_wait(target_folder: Path) -> None:
    port = free_port()
    command = ("health", "verifier", "--verifier", f"127.0.0.1:{port}", "--wait")
    begun = time.monotonic()
    assert (await specdec(*command, "1")).status == 1
    assert time.monotonic() - begun >= 1
    async with started(*command, "60") as process:
        await asyncio.sleep(1.5)
        assert process.returncode is None
        async with verifier(target_folder, port=port):
            out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    assert out.decode().endswith(" ready\n")


# --- The supervisor -----------------------------------------------------------------------------


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a child whose program is given."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    header = (
        "import json, os, signal, sys, time\n"
        "def log(event, **more): print(json.dumps({'event': event, **more}), file=sys.stderr)\n"
    )

    def make(program: str) -> Child:
        (tmp_path / "fake_service.py").write_text(header + program)
        return Child(services.DRAFT, "fake_service", free_port(), ())

    return make


async def test_a_child_that_dies_is_named_with_its_reason_and_started_again(fake: Any) -> None:
    child = fake(
        "print('a warning of long ago', file=sys.stderr)\n"
        "log('ready')\n"
        "time.sleep(0.5)\n"
        "sys.exit(3)\n"
    )
    reported: asyncio.Queue[str] = asyncio.Queue()
    async with running([child], lambda service, line: reported.put_nowait(line)):
        lines = [await asyncio.wait_for(reported.get(), 10) for _ in range(3)]
        assert lines[:2] == ["ready", "died (exit 3); starting it again in 1 s"]
        assert lines[2] == "ready"
        assert child.process is not None
        child.process.kill()
        line = await asyncio.wait_for(reported.get(), 10)
        assert line == "died (killed by SIGKILL); starting it again in 2 s"
    assert child.process.returncode is not None


async def test_a_child_may_print_a_line_without_end(fake: Any) -> None:
    # As progress bars do that are redrawn a thousand times.
    child = fake(
        "sys.stderr.write('\\r50% of the model' * 20_000)\n"
        "sys.stderr.write('x' * 1_000_000 + '\\n')\n"
        "log('ready')\n"
        "time.sleep(60)\n"
    )
    async with asyncio.timeout(20), running([child], lambda *_: None):
        assert child.ready.is_set()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("sys.exit('error: no such model')", "exit 1: no such model"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
    ],
)
async def test_a_child_that_cannot_start_is_named_with_its_last_words(
    fake: Any, end: str, reason: str
) -> None:
    child = fake(f"print('Loading: 10%', file=sys.stderr, flush=True)\n{end}\n")
    with pytest.raises(ServiceDied) as died:
        async with running([child], lambda *_: None):
            pass
    assert str(died.value) == f"the draft could not start ({reason})"


async def test_a_gateway_counts_as_ready_once_it_has_found_its_peers(fake: Any) -> None:
    child = fake(
        "log('peer', peer='verifier', state='READY', reason='')\n"
        "log('ready')\n"
        "time.sleep(0.3)\n"
        "log('peer', peer='draft', state='CONNECTING', reason='lost')\n"
        "time.sleep(0.3)\n"
        "log('peer', peer='draft', state='READY', reason='')\n"
        "time.sleep(60)\n"
    )
    child.service, child.peers = services.GATEWAY, frozenset({"verifier", "draft"})
    lines: list[str] = []
    async with asyncio.timeout(20), running([child], lambda _, line: lines.append(line)):
        assert lines == ["verifier: connected", "ready", "draft: lost", "draft: connected"]


async def test_a_port_in_use_ends_the_start_with_the_services_reason() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        child = Child(services.GATEWAY, "gateway", port, ())
        with pytest.raises(ServiceDied, match=f"the gateway could not start .*{port}.* in use"):
            async with running([child], lambda *_: None):
                pass


async def test_a_child_that_will_not_end_is_killed_when_asked_again(fake: Any) -> None:
    child = fake("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nlog('ready')\ntime.sleep(60)\n")

    async def stay() -> None:
        async with running([child], lambda *_: None) as keeper:
            await keeper

    task = asyncio.create_task(stay())
    await asyncio.wait_for(child.ready.wait(), 10)
    task.cancel()
    await asyncio.wait({task}, timeout=0.5)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert child.process.returncode == -signal.SIGKILL


# --- up and demo --------------------------------------------------------------------------------


def left_running(*ports: int) -> list[str]:
    """The command lines of processes that were started for any of these ports."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(re.search(rf"--port {port} ", line) for port in ports):
            found.append(f"{file.parent.name} {line}")
    return found


class Lines:
    """The output of a running command, read as it comes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self.seen: list[str] = []

    async def until(self, pattern: str) -> str:
        """Reads on to a line that matches."""
        async with asyncio.timeout(60):
            while line := (await self._stream.readline()).decode():
                self.seen.append(line.rstrip("\n"))
                if re.search(pattern, line):
                    return self.seen[-1]
        raise AssertionError(f"no {pattern!r} in {self.seen}")


async def interrupted(process: asyncio.subprocess.Process) -> Run:
    """Ends a command as Ctrl-C does. Gives what it said after that."""
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return Run(process.returncode, (out or b"").decode(), (err or b"").decode())


@dataclass
class Ports:
    """Of one pair of services."""

    gateway: int
    draft: int
    verifier: int

    def flags(self) -> tuple[str, ...]:
        return (
            *("--gateway-port", str(self.gateway), "--draft-port", str(self.draft)),
            *("--verifier-port", str(self.verifier)),
        )

    def left_running(self) -> list[str]:
        return left_running(self.gateway, self.draft, self.verifier)


@pytest.fixture
def ports() -> Ports:
    return Ports(free_port(), free_port(), free_port())


@pytest.mark.slow
async def test_up_keeps_the_services_up_until_ctrl_c(
    target_folder: Path, draft_folder: Path, ports: Ports
) -> None:
    address = f"127.0.0.1:{ports.gateway}"
    command = ("up", "--target", target_folder, "--draft", draft_folder, "--dtype", "float32")

    async def generate(count: int) -> dict[str, Any]:
        run = await specdec(
            *("generate", "--json", "--address", address, "--temperature", "0", "--ignore-eos"),
            *("--max-new-tokens", str(count), PROMPT),
        )
        assert run.status == 0, run.err
        answer: dict[str, Any] = json.loads(run.out)
        return answer

    async with started(*command, *ports.flags()) as process:
        lines = Lines(process)
        ready = await lines.until("^Ready")
        assert ready == f'Ready. Try: specdec generate --address {address} "Once upon a time"'
        start = "\n".join(lines.seen)
        for name, port in vars(ports).items():
            assert re.search(rf"^{name} +listening on 127\.0\.0\.1:{port}\b", start, re.MULTILINE)
        for name in ("draft", "verifier"):
            assert re.search(rf"^{name} +ready after \d+\.\d s: float32 on cpu$", start, re.M)
            assert re.search(rf"^gateway +{name}: connected$", start, re.M)
        healthy = await specdec(
            *("health", "--gateway", address, "--draft", f"127.0.0.1:{ports.draft}"),
            *("--verifier", f"127.0.0.1:{ports.verifier}"),
        )
        assert healthy.status == 0, healthy.out

        # The draft is used from the first generation on.
        first = await generate(100)
        assert first["speculation"]["num_draft_tokens"] > 0
        assert first["speculation"]["fallback_rounds"] == 0

        [draft_line] = left_running(ports.draft)
        os.kill(int(draft_line.split()[0]), signal.SIGKILL)
        without = await generate(100)
        assert without["token_ids"] == first["token_ids"]
        assert without["speculation"]["fallback_rounds"] > 0
        died = await lines.until("^draft .*died")
        assert died.endswith("died (killed by SIGKILL); starting it again in 1 s")
        await lines.until("^draft +ready after")
        await lines.until("^gateway +draft: connected")
        again = await generate(100)
        assert again["token_ids"] == first["token_ids"]
        assert again["speculation"]["num_draft_tokens"] > 0
        assert again["speculation"]["fallback_rounds"] == 0

        end = await interrupted(process)
        assert end.status == 0
        assert end.err == ""
        assert end.out.endswith("stopped\n")
        assert "Traceback" not in "\n".join(lines.seen) + end.out
        assert "died" not in end.out
    assert ports.left_running() == []


@pytest.mark.slow
async def test_up_lets_calls_finish_unless_ctrl_c_comes_again(tmp_path: Path, ports: Ports) -> None:
    model = make_model(tmp_path / "model", seed=1, rows=300, context=20_000)
    command = ("up", "--target", model, "--dtype", "float32")
    async with started(*command, *ports.flags()) as process:
        lines = Lines(process)
        await lines.until("^There is no --draft, so every token is decoded plainly")
        address = f"127.0.0.1:{ports.gateway}"
        async with started(
            *("generate", PROMPT, "--ignore-eos", "--max-new-tokens", "19000"),
            *("--address", address),
        ) as call:
            assert call.stdout is not None
            assert await asyncio.wait_for(call.stdout.read(1), 30)
            process.send_signal(signal.SIGINT)
            await lines.until("^stopping")
            await asyncio.sleep(0.5)
            assert process.returncode is None
            assert call.returncode is None
            begun = time.monotonic()
            end = await interrupted(process)
            assert time.monotonic() - begun < 5
            assert (end.status, end.out, end.err) == (0, "stopped\n", "")
            _, err = await asyncio.wait_for(call.communicate(), 30)
            assert call.returncode == 1
            assert err.startswith(b"error: "), err
    assert ports.left_running() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_up_ends_while_it_starts(
    target_folder: Path, ports: Ports, number: signal.Signals
) -> None:
    command = ("up", "--target", target_folder, "--draft", target_folder)
    async with started(*command, *ports.flags()) as process:
        await Lines(process).until("^gateway +listening")
        process.send_signal(number)
        out, err = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, err) == (0, b"")
        assert out.endswith(b"stopped\n")
    assert ports.left_running() == []


@pytest.mark.slow
async def test_up_survives_that_nobody_reads_its_output(target_folder: Path, ports: Ports) -> None:
    command = ("up", "--target", target_folder)
    read, write = os.pipe()
    async with started(*command, *ports.flags(), stdout=write) as process:
        os.close(write)
        os.close(read)
        wait = ("health", "gateway", "--gateway", f"127.0.0.1:{ports.gateway}", "--wait", "60")
        assert (await specdec(*wait)).status == 0
        assert (await interrupted(process)).status == 0
    assert ports.left_running() == []


@pytest.mark.slow
async def test_up_without_a_model_names_the_service_and_leaves_nothing(
    target_folder: Path, tmp_path: Path, ports: Ports
) -> None:
    missing = tmp_path / "missing"
    run = await specdec("up", "--target", target_folder, "--draft", missing, *ports.flags())
    assert run.status == 1
    assert re.fullmatch(r"error: the draft could not start \(exit 1: [^\n]+\)\n", run.err)
    assert str(missing) in run.err
    assert "Traceback" not in run.out
    assert ports.left_running() == []


async def test_up_with_a_port_in_use_names_the_service_and_the_flag(
    target_folder: Path, ports: Ports
) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", ports.draft))
        busy.listen()
        command = ("up", "--target", target_folder, "--draft", target_folder)
        error = (await specdec(*command, *ports.flags())).error
        assert error.startswith(f"the draft cannot listen on 127.0.0.1:{ports.draft} (")
        assert "--draft-port" in error
    ports.verifier = ports.draft
    assert "--verifier-port" in (await specdec(*command, *ports.flags())).error
    assert ports.left_running() == []


async def test_up_without_the_default_model_says_how_to_get_it(tmp_path: Path) -> None:
    error = (await specdec("up", SPECDEC_CACHE_DIR=str(tmp_path))).error
    assert "`specdec models pull`" in error


@pytest.fixture
def pulled(tmp_path: Path, target_folder: Path) -> Path:
    """A cache with a tiny model in place of the default one, which has 30 layers too."""
    folder = tmp_path / "models" / DEFAULT_TARGET_NAME
    config = LlamaConfig.from_pretrained(target_folder, num_hidden_layers=30)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(target_folder).save_pretrained(folder)
    return tmp_path


def demo_ports(lines: list[str]) -> list[int]:
    return [int(m[1]) for line in lines if (m := re.search(r"listening on .*?:(\d+)", line))]


@pytest.mark.slow
async def test_demo_shows_one_answer_and_leaves_nothing(pulled: Path) -> None:
    run = await specdec(
        *("demo", "--prompt", "[bold]hello", "--max-new-tokens", "8"), SPECDEC_CACHE_DIR=str(pulled)
    )
    assert (run.status, run.err) == (0, ""), run
    assert "\n[bold]hello\n" in run.out
    assert re.search(r"^\d tokens? in .* rounds?, accepted \d+ of \d+ drafted", run.out, re.M)
    assert "without draft" not in run.out
    ports = demo_ports(run.out.splitlines())
    assert len(ports) == 3
    assert left_running(*ports) == []


@pytest.mark.slow
async def test_ctrl_c_ends_a_demo_that_starts(pulled: Path) -> None:
    async with started("demo", env=environment(SPECDEC_CACHE_DIR=str(pulled))) as process:
        lines = Lines(process)
        await lines.until("^gateway +listening")
        end = await interrupted(process)
        assert (end.status, end.err) == (130, "")
        assert "Traceback" not in end.out
    assert left_running(*demo_ports(lines.seen + end.out.splitlines())) == []
