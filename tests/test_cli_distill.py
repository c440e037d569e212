"""`specdec distill` as a process: what it leaves behind, also if it is killed on its way."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import re
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from specdec.lm.loading import load
from tests.cli import Run, started
from tests.models import byte_tokens, make_model, make_tokenizer
from tests.test_architectures import GENERIC, config_of, random_model
from tests.test_cli_up import interrupted

pytestmark = pytest.mark.slow

FORKS = multiprocessing.get_context("forkserver")
# Each command is a process of its own, which does not have to import torch again.
FORKS.set_forkserver_preload(
    [
        *("specdec.cli.main", "specdec.distill.distillation"),
        *("transformers.models.llama.modeling_llama", "matplotlib.backends.backend_agg"),
    ]
)

SETTINGS = (
    *("--tokens", "1500", "--epochs", "2", "--rollout-tokens", "800", "--max-length", "48"),
    *("--max-prompt", "16", "--batch", "8", "--tokens-per-step", "256", "--draft-vocab", "200"),
    *("--layers", "1", "--dtype", "float32", "--device", "cpu", "--num-threads", "1"),
)


@dataclass(frozen=True)
class Kill:
    """Where a command is killed: as if by `kill -9` at the very moment."""

    stage: str = ""
    count: int = 1
    """When progress of the stage is told for so manieth time."""
    renames: int = 0
    """Or before a file is given its name for so manieth time: all of it is written."""

    def arm(self) -> None:
        from specdec.cli.distill import _Lines
        from specdec.distill import training

        training.CHECKPOINT_STEPS = 4
        told: Counter[str] = Counter()
        tell, rename = _Lines.__call__, Path.replace

        def telling(lines: Any, progress: Any) -> None:
            tell(lines, progress)
            told[progress.stage] += 1
            if told[self.stage] == self.count:
                os.kill(os.getpid(), signal.SIGKILL)

        def renaming(path: Path, target: Any) -> Path:
            told[""] += 1
            if told[""] == self.renames:
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(path, target)

        _Lines.__call__ = telling  # type: ignore[method-assign]
        Path.replace = renaming  # type: ignore[method-assign,assignment]


def _command(arguments: list[str], streams: Path, kill: Kill | None) -> None:
    """In the process that is forked."""
    from specdec.cli.main import main

    for number, name in ((1, "out"), (2, "err")):
        file = os.open(streams / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(file, number)
    if kill is not None:
        kill.arm()
    sys.argv = ["specdec", *arguments]
    main()


def distill(folder: Path, *arguments: str | Path, kill: Kill | None = None) -> Run:
    """Runs `specdec distill`. Its draft is in `folder`/draft."""
    folder.mkdir(exist_ok=True)
    words = ["distill", "--out", str(folder / "draft"), *map(str, arguments)]
    process = FORKS.Process(target=_command, args=(words, folder, kill))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return Run(process.exitcode, *((folder / name).read_text() for name in ("out", "err")))


def made(folder: Path) -> tuple[bytes, Any, Any]:
    """What must not depend on how often a distillation was stopped."""
    report = json.loads((folder / "draft" / "report.json").read_text())
    accepted = [
        (each["temperature"], each["alpha_by_position"], each["mean_acceptance_length"])
        for each in report["acceptance"]
    ]
    weights = (folder / "draft" / "model.safetensors").read_bytes()
    return weights, report["curve"], accepted


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> tuple[Path, Run]:
    """A distillation that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run = distill(folder, "--target", target_folder, "--license", "apache-2.0", *SETTINGS)
    assert run.status == 0, run
    return folder, run


