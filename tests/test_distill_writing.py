"""The target's texts, compared with those of a naive writer, and with its distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specdec.distill import picking
from specdec.distill.chat import Template
from specdec.distill.picking import top_of
from specdec.distill.texts import Kind, Text
from specdec.distill.writing import TEMPERATURES, Task, Writer
from specdec.lm.model import CausalLM
from specdec.lm.randomness import uniform
from tests.distillation import TEMPLATE, Naive, NaiveText, logits_after, packed, raw, same
from tests.models import byte_tokens, make_model, make_tokenizer

SIZES: dict[str, Any] = {"seed": 3, "max_length": 80, "max_prompt": 12, "num_top": 5}
NUM_SLOTS = 4
PROMPTS = {5: [20, 21, 22], 8: list(range(60, 80)), 11: [33]}
TASKS = [Task(number, PROMPTS.get(number)) for number in range(14)]
LEAST_WEIGHT = 0.1


@pytest.fixture(scope="module")
def target(target_folder: Path) -> CausalLM:
    return packed(target_folder)


@pytest.fixture(scope="module")
def expected(target_folder: Path) -> list[NaiveText]:
    naive = Naive(raw(target_folder), **SIZES)
    return [naive.write(task) for task in TASKS]


@pytest.fixture(scope="module")
def written(target: CausalLM) -> list[Text]:
    return write(target)


def write(
    target: CausalLM,
    tasks: Sequence[Task] = TASKS,
    *,
    template: Template = TEMPLATE,
    num_slots: int = NUM_SLOTS,
    **options: Any,
) -> list[Text]:
    writer = Writer(target, template, num_slots=num_slots, **{**SIZES, **options})
    return writer.write(tasks)


def test_texts_are_those_of_a_naive_writer(written: list[Text], expected: list[NaiveText]) -> None:
    endings = {ending for naive in expected for ending in naive.endings}
    # All that can end a turn does.
    assert endings >= {"prompt: end", "prompt: room", "answer: end", "answer: room"}, endings
    for task, text, naive in zip(TASKS, written, expected, strict=True):
        assert text.number == task.number
        assert text.token_ids.tolist() == naive.tokens
        assert text.kinds.tolist() == naive.kinds
        assert text.written.tolist() == [kind != Kind.GIVEN for kind in naive.kinds]
        assert len(text.token_ids) <= SIZES["max_length"]


def test_what_the_target_thought_is_kept(written: list[Text], expected: list[NaiveText]) -> None:
    for text, naive in zip(written, expected, strict=True):
        logprobs = torch.stack(naive.logits).log_softmax(dim=-1)
        top = torch.topk(logprobs, SIZES["num_top"], dim=-1)
        assert torch.equal(text.top_ids.long(), top.indices)
        assert text.top_logprobs.dtype == torch.float16
        assert torch.allclose(text.top_logprobs.float(), top.values, atol=1e-3, rtol=1e-3)
        own = logprobs.gather(1, text.token_ids[text.written].long()[:, None])[:, 0]
        assert torch.allclose(text.logprobs, own, atol=1e-4)
        assert text.weights.tolist() == [1.0] * len(text.logprobs)


def test_an_answer_at_temperature_0_is_greedy(written: list[Text]) -> None:
    for text in written[:: len(TEMPERATURES)]:
        answer = text.kinds[text.written] == Kind.ANSWER
        assert torch.equal(text.top_ids[answer, 0], text.token_ids[text.kinds == Kind.ANSWER])


@pytest.mark.parametrize("num_slots", [1, 3, 32])
def test_neither_slots_nor_order_change_a_text(
    target: CausalLM, written: list[Text], num_slots: int
) -> None:
    found = write(target, TASKS[::-1], num_slots=num_slots)
    assert all(map(same, found[::-1], written))


def test_the_same_tasks_give_the_same_bits(target: CausalLM, written: list[Text]) -> None:
    for text, before in zip(write(target), written, strict=True):
        assert torch.equal(text.logprobs, before.logprobs)
        assert torch.equal(text.top_logprobs, before.top_logprobs)


def test_another_seed_gives_other_texts(target: CausalLM, written: list[Text]) -> None:
    found = write(target, seed=4)
    assert not any(
        torch.equal(text.token_ids, before.token_ids)
        for text, before in zip(found, written, strict=True)
        if TASKS[text.number].prompt is None
    )


def test_a_long_opening_is_computed_once_for_all(target_folder: Path, target: CausalLM) -> None:
    template = TEMPLATE._replace(opening=[3 * i % 200 + 50 for i in range(37)])
    tasks = TASKS[4:8]
    naive = Naive(raw(target_folder), template, **SIZES)
    fed = 0
    forward = target.forward

    def counted(segments: Any) -> torch.Tensor:
        nonlocal fed
        fed += sum(len(segment.token_ids) for segment in segments)
        return forward(segments)

    target.forward = counted  # type: ignore[method-assign]
    try:
        found = write(target, tasks, template=template)
    finally:
        del target.forward
    assert [text.token_ids.tolist() for text in found] == [naive.write(t).tokens for t in tasks]
    assert fed <= 32 + sum(len(text.token_ids) - 32 for text in found)


def test_a_model_without_a_template_begins_by_chance(target_folder: Path, target: CausalLM) -> None:
    """Its texts at temperature 0 would otherwise all be one."""
    template = Template([7], [], TEMPLATE.ends)
    tasks = [Task(number) for number in range(0, 32, 4)]
    naive = Naive(raw(target_folder), template, **SIZES)
    found = [text.token_ids.tolist() for text in write(target, tasks, template=template)]
    assert found == [naive.write(task).tokens for task in tasks]
    assert len({tuple(tokens) for tokens in found}) == len(tasks)


def test_a_text_that_loops_ends(target_folder: Path, tmp_path: Path) -> None:
    model: Any = raw(target_folder)
    # With nothing but its embeddings left, each token depends on the one before it alone.
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.save_pretrained(tmp_path)
    make_tokenizer(byte_tokens(300)).save_pretrained(tmp_path)
    template = TEMPLATE._replace(ends=frozenset())
    tasks = [Task(number, [number]) for number in range(0, 24, 4)]
    naive = Naive(model, template, **{**SIZES, "max_length": 120})
    expected = [naive.write(task) for task in tasks]
    assert any(text.endings == ["answer: loop"] for text in expected)
    found = write(packed(tmp_path), tasks, template=template, max_length=120)
    assert [text.token_ids.tolist() for text in found] == [text.tokens for text in expected]


def test_progress_ends_with_all_tokens(target: CausalLM) -> None:
    told: list[int] = []
    writer = Writer(target, TEMPLATE, num_slots=NUM_SLOTS, **SIZES)
    texts = writer.write(TASKS, told.append)
    assert told == sorted(told)
    assert told[-1] == sum(len(text.logprobs) for text in texts)


# How often a token is drawn.

DRAWS = 6000


def first_tokens(target: CausalLM) -> torch.Tensor:
    """The second tokens of texts at temperature 1, counted."""
    tasks = [Task(TEMPERATURES.index(1.0) + 4 * i, []) for i in range(DRAWS)]
    sizes = {"max_length": 2, "max_prompt": 1, "num_top": 2}
    template = Template([7], [], frozenset())
    texts = write(target, tasks, template=template, num_slots=DRAWS // 4, **sizes)
    return torch.bincount(torch.stack([text.token_ids[1] for text in texts]), minlength=300)


def p_value(counts: torch.Tensor, p: torch.Tensor) -> float:
    """By chi-square; tokens that are expected less than 10 times are counted together."""
    expected = p.double() * DRAWS
    rare = expected < 10
    seen = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return float(stats.chisquare(seen.tolist(), (wanted * DRAWS / wanted.sum()).tolist()).pvalue)


def test_tokens_have_the_targets_distribution(target: CausalLM, target_folder: Path) -> None:
    """A right writer fails once in 10,000 seeds; this seed is fixed."""
    p = logits_after(raw(target_folder), [7]).softmax(-1)
    assert float(torch.topk(p, 2).values.sum()) < 0.9
    assert p_value(first_tokens(target), p) > 1e-4


def test_a_writer_that_draws_among_the_likeliest_only_would_be_noticed(
    target: CausalLM, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = logits_after(raw(target_folder), [7]).softmax(-1)
    share = float(torch.topk(p, 2).values.sum())
    monkeypatch.setattr(picking, "uniform", lambda keys: uniform(keys) * share * 0.999)
    assert p_value(first_tokens(target), p) < 1e-12


# With a student that proposes.

STUDENTS = ("near", "far", "the target itself")
K = 3


@pytest.fixture(scope="module")
def students(
    target_folder: Path, draft_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    far = make_model(tmp_path_factory.mktemp("far") / "model", seed=9, rows=300)
    return dict(zip(STUDENTS, (draft_folder, far, target_folder), strict=True))


def naive_weights(text: Text, target: Any, student: Any) -> list[float]:
    """Follows the rounds along a text."""
    tokens = text.token_ids.tolist()
    temperature = TEMPERATURES[text.number % len(TEMPERATURES)]
    weights: list[float] = []
    drafts: list[int] = []
    previous = drafted = -1
    for place in text.written.nonzero()[:, 0].tolist():
        stood = drafts[drafted : drafted + 1] == [tokens[previous]]
        if previous < 0 or place != previous + 1 or not stood:
            drafts, drafted = [], 0
            for _ in range(K):
                drafts.append(int(logits_after(student, tokens[:place] + drafts).argmax()))
        else:
            drafted += 1
        previous = place
        if drafted == K:
            weights.append(1.0)
        elif text.kinds[place] == Kind.ANSWER and temperature == 0.0:
            weights.append(LEAST_WEIGHT if drafts[drafted] == tokens[place] else 1.0)
        else:
            p, q = (
                float(logits_after(model, tokens[:place]).softmax(-1)[tokens[place]])
                for model in (target, student)
            )
            weights.append(max(LEAST_WEIGHT, 1.0 - min(1.0, q / p)))
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDENTS)
def test_a_students_proposals_change_the_weights_alone(
    target: CausalLM,
    target_folder: Path,
    written: list[Text],
    students: dict[str, Path],
    name: str,
) -> None:
    options: dict[str, Any] = {"student": packed(students[name]), "num_draft_tokens": K}
    found = write(target, **options)
    assert all(map(same, found, written))
    models = raw(target_folder), raw(students[name])
    for text in found[4:9]:
        expected = naive_weights(text, *models)
        assert text.weights.tolist() == pytest.approx(expected, abs=1e-3)


def test_all_but_bonus_tokens_of_the_target_itself_weigh_least(
    target: CausalLM, students: dict[str, Path]
) -> None:
    options: dict[str, Any] = {"student": packed(students[STUDENTS[2]]), "num_draft_tokens": K}
    weights = torch.cat([text.weights for text in write(target, **options)])
    assert set(weights.tolist()) == {torch.tensor(LEAST_WEIGHT).item(), 1.0}
    # Greedily every proposal stands, and every fourth token is a bonus.
    greedy = write(target, [Task(0, [50])], template=Template([7], [], frozenset()), **options)[0]
    assert (greedy.weights == 1.0).nonzero()[:, 0].tolist() == list(
        range(K, len(greedy.weights), K + 1)
    )


# The likeliest tokens.


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 3),
    size=st.one_of(
        st.integers(1, 400),
        st.builds(lambda blocks, off: 128 * blocks + off, st.integers(3, 12), st.integers(-2, 2)),
    ),
    count=st.integers(1, 6),
    levels=st.sampled_from([1, 2, 5, 50, 1 << 20]),
    seed=st.integers(0, 1 << 30),
)
def test_the_likeliest_are_those_of_topk(
    rows: int, size: int, count: int, levels: int, seed: int
) -> None:
    """With few levels nearly all values are tied: any of the equal ids will do, once each."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (rows, size), generator=generator).float()
    logits[logits == 0] = -math.inf
    found = top_of(logits, count)
    expected = torch.topk(logits, min(count, size), dim=-1)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(logits.gather(-1, found.indices), expected.values)
    assert all(len(set(ids)) == len(ids) for ids in found.indices.tolist())
