"""Services start, or say in one line why not; they say when they are ready, and end on a signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    Lfm2Config,
    MambaConfig,
    MambaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    T5Config,
)

import specdec.lm.serve
from specdec import services
from specdec.cli.health import wait_until_ready
from specdec.errors import reason_of
from specdec.lm.tokenizer import token_table_sha256
from specdec.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from tests import stack
from tests.models import byte_tokens, make_model, make_tokenizer
from verifier_service.service import VerifierServicer

ROWS = 300


def environment(**variables: str) -> dict[str, str]:
    """That of a service which is told everything by its flags."""
    inherited = {k: v for k, v in os.environ.items() if not k.upper().startswith("SPECDEC_")}
    return {**inherited, "OMP_NUM_THREADS": "1", **variables}


# A service in a process of its own.


@dataclass
class Running:
    """A service that was started."""

    process: subprocess.Popen[bytes]
    log: Path

    async def end(self, seconds: float) -> int:
        """Sends SIGTERM and waits so long for the end. Returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, seconds)

    def events(self) -> list[str]:
        """The events that it logged; there must be nothing but log lines."""
        return [json.loads(line)["event"] for line in self.log.read_text().splitlines()]


@contextmanager
def process(
    module: str,
    folder: Path,
    port: int,
    *,
    variables: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[Running]:
    """Runs a service with these settings. Its log goes to `folder`."""
    settings = {"port": port, "grace_seconds": 1, **settings}
    if module == "gateway":
        settings.setdefault("draft_address", "")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    log = folder / f"{module}.log"
    with log.open("w") as stderr:
        started = subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            env=environment(**(variables or {})),
            stderr=stderr,
        )
    try:
        yield Running(started, log)
    finally:
        started.kill()
        started.wait()


# What keeps a service from starting.