@pytest.mark.slow
def test_a_draft_is_made_with_its_report(whole: tuple[Path, Run], target_folder: Path) -> None:
    folder, run = whole
    draft = folder / "draft"
    names = {"README.md", "config.json", "model.safetensors", "report.json", "report.png", "work"}
    assert {path.name for path in draft.iterdir()} == names
    report = json.loads((draft / "report.json").read_text())
    assert report["recipe"]["target"] == str(target_folder)
    assert report["recipe"]["training"]["layers"] == 1
    assert report["layers"] == [0]
    assert report["outputs"] == 200
    assert report["tokens_written"] >= 1500
    assert report["device"] == "cpu"
    assert report["cost_ratio"] == report["draft_step_ms"] / report["target_step_ms"] > 0
    assert [each["temperature"] for each in report["acceptance"]] == [0.0, 1.0]
    for each in report["acceptance"]:
        assert each["num_tokens"] > 0
        assert len(each["alpha_by_position"]) == 10
        assert all(0 <= alpha <= 1 for alpha in each["alpha_by_position"])
        taus = each["mean_acceptance_length"]
        assert taus == sorted(taus)
        assert all(1 <= tau <= k + 1 for k, tau in enumerate(taus, 1))
        c = report["cost_ratio"]
        speedups = [tau / (k * c + 1) for k, tau in enumerate(taus, 1)]
        assert each["predicted_speedup"] == pytest.approx(speedups)
        best = max(range(11), key=lambda k: [1.0, *speedups][k])
        assert each["recommended_num_draft_tokens"] == best
    steps = [step["step"] for step in report["curve"]]
    second = steps.index(1, 1)
    assert steps == [*range(1, second + 1), *range(1, len(steps) - second + 1)]
    with Image.open(draft / "report.png") as image:
        assert image.format == "PNG"
        assert image.width > 600
    card = (draft / "README.md").read_text()
    metadata = card.split("---")[1]
    assert "license: apache-2.0\n" in metadata
    assert f"base_model: {target_folder.name}\n" in metadata
    assert len(re.findall(r"^\| \d+ \|", card, re.MULTILINE)) == 10
    load(str(draft), device="cpu", dtype="float32")
    # The result is what is piped on; what people watch is told apart from it.
    assert len(re.findall(r"^│ +\d+ │", run.out, re.MULTILINE)) == 10
    assert "Recommended at temperature 1: " in run.out
    assert "Warning" not in run.err
    stages = re.findall(r"^(\D+): (\d+) of \2\b", run.err, re.MULTILINE)
    assert [stage for stage, _ in stages] == [
        *("Loading the target", "Writing what is held out", "Writing", "Learning"),
        *("Writing with the student", "Learning from mistakes", "Measuring"),
    ]


KILLS = (
    Kill("Loading the target"),
    Kill("Writing what is held out", 2),
    Kill(renames=2),
    Kill("Writing", 9),
    Kill("Learning", 1),
    Kill("Learning", 7),
    Kill(renames=2),
    Kill("Writing with the student", 3),
    Kill("Learning from mistakes", 2),
    Kill("Learning from mistakes", 6),
    Kill("Measuring", 2),
)


@pytest.mark.slow
def test_a_killed_distillation_goes_on_to_the_same_end(
    tmp_path: Path, whole: tuple[Path, Run], target_folder: Path
) -> None:
    command = ("--target", target_folder, "--license", "apache-2.0", *SETTINGS)
    for kill in KILLS:
        run = distill(tmp_path, *command, kill=kill)
        assert run.status == -signal.SIGKILL, (kill, run)
    run = distill(tmp_path, *command)
    assert run.status == 0, run
    # All but the measuring had been done.
    assert not re.search("Writing|Learning", run.err), run.err
    assert made(tmp_path) == made(whole[0])


@pytest.mark.slow
async def test_ctrl_c_says_how_to_go_on(tmp_path: Path, target_folder: Path) -> None:
    draft = tmp_path / "draft"
    command = ("--target", target_folder, "--license", "apache-2.0", *SETTINGS)
    async with started("distill", "--out", draft, *command) as process:
        assert process.stderr is not None
        seen = b""
        async with asyncio.timeout(120):
            while b"Writing what is held out" not in seen:
                seen += await process.stderr.readline()
        run = await interrupted(process)
    assert run.status == 130, run
    assert run.out == ""
    last = run.err.splitlines()[-1]
    assert last == f"stopped; the same command goes on from what is in {draft}"
    assert "Traceback" not in run.err


@pytest.mark.slow
def test_another_seed_makes_another_draft(
    tmp_path: Path, whole: tuple[Path, Run], target_folder: Path
) -> None:
    settings = (*SETTINGS, "--rollout-tokens", "0", "--epochs", "1", "--seed", "1")
    run = distill(tmp_path, "--target", target_folder, *settings)
    assert run.status == 0, run
    assert "mistakes" not in run.err
    assert made(tmp_path)[0] != made(whole[0])[0]


