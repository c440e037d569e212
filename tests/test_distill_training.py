"""The student, its loss, and its training, which goes on where it was stopped, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.distill import texts as shards
from specdec.distill import training
from specdec.distill.sparse_loss import sparse_cross_entropy
from specdec.distill.student import Beginning, Student, beginning_of
from specdec.distill.training import Step, Trainer
from specdec.distill.writing import Task, Writer
from tests.distillation import TEMPLATE, packed, raw
from tests.test_architectures import FUSED, GENERIC, config_of, random_model

VOCABULARY = torch.arange(0, 300, 3)


# The loss.


def reference_loss(
    hidden: torch.Tensor,
    head: torch.Tensor,
    known: Sequence[dict[int, float]],
    weights: torch.Tensor,
) -> torch.Tensor:
    """Row by row, by the definition. `known` has the teacher's probabilities by column."""
    total = hidden.new_zeros(())
    for row, teacher in enumerate(known):
        q = (head @ hidden[row]).softmax(-1)
        loss = -sum(
            (p * q[column].log() for column, p in teacher.items()), start=hidden.new_zeros(())
        )
        rest = 1 - sum(teacher.values())
        others = [column for column in range(len(head)) if column not in teacher]
        if rest > 1e-9:
            loss = loss - rest * q[others].sum().log()
        total = total + weights[row] * loss
    return total


