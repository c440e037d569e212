"""The benchmarks, run small: that they run, and what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, peers, verifier
from tests.cli import environment

ROOT = Path(__file__).parent.parent


def run(name: str, file: Path, *options: str | Path) -> dict[str, Any]:
    """Runs a benchmark as a process. Gives what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", file],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout
    document: dict[str, Any] = json.loads(file.read_text())
    assert {"created", "machine", "settings"} < set(document)
    return document


def test_texts_have_the_length_asked_for_and_differ(target_folder: Path) -> None:
    texts = common.Texts(target_folder, seed=1)
    first, second = texts.ids(300), texts.ids(300)
    assert len(first) == len(second) == 300
    assert first[:50] != second[:50]
    assert common.Texts(target_folder, seed=1).ids(300) == first


def test_the_verifier_alone(target_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sizes = ("--repeats", "2", "--passes", "2", "--context", "16", "--dtype", "float32")
    verifier.main(["--target", str(target_folder), "--json", str(file), *sizes])
    document = json.loads(file.read_text())
    samples = document["milliseconds"]
    assert len(samples) == len(verifier.ROWS) + len(verifier.SESSIONS) + 1
    assert all(len(times) == 2 and min(times) > 0 for times in samples.values())
    assert document["pass_8_over_pass_1"] > 0
    assert document["pass_8_over_eager_1"] > 0


def test_ratios_of_peers_are_those_within_a_repeat() -> None:
    def one(peer: str, repeat: int, rate: float) -> dict[str, Any]:
        return {
            "peer": peer,
            "clients": 1,
            "repeat": repeat,
            "tokens_per_second": rate,
            "error": "",
        }

    runs = [one("transformers", index, rate) for index, rate in enumerate((10.0, 20.0, 40.0))]
    runs += [one("specdec-plain", index, rate) for index, rate in enumerate((30.0, 40.0))]
    runs.append({"peer": "specdec-plain", "clients": 1, "repeat": 2, "error": "killed"})
    assert peers.rows(runs, [(1, "transformers"), (1, "specdec-plain"), (1, "llama.cpp")]) == [
        (1, "transformers", 20.0, 1.0, None, 3),
        (1, "specdec-plain", 35.0, 2.5, None, 2),
        (1, "llama.cpp", None, None, None, 0),
    ]


@pytest.mark.slow
def test_peers(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    engines = ("transformers", "transformers-assisted", "specdec-plain", "specdec-speculative")
    document = run(
        *("peers", tmp_path / "out.json", "--target", target_folder, "--draft", draft_folder),
        *("--dtype", "float32", "--peers", ",".join(engines), "--clients", "1,2"),
        *("--repeats", "1", "--prompts", "1", "--max-new-tokens", "9", "--threads", "1"),
    )
    found = {(run["peer"], run["clients"]): run for run in document["runs"]}
    assert len(found) == 7  # assisted generation serves one client only
    for (_, clients), run_ in found.items():
        assert run_["error"] == ""
        assert run_["tokens"] == 9 * clients
        assert run_["tokens_per_second"] > 0


@pytest.mark.slow
def test_prefix(target_folder: Path, draft_folder: Path, tmp_path: Path) -> None:
    document = run(
        *("prefix", tmp_path / "out.json", "--target", target_folder, "--draft", draft_folder),
        *("--dtype", "float32", "--repeats", "2", "--threads", "1"),
        *("--prefix-tokens", "320", "--ending-tokens", "8", "--max-new-tokens", "8"),
    )
    assert len(document["pairs"]) == 2
    for pair in document["pairs"]:
        assert pair["cached_tokens"] == 320
        assert pair["same_tokens"]
        assert pair["same_acceptance"]
    assert document["median_ratio"] > 0


@pytest.mark.slow
def test_interference(target_folder: Path, tmp_path: Path) -> None:
    document = run(
        *("interference", tmp_path / "out.json", "--target", target_folder, "--dtype", "float32"),
        *("--repeats", "2", "--threads", "1", "--sessions", "2", "--prompt-tokens", "8"),
        *("--max-new-tokens", "480", "--prefill-tokens", "300", "--seconds", "0.1"),
    )
    assert len(document["repeats"]) == 2
    for repeat in document["repeats"]:
        assert repeat["prefills"] >= 1
        assert repeat["beside_ms_p95"] > 0
    assert document["median_ratio"] > 0