@pytest.mark.slow
def test_a_student_of_another_width_is_made_of_the_seed_as_well(
    tmp_path: Path, target_folder: Path
) -> None:
    """It begins at random: that, too, is the same every time."""
    settings = (*SETTINGS, "--tokens", "500", "--rollout-tokens", "0", "--layers", "0,1")
    settings = (*settings, "--hidden", "16", "--epochs", "1")
    found = []
    for name in ("a", "b"):
        run = distill(tmp_path / name, "--target", target_folder, *settings)
        assert run.status == 0, run
        found.append(made(tmp_path / name))
    assert found[0] == found[1]


@pytest.mark.slow
def test_users_prompts_are_answered(tmp_path: Path, target_folder: Path) -> None:
    corpus = tmp_path / "asked.jsonl"
    corpus.write_text('{"prompt": "ab cd", "more": 1}\n\n{"prompt": "efg"}\n')
    settings = (*SETTINGS, "--tokens", "300", "--rollout-tokens", "0", "--batch", "4")
    command = ("--target", target_folder, "--corpus", corpus, "--corpus-share", "1", *settings)
    run = distill(tmp_path, *command)
    assert run.status == 0, run
    card = (tmp_path / "draft" / "README.md").read_text()
    assert "prompts of a corpus" in card
    # Another corpus is another distillation.
    corpus.write_text('{"prompt": "other"}\n')
    assert "corpus_sha256 was" in distill(tmp_path, *command).err


@pytest.mark.slow
def test_the_texts_of_others_are_learned(
    whole: tuple[Path, Run], tmp_path: Path, target_folder: Path, draft_folder: Path
) -> None:
    """The same texts with the same seed make the same draft, whoever wrote them."""
    other = whole[0] / "draft"
    held = [
        (other / "work" / name).read_bytes() for name in ("recipe.json", "texts/00000.safetensors")
    ]
    settings = (*SETTINGS, "--tokens", "0", "--texts", other, "--rollout-tokens", "0")
    run = distill(tmp_path / "a", "--target", target_folder, *settings)
    assert run.status == 0, run
    assert "\nWriting:" not in run.err
    report = json.loads((tmp_path / "a" / "draft" / "report.json").read_text())
    written = json.loads((other / "report.json").read_text())
    assert report["tokens_written"] == written["tokens_written"]
    source = report["recipe"]["training"]["texts"][0]
    assert source["writing"] == written["recipe"]["writing"]
    assert source["tokens"] == written["tokens_written"]
    first_phase = len(report["curve"])
    assert report["curve"] == written["curve"][:first_phase]
    # Nobody's texts are touched, and both kinds may be mixed.
    assert held == [
        (other / "work" / name).read_bytes() for name in ("recipe.json", "texts/00000.safetensors")
    ]
    mixed = (*settings, "--tokens", "300", "--texts", tmp_path / "b" / "draft")
    run = distill(tmp_path / "b", "--target", target_folder, *SETTINGS, "--rollout-tokens", "0")
    assert run.status == 0, run
    run = distill(tmp_path / "c", "--target", target_folder, *mixed)
    assert run.status == 0, run
    report = json.loads((tmp_path / "c" / "draft" / "report.json").read_text())
    assert report["tokens_written"] > 2 * written["tokens_written"]
    # What has grown since then is something else to learn from.
    (other / "work" / "texts" / "00009.safetensors").write_bytes(
        (other / "work" / "texts" / "00000.safetensors").read_bytes()
    )
    try:
        run = distill(tmp_path / "a", "--target", target_folder, *settings)
    finally:
        (other / "work" / "texts" / "00009.safetensors").unlink()
    assert "texts was" in refused(run)
    run = distill(tmp_path / "d", "--target", draft_folder, *settings)
    assert "were written by" in refused(run)


# What cannot be done is said in a line.


def refused(run: Run) -> str:
    """Why. Progress may come before."""
    assert run.status == 1, run
    assert run.out == ""
    assert "Traceback" not in run.err
    last = run.err.splitlines()[-1]
    assert last.startswith("error: ")
    return last