def run_gateway(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_port_in_use_ends_the_start_with_one_line_that_says_what_to_do() -> None:
    with socket.socket() as taken:
        # As willing to share the port as it can be: a service must not take half of the calls.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run_gateway("--port", address.partition(":")[2])
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: cannot listen on {address}: ")
    assert "choose another with --port or --host" in line
    assert result.stdout == ""


def test_an_address_of_another_machine_ends_the_start_in_the_same_way() -> None:
    result = run_gateway("--host", "203.0.113.1", "--port", "50051")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: cannot listen on 203.0.113.1:50051: ")


def _with_tokenizer(folder: Path, model: Any) -> Path:
    """Saves a model, or only a config, and a tokenizer beside it."""
    model.save_pretrained(folder)
    make_tokenizer(byte_tokens(ROWS)).save_pretrained(folder)
    return folder


def _missing(folder: Path) -> Path:
    return folder


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _spoilt(file: str, size: Callable[[int], int]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        make_model(folder, seed=1, rows=ROWS)
        os.truncate(folder / file, size((folder / file).stat().st_size))
        return folder

    return make


def _without_weights(folder: Path) -> Path:
    make_model(folder, seed=1, rows=ROWS)
    (folder / "model.safetensors").unlink()
    return folder


def _without_a_tensor(folder: Path) -> Path:
    make_model(folder, seed=1, rows=ROWS)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _without_tokenizer(folder: Path) -> Path:
    make_model(folder, seed=1, rows=ROWS)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    return folder


def _too_many_ids(folder: Path) -> Path:
    return make_model(folder, seed=1, rows=ROWS - 20, table=byte_tokens(ROWS))


def _junk_gguf(folder: Path) -> Path:
    file = folder.with_suffix(".gguf")
    file.write_bytes(b"GGUF" + bytes(range(200)))
    return file


SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def _mamba(folder: Path) -> Path:
    config = MambaConfig(
        vocab_size=ROWS, hidden_size=32, num_hidden_layers=2, state_size=4, **SPECIAL
    )
    return _with_tokenizer(folder, MambaForCausalLM(config))


def _hybrid(folder: Path) -> Path:
    config = Lfm2Config(
        vocab_size=ROWS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
        **SPECIAL,
    )
    return _with_tokenizer(folder, config)


def _encoder_decoder(folder: Path) -> Path:
    return _with_tokenizer(folder, T5Config(vocab_size=ROWS, d_model=32, num_layers=1, num_heads=2))


def _encoder(folder: Path) -> Path:
    config = BertConfig(
        vocab_size=ROWS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    return _with_tokenizer(folder, BertLMHeadModel(config))


def _without_cache(folder: Path) -> Path:
    config = OpenAIGPTConfig(vocab_size=ROWS, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    return _with_tokenizer(folder, OpenAIGPTLMHeadModel(config))


def _without_length(folder: Path) -> Path:
    config = BloomConfig(vocab_size=ROWS, hidden_size=32, n_layer=2, n_head=2, **SPECIAL)
    return _with_tokenizer(folder, BloomForCausalLM(config))


# How to make the files, and a part of what is said about them.
UNUSABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (_missing, "there is no file or folder"),
    "no config": (_empty, "has no config.json: give a model folder, a GGUF file or a hub id"),
    "half of the weights": (_spoilt("model.safetensors", lambda n: n // 2), "files are complete"),
    "no header of the weights": (_spoilt("model.safetensors", lambda n: 9), "files are complete"),
    "half of the config": (_spoilt("config.json", lambda n: n // 2), "files are complete"),
    "half of the tokenizer": (_spoilt("tokenizer.json", lambda n: n // 2), "files are complete"),
    "one weight too few": (_without_a_tensor, "model.layers.1.mlp.up_proj.weight"),
    "no weights": (_without_weights, "files are complete"),
    "no tokenizer": (_without_tokenizer, "files are complete"),
    "junk in a GGUF file": (_junk_gguf, "files are complete"),
    "more ids than rows": (
        _too_many_ids,
        f"its tokenizer has {ROWS} ids but the model only {ROWS - 20} embeddings",
    ),
    "recurrent": (_mamba, "architecture 'mamba' is not supported: its state cannot be rolled back"),
    "hybrid": (_hybrid, "architecture 'lfm2' is not supported: its state cannot be rolled back"),
    "encoder-decoder": (
        _encoder_decoder,
        "architecture 't5' is not supported: it is no decoder-only",
    ),
    "encoder": (_encoder, "architecture 'bert' is not supported"),
    "no cache": (_without_cache, "architecture 'openai-gpt' is not supported"),
    "no context length": (_without_length, "--max-context-length"),
}

# Runs `python -m verifier_service --model PATH` for each path, in forks of a process that has
# imported it. Prints the exit status and the standard error of each, as JSON. A service that
# starts nevertheless is ended.
FORKS = """
import json, os, runpy, signal, sys, tempfile, time
import verifier_service.service, specdec.lm.serve

outcomes = {}
for path in sys.argv[1:]:
    with tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            os.dup2(errors.fileno(), 2)
            sys.argv[1:] = ["--port", "0", "--num-threads", "1", "--model", path]
            runpy.run_module("verifier_service", run_name="__main__", alter_sys=True)
        ended = 0
        deadline = time.monotonic() + 30
        while not ended:
            time.sleep(0.02)
            content = os.pread(errors.fileno(), 1 << 20, 0)
            if b'"ready"' in content or time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
        content = os.pread(errors.fileno(), 1 << 20, 0)
        outcomes[path] = (os.waitstatus_to_exitcode(status), content.decode())
print(json.dumps(outcomes))
"""


def _is_log_line(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@pytest.mark.slow
def test_an_unusable_model_ends_the_start_with_one_line_that_says_what_to_do(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    paths = {
        case: str(make(tmp_path / case.replace(" ", "-"))) for case, (make, _) in UNUSABLE.items()
    }
    result = subprocess.run(
        [sys.executable, "-c", FORKS, *paths.values()],
        env=environment(HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert result.stderr == ""
    outcomes = json.loads(result.stdout)
    for case, (_, part) in UNUSABLE.items():
        with subtests.test(msg=case):
            status, errors = outcomes[paths[case]]
            lines = [line for line in errors.splitlines() if not _is_log_line(line)]
            assert len(lines) == 1, errors
            assert lines[0].startswith("error: ")
            assert part in lines[0]
            assert status == 1


# Health.


async def status_of(address: str, service: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=5
        )
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name


async def first_status_of(address: str) -> str:
    """Waits for the first answer to a health check."""
    for _ in range(600):
        with suppress(grpc.aio.AioRpcError):
            return await status_of(address, "")
        await asyncio.sleep(0.1)
    raise AssertionError(f"nothing answers at {address}")


def reason_and_retry_of(error: grpc.aio.AioRpcError) -> tuple[str, bool]:
    """The reason of an error, and whether it says when to try again."""
    status = rpc_status.from_call(error)
    assert status is not None
    retry = error_details_pb2.RetryInfo()
    return reason_of(error) or "", any(detail.Unpack(retry) for detail in status.details)


@dataclass
class SlowLoad:
    """Loads as always, but not before it is allowed to."""

    begun: threading.Event
    allowed: threading.Event


@pytest.fixture
def slow_load(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowLoad]:
    slow = SlowLoad(threading.Event(), threading.Event())
    load = specdec.lm.serve.load

    def wait_and_load(*args: Any, **kwargs: Any) -> Any:
        slow.begun.set()
        assert slow.allowed.wait(60)
        return load(*args, **kwargs)

    monkeypatch.setattr(specdec.lm.serve, "load", wait_and_load)
    yield slow
    slow.allowed.set()


@asynccontextmanager
async def starting(context: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """Enters a context of `tests.stack` in the background, and leaves it at the end."""

    async def stay() -> None:
        async with context:
            await asyncio.Event().wait()

    task = asyncio.create_task(stay())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def verifier_info(channel: grpc.aio.Channel) -> None:
    request = verifier_pb2.VerifierServiceGetModelInfoRequest()
    await verifier_pb2_grpc.VerifierServiceStub(channel).GetModelInfo(request, timeout=5)


async def draft_info(channel: grpc.aio.Channel) -> None:
    request = draft_pb2.DraftServiceGetModelInfoRequest()
    await draft_pb2_grpc.DraftServiceStub(channel).GetModelInfo(request, timeout=5)


@pytest.mark.parametrize(
    ("service", "start", "info"),
    [
        pytest.param(services.VERIFIER, stack.verifier, verifier_info, id="verifier"),
        pytest.param(services.DRAFT, stack.draft, draft_info, id="draft"),
    ],
)
async def test_a_model_service_is_serving_once_its_model_is_loaded_and_not_before(
    service: services.Service,
    start: Callable[..., AbstractAsyncContextManager[Any]],
    info: Callable[[grpc.aio.Channel], Awaitable[None]],
    target_folder: Path,
    slow_load: SlowLoad,
) -> None:
    port = stack.free_port()
    address = f"127.0.0.1:{port}"
    async with starting(start(target_folder, port=port)):
        await asyncio.to_thread(slow_load.begun.wait, 30)
        begun = time.monotonic()
        # It lives, and is of no use yet.
        assert await status_of(address, "") == "SERVING"
        assert await status_of(address, service.full_name) == "NOT_SERVING"
        # The loading does not keep it from answering.
        assert time.monotonic() - begun < 2.0

        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await info(channel)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert reason_and_retry_of(caught.value) == ("NOT_READY", True)

        slow_load.allowed.set()
        assert await wait_until_ready(service, address, 30) is None
        for name in ("", service.full_name):
            assert await status_of(address, name) == "SERVING"


async def test_the_gateway_is_serving_once_its_verifier_is_and_not_before(
    target_folder: Path, tmp_path: Path, slow_load: SlowLoad
) -> None:
    verifier_port, port = stack.free_port(), stack.free_port()
    address = f"127.0.0.1:{port}"
    async with (
        starting(stack.verifier(target_folder, port=verifier_port)),
        grpc.aio.insecure_channel(address) as channel,
    ):
        with process(
            "gateway", tmp_path, port, verifier_address=f"127.0.0.1:{verifier_port}"
        ) as gateway:
            assert await first_status_of(address) == "SERVING"
            assert await status_of(address, services.GATEWAY.full_name) == "NOT_SERVING"
            call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(
                gateway_pb2.GenerateRequest(text="a"), timeout=5
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(call))
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert reason_and_retry_of(caught.value) == ("NOT_READY", True)

            slow_load.allowed.set()
            assert await wait_until_ready(services.GATEWAY, address, 30) is None
            for name in ("", services.GATEWAY.full_name):
                assert await status_of(address, name) == "SERVING"
            assert await gateway.end(3) == 0


# The end.


async def test_sigterm_ends_a_gateway_that_still_looks_for_its_verifier(tmp_path: Path) -> None:
    port, nobody = stack.free_port(), f"127.0.0.1:{stack.free_port()}"
    with process("gateway", tmp_path, port, verifier_address=nobody) as gateway:
        assert await first_status_of(f"127.0.0.1:{port}") == "SERVING"
        assert await gateway.end(3) == 0
        assert gateway.events()[-1] == "stopped"


async def test_sigterm_lets_a_running_generation_complete(
    target_folder: Path, tmp_path: Path
) -> None:
    port = stack.free_port()
    async with (
        stack.verifier(target_folder) as (verifier_address, _),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        with process(
            "gateway", tmp_path, port, grace_seconds=20, verifier_address=verifier_address
        ) as gateway:
            fault = await wait_until_ready(services.GATEWAY, f"127.0.0.1:{port}", 30)
            assert fault is None
            running = stack.Gateway(f"127.0.0.1:{port}", channel)
            request = running.request([5], max_new_tokens=400, ignore_eos=True, k=0)
            call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            responses = aiter(call)
            tokens = len((await anext(responses)).chunk.token_ids)
            ending = asyncio.create_task(gateway.end(20))
            completion = None
            async for response in responses:
                tokens += len(response.chunk.token_ids)
                completion = response.completion
            assert completion is not None
            assert tokens == completion.usage.completion_tokens == 400
            ended = time.monotonic()
            assert await ending == 0
            # It does not sit out the rest of the grace.
            assert time.monotonic() - ended < 5
            assert gateway.events()[-1] == "stopped"


async def number_of_sessions(verifier: VerifierServicer, wanted: int) -> None:
    """Waits until so many sessions are open."""
    assert verifier.runtime is not None
    for _ in range(200):
        if verifier.runtime.num_sessions == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{verifier.runtime.num_sessions} sessions are open, not {wanted}")


async def test_sigterm_cuts_a_generation_that_outlasts_the_grace(
    target_folder: Path, tmp_path: Path
) -> None:
    port = stack.free_port()
    stuck = threading.Event()
    async with (
        stack.verifier(target_folder) as (verifier_address, verifier),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        with process(
            "gateway", tmp_path, port, grace_seconds=0.5, verifier_address=verifier_address
        ) as gateway:
            fault = await wait_until_ready(services.GATEWAY, f"127.0.0.1:{port}", 30)
            assert fault is None
            assert verifier.runtime is not None
            blocking = asyncio.create_task(verifier.runtime.thread.run(stuck.wait, 60))
            call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(
                gateway_pb2.GenerateRequest(text="a")
            )
            try:
                reading = asyncio.create_task(anext(aiter(call)))
                await number_of_sessions(verifier, 1)
                assert await gateway.end(4) == 0
                with pytest.raises(grpc.aio.AioRpcError):
                    await reading
            finally:
                stuck.set()
                await blocking
            await number_of_sessions(verifier, 0)


OPENING = common_pb2.Open(
    session_id="left open",
    round=1,
    base_length=3,
    prompt_token_ids=[5, 6, 7],
    sampling=common_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
    acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
    num_draft_tokens=2,
    tokenizer_sha256=token_table_sha256(byte_tokens(300)),
)


@pytest.mark.slow
async def test_sigterm_ends_the_model_services_with_open_sessions(
    target_folder: Path, draft_folder: Path, tmp_path: Path
) -> None:
    ports = stack.free_port(), stack.free_port()
    addresses = [f"127.0.0.1:{port}" for port in ports]
    with (
        process("verifier_service", tmp_path, ports[0], model=target_folder) as verifier,
        process("draft_service", tmp_path, ports[1], model=draft_folder) as draft,
    ):
        for service, address in zip((services.VERIFIER, services.DRAFT), addresses, strict=True):
            assert await wait_until_ready(service, address, 90) is None
        async with (
            grpc.aio.insecure_channel(addresses[0]) as verifier_channel,
            grpc.aio.insecure_channel(addresses[1]) as draft_channel,
        ):
            verifying = verifier_pb2_grpc.VerifierServiceStub(verifier_channel).Verify()
            await verifying.write(verifier_pb2.VerifyRequest(open=OPENING))
            drafting = draft_pb2_grpc.DraftServiceStub(draft_channel).Draft()
            await drafting.write(draft_pb2.DraftRequest(open=OPENING))
            assert (await verifying.read()).opened.base_length == 3
            assert (await drafting.read()).opened.base_length == 3
            assert len((await drafting.read()).proposal.token_ids) == 2

            assert await asyncio.gather(verifier.end(5), draft.end(5)) == [0, 0]
            for call in (verifying, drafting):
                assert await call.code() != grpc.StatusCode.OK
        for running in (verifier, draft):
            assert running.events()[-1] == "stopped"
            assert "session closed" in running.events()


@pytest.mark.slow
async def test_sigterm_ends_the_model_services_while_they_load(tmp_path: Path) -> None:
    ports = stack.free_port(), stack.free_port()
    with socket.socket() as silent_hub:
        # It accepts connections and never answers.
        silent_hub.bind(("127.0.0.1", 0))
        silent_hub.listen()
        variables = {
            "HF_ENDPOINT": f"http://127.0.0.1:{silent_hub.getsockname()[1]}",
            "HF_HUB_ETAG_TIMEOUT": "60",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "hub"),
            "NO_PROXY": "127.0.0.1",
        }
        options = {"model": "someone/some-model", "variables": variables}
        with (
            process("verifier_service", tmp_path, ports[0], **options) as verifier,
            process("draft_service", tmp_path, ports[1], **options) as draft,
        ):
            for port in ports:
                assert await first_status_of(f"127.0.0.1:{port}") == "SERVING"
            # Both are waiting for the hub.
            silent_hub.settimeout(20)
            waiting = [(await asyncio.to_thread(silent_hub.accept))[0] for _ in range(2)]
            assert await asyncio.gather(verifier.end(5), draft.end(5)) == [0, 0]
            for connection in waiting:
                connection.close()
            assert verifier.events() == ["settings", "loading", "draining", "stopped"]
            # What a draft loads depends on its drafters, and most of them load nothing.
            assert draft.events() == ["settings", "listening", "loading", "draining", "stopped"]