class Case:
    """A random batch, as tensors and as dictionaries."""

    def __init__(self, seed: int, rows: int, size: int, top: int, tail: float, missing: float):
        generator = torch.Generator().manual_seed(seed)
        self.hidden = 0.3 * torch.randn(rows, 6, generator=generator, dtype=torch.float64)
        self.head = torch.randn(size, 6, generator=generator, dtype=torch.float64)
        self.weights = torch.rand(rows, generator=generator) + 0.1
        p = torch.rand(rows, top, generator=generator, dtype=torch.float64) + 0.01
        p = p / p.sum(-1, keepdim=True) * (1 - tail)
        columns = torch.stack(
            [torch.randperm(size, generator=generator)[:top] for _ in range(rows)]
        )
        # Half of the rows know column 0, which is also where missing tokens point to.
        columns[::2] = torch.where(columns[::2] == 0, columns[::2, :1], columns[::2])
        columns[::2, 0] = 0
        lost = torch.rand(rows, top, generator=generator) < missing
        lost[:, 0] = False
        self.columns = columns.masked_fill(lost, 0)
        self.probabilities = p.masked_fill(lost, 0.0).float()
        self.known = [
            {column: value for column, value, gone in zip(*each, strict=True) if not gone}
            for each in zip(
                columns.tolist(), self.probabilities.tolist(), lost.tolist(), strict=True
            )
        ]

    def compare(self, dtype: torch.dtype = torch.float64) -> float:
        """The largest difference of value and gradients, relative to the reference's largest."""
        found_leaves = [x.to(dtype, copy=True).requires_grad_() for x in (self.hidden, self.head)]
        found = sparse_cross_entropy(*found_leaves, self.columns, self.probabilities, self.weights)
        (3.0 * found).backward()
        leaves = [x.clone().requires_grad_() for x in (self.hidden, self.head)]
        expected = reference_loss(*leaves, self.known, self.weights)
        (3.0 * expected).backward()
        pairs = [(found.detach(), expected.detach())]
        pairs += [(a.grad, b.grad) for a, b in zip(found_leaves, leaves, strict=True)]
        return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 20),
    rows=st.integers(1, 6),
    size=st.integers(6, 40),
    top=st.integers(1, 5),
    tail=st.sampled_from([0.0, 0.01, 0.3, 0.9]),
    missing=st.sampled_from([0.0, 0.4, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_loss_and_gradients_are_those_of_the_definition(
    seed: int, rows: int, size: int, top: int, tail: float, missing: float, dtype: torch.dtype
) -> None:
    """Its softmax is in float32, which is the tolerance; no probability is near 0."""
    assert Case(seed, rows, size, top, tail, missing).compare(dtype) < 2e-4


def test_loss_of_more_rows_than_are_taken_at_a_time() -> None:
    assert Case(1, 1100, 20, 4, 0.2, 0.3).compare() < 2e-4


def test_rows_of_weight_0_do_not_count() -> None:
    case = Case(2, 4, 20, 4, 0.2, 0.3)
    case.weights[1:] = 0.0
    hidden = case.hidden.float().requires_grad_()
    arguments = (case.columns, case.probabilities, case.weights)
    loss = sparse_cross_entropy(hidden, case.head.float(), *arguments)
    loss.backward()
    alone = reference_loss(case.hidden[:1], case.head, case.known[:1], case.weights[:1])
    assert float(loss.detach()) == pytest.approx(float(alone), rel=1e-4)
    assert hidden.grad is not None
    assert not hidden.grad[1:].any()


def test_the_loss_is_least_where_the_student_is_the_teacher() -> None:
    """There it is the teacher's entropy, and has no slope."""
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(12, 6, generator=generator)
    hidden = torch.randn(5, 6, generator=generator).requires_grad_()
    p = (hidden.detach() @ head.T).softmax(-1)
    top = torch.topk(p, 4, dim=-1)
    loss = sparse_cross_entropy(hidden, head, top.indices, top.values, torch.ones(5))
    loss.backward()
    assert hidden.grad is not None
    assert float(hidden.grad.abs().max()) < 1e-5
    coarse = torch.cat([top.values, 1 - top.values.sum(-1, keepdim=True)], dim=-1)
    assert float(loss.detach()) == pytest.approx(float(-(coarse * coarse.log()).sum()), rel=1e-4)


@pytest.mark.parametrize("bug", ["a missing token counts as column 0", "no tail", "no weights"])
def test_a_wrong_loss_would_be_noticed(bug: str) -> None:
    case = Case(3, 5, 20, 4, 0.3, 0.5)
    if bug == "a missing token counts as column 0":
        # What `probabilities` says of it does not reach the loss as 0.
        case.probabilities = torch.where(case.probabilities == 0, 0.1, case.probabilities)
    elif bug == "no tail":
        case.probabilities /= case.probabilities.sum(-1, keepdim=True)
    else:
        case.weights, weights = torch.ones_like(case.weights), case.weights
        wrong = sparse_cross_entropy(
            case.hidden, case.head, case.columns, case.probabilities, case.weights
        )
        right = reference_loss(case.hidden, case.head, case.known, weights)
        assert abs(float(wrong - right)) > 0.1
        return
    assert case.compare() > 0.05


# The student.


@pytest.fixture(scope="module")
def beginning(target_folder: Path) -> Beginning:
    return beginning_of(raw(target_folder), 1)


IDS = torch.randint(300, (3, 20), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits_of(student: Student, token_ids: torch.Tensor = IDS) -> torch.Tensor:
    found: torch.Tensor = student.eval()(token_ids) @ student.head.T
    return found


@pytest.mark.parametrize("layers", [2, [0, 1]])
def test_a_student_with_all_of_the_target_is_the_target(target_folder: Path, layers: Any) -> None:
    target = raw(target_folder)
    student = Student(beginning_of(target, layers), torch.arange(300))
    with torch.no_grad():
        expected = target(IDS, use_cache=False).logits
    assert torch.equal(logits_of(student), expected)
    # A vocabulary takes its part of them.
    part = Student(beginning_of(target, layers), VOCABULARY)
    assert torch.allclose(logits_of(part), expected[..., VOCABULARY], atol=1e-5)


def test_layers_are_chosen_by_number_or_by_name(target_folder: Path) -> None:
    target = raw(target_folder)
    target.model.layers.extend(raw(target_folder).model.layers)
    target.model.layers.extend([raw(target_folder).model.layers[1]])
    target.config.num_hidden_layers = 5
    chosen = {wanted: list(beginning_of(target, wanted).indices) for wanted in range(1, 6)}
    assert chosen == {1: [0], 2: [0, 4], 3: [0, 2, 4], 4: [0, 1, 3, 4], 5: [0, 1, 2, 3, 4]}
    begun = beginning_of(target, [1, 4])
    assert list(begun.indices) == [1, 4]
    for state, index in zip(begun.layers, (1, 4), strict=True):
        own = target.model.layers[index].state_dict()
        assert all(torch.equal(state[name], own[name]) for name in own)


@pytest.mark.parametrize("layers", [3, 0, [], [0, 2], [-1], [2]])
def test_layers_that_the_target_has_not_got_are_refused(target_folder: Path, layers: Any) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        beginning_of(raw(target_folder), layers)


def test_a_student_outlives_its_target(target_folder: Path) -> None:
    target = raw(target_folder)
    student = Student(beginning_of(target, 2), VOCABULARY)
    before = logits_of(student)
    for layer in target.model.layers:
        for parameter in layer.parameters():
            parameter.data.zero_()
    assert torch.equal(logits_of(student), before)


def test_padding_changes_nothing(beginning: Beginning) -> None:
    student = Student(beginning, VOCABULARY)
    longer = torch.cat([IDS, torch.zeros_like(IDS)], dim=1)
    assert torch.allclose(logits_of(student, longer)[:, :20], logits_of(student), atol=1e-5)


def test_a_student_may_be_of_another_width(beginning: Beginning) -> None:
    student = Student(beginning, VOCABULARY, 16)
    assert student.config.hidden_size == 16
    assert student(IDS).shape == (3, 20, 16)
    assert student.head.shape == (100, 16)
    assert student.projection is not None
    assert Student(beginning, VOCABULARY, 32).projection is None


COPIED = ("qwen2", "qwen3, windows and biases", "mistral", "phi3", "olmo2", "mixtral", "glm4")
REFUSED = ("gemma", "gemma2", "gemma3", "granite", "cohere2", "phi", "gpt_neox", "gpt2", "opt")


@pytest.mark.parametrize("name", COPIED)
def test_a_student_of_other_architectures_is_the_target_too(name: str) -> None:
    target = random_model(config_of({**FUSED, **GENERIC}[name]))
    token_ids = IDS % target.config.vocab_size
    student = Student(beginning_of(target, 2), torch.arange(target.config.vocab_size))
    with torch.no_grad():
        expected = target(token_ids, use_cache=False).logits
    assert torch.allclose(logits_of(student, token_ids), expected, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_student_would_leave_out_is_refused(name: str) -> None:
    target = random_model(config_of({**FUSED, **GENERIC}[name]))
    with pytest.raises(ValueError, match=f"'{target.config.model_type}' cannot be distilled"):
        beginning_of(target, 1)


# Training.


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> list[Path]:
    """Two shards of short texts."""
    folder = tmp_path_factory.mktemp("corpus")
    writer = Writer(
        packed(target_folder),
        TEMPLATE,
        **{"seed": 1, "num_slots": 16, "max_length": 24, "max_prompt": 8, "num_top": 8},
    )
    paths = []
    for index in range(2):
        paths.append(folder / f"{index}.safetensors")
        tasks = [Task(number) for number in range(16 * index, 16 * index + 16)]
        shards.save(writer.write(tasks), paths[-1])
    return paths


class Stop(Exception):
    """Stands for a kill."""


class Run:
    """One training, as often interrupted as asked for."""

    def __init__(self, folder: Path, beginning: Beginning, corpus: list[Path], **options: Any):
        self._checkpoint = folder / "learning.pt"
        self._beginning, self._corpus = beginning, corpus
        self._hidden_size = options.pop("hidden_size", None)
        self._options = {"epochs": 2, "seed": 3, **options}
        self.told: list[tuple[Step, int]] = []

    def go(self, stop_after: int | None = None) -> Trainer:
        """Up to a step, or to the end."""
        torch.manual_seed(0)
        self.student = Student(self._beginning, VOCABULARY, self._hidden_size)
        trainer = Trainer(
            self.student,
            self._corpus,
            tokens_per_step=128,
            learning_rate=0.03,
            head_learning_rate=3e-3,
            checkpoint=self._checkpoint,
            compile_model=False,
            **self._options,
        )

        def report(step: Step, total: int) -> None:
            self.told.append((step, total))
            if step.step == stop_after:
                raise Stop

        trainer.train(report)
        return trainer


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.student.state_dict().items()}


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, beginning: Beginning, corpus: list[Path]
) -> tuple[dict[str, torch.Tensor], list[Step]]:
    run = Run(tmp_path_factory.mktemp("run"), beginning, corpus)
    trainer = run.go()
    total = len(trainer.curve)
    assert total > 6
    assert [(step.step, count) for step, count in run.told] == [
        (i, total) for i in range(1, total + 1)
    ]
    return weights_of(run), trainer.curve


@pytest.mark.slow
def test_a_student_learns(
    tmp_path: Path, beginning: Beginning, corpus: list[Path], uninterrupted: Any
) -> None:
    run = Run(tmp_path, beginning, corpus, epochs=12)
    curve = run.go().curve
    texts = [text for path in corpus for text in shards.load(path)]
    each = len(curve) // 12
    assert sum(step.num_tokens for step in curve) == 12 * sum(len(t.logprobs) for t in texts)
    first, last = (
        sum(step.loss * step.num_tokens for step in part) / sum(step.num_tokens for step in part)
        for part in (curve[:each], curve[-each:])
    )
    assert last < 0.8 * first
    # Embeddings stay the target's, and everything else moved.
    assert torch.equal(run.student.embedding, beginning.embedding)
    begun = Student(beginning, VOCABULARY).state_dict()
    unmoved = [name for name, value in weights_of(run).items() if torch.equal(value, begun[name])]
    assert unmoved == ["vocabulary"]


@pytest.mark.parametrize("stops", [[1], [2], [3], [4], [5], [1, 3, 4, 7]])
def test_an_interrupted_training_takes_the_same_steps(
    tmp_path: Path,
    beginning: Beginning,
    corpus: list[Path],
    uninterrupted: tuple[dict[str, torch.Tensor], list[Step]],
    monkeypatch: pytest.MonkeyPatch,
    stops: list[int],
) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_STEPS", 2)
    weights, curve = uninterrupted
    run = Run(tmp_path, beginning, corpus)
    for stop in stops:
        with pytest.raises(Stop):
            run.go(stop)
    trainer = run.go()
    assert trainer.curve == curve
    found = weights_of(run)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    # It went on from the last checkpoint: a stop costs two steps at most.
    taken = [step.step for step, _ in run.told]
    assert len(taken) <= len(curve) + 2 * len(stops)
    # What is done already is not done again.
    again = run.go()
    assert again.curve == curve
    assert len(run.told) == len(taken)
    assert all(torch.equal(weights_of(run)[name], weights[name]) for name in weights)


def test_a_checkpoint_that_was_begun_is_not_read(
    tmp_path: Path, beginning: Beginning, corpus: list[Path], uninterrupted: Any
) -> None:
    (tmp_path / "learning.partial").write_bytes(b"half of it")
    assert Run(tmp_path, beginning, corpus).go().curve == uninterrupted[1]


def test_a_student_of_another_width_goes_on_as_well(
    tmp_path: Path, beginning: Beginning, corpus: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_STEPS", 2)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    whole, broken = (Run(folder, beginning, corpus, hidden_size=16) for folder in folders)
    whole.go()
    with pytest.raises(Stop):
        broken.go(3)
    broken.go()
    expected, found = weights_of(whole), weights_of(broken)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_another_seed_takes_other_steps(
    tmp_path: Path, beginning: Beginning, corpus: list[Path], uninterrupted: Any
) -> None:
    assert Run(tmp_path, beginning, corpus, seed=4).go().curve != uninterrupted[1]


def test_the_rate_goes_up_shortly_and_then_down() -> None:
    rates = [training._schedule(i / 1000) for i in range(1001)]
    peak = rates.index(max(rates))
    assert peak == 50
    assert max(rates) == pytest.approx(1.0, abs=1e-6)
    assert rates[:51] == sorted(rates[:51])
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)