@pytest.mark.slow
def test_settings_cannot_change_on_the_way(whole: tuple[Path, Run], target_folder: Path) -> None:
    before = made(whole[0])
    command = ("--target", target_folder, "--license", "apache-2.0", *SETTINGS)
    error = refused(distill(whole[0], *command, "--epochs", "3", "--layers", "0,1"))
    assert "epochs was 2, is 3" in error
    assert "layers was 1, is [0, 1]" in error
    assert "license" not in error
    assert "another --out" in error
    assert made(whole[0]) == before


@pytest.mark.slow
def test_settings_that_do_not_fit_can_be_corrected(tmp_path: Path, target_folder: Path) -> None:
    """Nothing was begun by them."""
    small = (*SETTINGS, "--tokens", "200", "--rollout-tokens", "0", "--batch", "2")
    target = ("--target", target_folder)
    error = refused(distill(tmp_path, "--target", tmp_path / "no-such-target", *small))
    assert "no-such-target" in error
    error = refused(distill(tmp_path, *target, *small, "--layers", "5"))
    assert "up to 2" in error
    error = refused(distill(tmp_path, *target, *small, "--max-prompt", "40"))
    assert "--max-prompt" in error
    run = distill(tmp_path, *target, *small)
    assert run.status == 0, run


CORPORA = {
    "asked.jsonl": [
        ('{"prompt": "a"}\n\n{"text": "b"}\n', "line 3"),
        ('{"prompt": "a"}\nnot JSON\n', "line 2"),
        ('["a"]\n', "line 1"),
        ("\n", "holds no prompt"),
    ],
    "asked.txt": [("", "holds no prompt"), (b"\xff\xfe\xff", "cannot read")],
}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [(name, *case) for name, cases in CORPORA.items() for case in cases],
)
def test_a_corpus_that_cannot_be_read_is_refused(
    tmp_path: Path, target_folder: Path, name: str, content: str | bytes, reason: str
) -> None:
    corpus = tmp_path / name
    corpus.write_bytes(content if isinstance(content, bytes) else content.encode())
    run = distill(tmp_path, "--target", target_folder, "--corpus", corpus)
    assert reason in refused(run)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--tokens", "0"), "nothing to learn from"),
        (("--texts", "."), "holds no texts of a distillation"),
    ],
)
def test_nothing_to_learn_from_is_refused(
    tmp_path: Path, target_folder: Path, options: tuple[str, ...], reason: str
) -> None:
    run = distill(tmp_path, "--target", target_folder, *options)
    assert reason in refused(run)
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize("layers", ["", "a", "0", "1,,2", "-1", "1,1", "0,-2", "1.5"])
def test_layers_of_another_form_are_refused(
    tmp_path: Path, target_folder: Path, layers: str
) -> None:
    run = distill(tmp_path, "--target", target_folder, f"--layers={layers}")
    assert run.status == 2
    assert "--layers" in run.err
    assert "Traceback" not in run.err


def test_a_dtype_that_there_is_not_is_refused(tmp_path: Path, target_folder: Path) -> None:
    run = distill(tmp_path, "--target", target_folder, "--dtype", "int3")
    assert run.status == 2
    assert "--dtype" in run.err
    assert not (tmp_path / "draft").exists()


@pytest.mark.slow
def test_a_target_that_a_student_cannot_copy_is_refused(tmp_path: Path) -> None:
    random_model(config_of(GENERIC["gpt_neox"])).save_pretrained(tmp_path / "target")
    make_tokenizer(byte_tokens(160)).save_pretrained(tmp_path / "target")
    run = distill(tmp_path, "--target", tmp_path / "target", *SETTINGS)
    assert "'gpt_neox' cannot be distilled from" in refused(run)


@pytest.mark.slow
def test_a_vocabulary_larger_than_the_targets_is_the_targets(tmp_path: Path) -> None:
    """The embeddings' padding is no token."""
    target = make_model(tmp_path / "target", seed=1, rows=320, table=byte_tokens(300))
    settings = (*SETTINGS, "--tokens", "200", "--rollout-tokens", "0", "--batch", "2")
    run = distill(tmp_path, "--target", target, *settings, "--draft-vocab", "8192")
    assert run.status == 0, run
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["specdec_draft"]["vocabulary"] == list(range(300))
    assert "a head over the 300 commonest tokens" in (tmp_path / "draft" / "README.md").read_text()
