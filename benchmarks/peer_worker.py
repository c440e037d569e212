"""One engine measured once, in a process of its own: a job on standard input, a result on output.

An engine is loaded, warmed up, given its prompts by so many clients at once, and ended. Each
generates greedily and exactly as many tokens, whatever they are.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, cast

from draft_service.settings import DEFAULT_DRAFT

Generate = Callable[[Sequence[Sequence[int]], int], int]
"""Generates from prompts, so many tokens each; gives how many tokens came in all."""

_WARM_UP_TOKENS = 8
_CONTEXT = 1024
"""Tokens of a slot of llama.cpp."""


@dataclass(frozen=True)
class Job:
    """What to measure."""

    peer: str
    clients: int
    prompts: list[list[int]]
    max_new_tokens: int
    num_draft_tokens: int
    """Of the other engines, and of specdec unless it is adaptive."""
    adaptive: bool
    """Whether specdec decides itself how many tokens to draft."""
    threads: int
    dtype: str
    target: str
    draft: str | None
    gguf: str | None


@dataclass(frozen=True)
class Outcome:
    """How fast it was. The time is that of all prompts together."""

    tokens: int
    seconds: float
    warm_up_seconds: float


def measure(job: Job) -> Outcome:
    """Runs a job in this process."""
    with PEERS[job.peer](job) as generate:
        begun = time.perf_counter()
        generate(job.prompts[: job.clients], _WARM_UP_TOKENS)
        warm = time.perf_counter()
        tokens = generate(job.prompts, job.max_new_tokens)
        return Outcome(tokens, time.perf_counter() - warm, warm - begun)


def _transformers(job: Job) -> AbstractContextManager[Generate]:
    import torch

    torch.set_num_threads(job.threads)
    model = _load(job.target, job.dtype)
    options: dict[str, Any] = {"do_sample": False, "use_cache": True}
    if job.peer == "transformers-assisted":
        assistant = _assistant(job)
        assistant.generation_config.num_assistant_tokens = job.num_draft_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        # Without it assistants stop drafting where they are unsure, which K of the others is not.
        assistant.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = assistant
    if job.peer == "transformers-lookup":
        options["prompt_lookup_num_tokens"] = job.num_draft_tokens

    def generate(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
        count = 0
        for begin in range(0, len(prompts), job.clients):
            batch = prompts[begin : begin + job.clients]
            longest = max(map(len, batch))
            # Padded on the left: what is generated follows the prompt.
            ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in batch]
            mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]
            output = model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max_new_tokens,
                **options,
            )
            count += len(batch) * (output.shape[1] - longest)
        return count

    return nullcontext(generate)


def _load(folder: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return _endless(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)))


def _endless(model: Any) -> Any:
    """It goes on after the end of the sequence."""
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _assistant(job: Job) -> Any:
    """The draft that specdec uses, as transformers takes it: with logits of every token."""
    import torch

    from specdec.lm.loading import read_model

    model, _, vocabulary = read_model(
        job.draft or str(DEFAULT_DRAFT), device="cpu", dtype=cast("Any", job.dtype)
    )
    if vocabulary is not None:
        size = cast("Any", model.get_input_embeddings()).num_embeddings

        def spread(_: object, __: object, logits: torch.Tensor) -> torch.Tensor:
            every = logits.new_full((*logits.shape[:-1], size), -torch.inf)
            return every.index_copy(-1, vocabulary, logits)

        cast("Any", model.get_output_embeddings()).register_forward_hook(spread)
        model.config.vocab_size = size
    return _endless(model)


def _llama_cpp(job: Job) -> AbstractContextManager[Generate]:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = job.gguf
    parameters.n_parallel = job.clients
    parameters.n_ctx = _CONTEXT * job.clients
    parameters.cpuparams.n_threads = job.threads
    parameters.cpuparams_batch.n_threads = job.threads
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)

    def one(prompt: Sequence[int], max_new_tokens: int) -> int:
        # Called in the process, and so spared HTTP.
        result = server.handle_completions(
            {
                "prompt": list(prompt),
                "max_tokens": max_new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        if "usage" not in result:
            raise RuntimeError(f"llama.cpp answers {result}")
        count: int = result["usage"]["completion_tokens"]
        return count

    def generate(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
        with ThreadPoolExecutor(job.clients) as clients:
            return sum(clients.map(lambda prompt: one(prompt, max_new_tokens), prompts))

    return nullcontext(generate)


@contextmanager
def _specdec(job: Job) -> Any:
    from benchmarks import common
    from specdec.bench.load import Call, send_all

    drafters = _DRAFTERS[job.peer]
    speculative = drafters is not None
    running = common.services(
        target=job.target if job.draft else None,
        draft=job.draft,
        drafters=drafters,
        dtype=job.dtype,
        threads=job.threads,
    )

    with asyncio.Runner() as runner:
        channel = runner.run(running.__aenter__())

        async def send(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
            requests = [
                (
                    common.request(
                        prompt,
                        max_new_tokens,
                        speculative=speculative,
                        num_draft_tokens=None if job.adaptive else job.num_draft_tokens,
                    ),
                    Call("", ""),
                )
                for prompt in prompts
            ]
            await send_all(channel, requests, job.clients, duration=3600, timeout=600)
            for _, call in requests:
                if call.error is not None:
                    raise call.error
            return sum(call.num_tokens for _, call in requests)

        try:
            yield lambda prompts, count: runner.run(send(prompts, count))
        finally:
            runner.run(running.__aexit__(None, None, None))


_DRAFTERS = {
    "specdec-plain": None,
    "specdec-lookup": "lookup",
    "specdec-speculative": "model",
    "specdec-combined": "lookup,model",
}
PEERS: dict[str, Callable[[Job], AbstractContextManager[Generate]]] = {
    "transformers": _transformers,
    "transformers-lookup": _transformers,
    "transformers-assisted": _transformers,
    "llama.cpp": _llama_cpp,
    **dict.fromkeys(_DRAFTERS, _specdec),
}


def main() -> None:
    """The entry point of the process."""
    outcome = measure(Job(**json.load(sys.stdin)))
    # On a line of its own, and the last one: libraries print as well.
    print("\n" + json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
