"""What is measured of a draft: on the target's texts alone, and yet what the services then give."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specdec.distill import folder
from specdec.distill.evaluation import acceptance, rounds
from specdec.distill.student import Beginning, Student, beginning_of
from specdec.distill.texts import Kind
from specdec.distill.writing import TEMPERATURES, Task, Writer
from specdec.lm.model import CausalLM
from tests.distillation import TEMPLATE, logits_after, packed, raw
from tests.stack import pair

# Rounds, from the probabilities that tokens stand.


def enumerated(stands: Sequence[Sequence[float]], k: int) -> tuple[list[float], float]:
    """Over all outcomes of all coins, each weighted by its probability."""
    reached, stood = [0.0] * k, [0.0] * k
    num_rounds = 0.0
    for text in stands:
        for outcome in itertools.product((True, False), repeat=len(text)):
            weight = 1.0
            for chance, accepted in zip(text, outcome, strict=True):
                weight *= chance if accepted else 1.0 - chance
            place = 0
            while place < len(text):
                num_rounds += weight
                for i in range(k + 1):
                    if place == len(text):
                        break
                    place += 1
                    if i == k:
                        break
                    reached[i] += weight
                    if not outcome[place - 1]:
                        break
                    stood[i] += weight
    alphas = [a / b if b else 0.0 for a, b in zip(stood, reached, strict=True)]
    return alphas, sum(map(len, stands)) / num_rounds


def tensors(stands: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    return [torch.tensor(text, dtype=torch.float64) for text in stands]


CHANCES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 1.0))


@settings(max_examples=60, deadline=None)
@given(
    stands=st.lists(st.lists(CHANCES, min_size=1, max_size=6), min_size=1, max_size=3),
    k=st.integers(1, 4),
)
def test_rounds_go_over_all_that_may_happen(stands: list[list[float]], k: int) -> None:
    expected_alphas, expected_tau = enumerated(stands, k)
    alphas, tau = rounds(tensors(stands), k)
    assert tau == pytest.approx(expected_tau)
    for found, expected in zip(alphas, expected_alphas, strict=True):
        assert found == pytest.approx(expected, abs=1e-3)


def test_rounds_of_a_long_text_are_those_that_are_drawn() -> None:
    """1,000 drawn runs; τ and α lie within five standard errors."""
    generator = random.Random(1)
    text, k, runs = [generator.random() for _ in range(60)], 3, 1000
    taus: list[float] = []
    reached, stood = 0, 0
    for _ in range(runs):
        place, count = 0, 0
        while place < len(text):
            count += 1
            for i in range(k + 1):
                place += 1
                accepted = i < k and place <= len(text) and generator.random() < text[place - 1]
                reached += i == 0
                stood += i == 0 and accepted
                if not accepted or place == len(text):
                    break
        taus.append(count)
    alphas, tau = rounds(tensors([text]), k)
    mean = sum(taus) / runs
    error = (sum((x - mean) ** 2 for x in taus) / runs) ** 0.5 / runs**0.5
    assert abs(len(text) / tau - mean) < 5 * error
    assert abs(alphas[0] - stood / reached) < 5 * (0.25 / reached) ** 0.5


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_rounds_of_an_even_text_are_those_of_the_formula(alpha: float, k: int) -> None:
    """τ = (1 − α^(K+1)) / (1 − α), arXiv 2211.17192."""
    alphas, tau = rounds(tensors([[alpha] * 3000]), k)
    expected = sum(alpha**i for i in range(k + 1))
    assert tau == pytest.approx(expected, rel=5e-3)
    # Where α is 0, no proposal gets to its second token.
    assert alphas[0] == pytest.approx(alpha)
    assert alphas == pytest.approx([alpha] * k)


# How likely a token stands.

PROMPT = [20, 21, 22]
LENGTH = 40


@pytest.fixture(scope="module")
def target(target_folder: Path) -> CausalLM:
    return packed(target_folder)


@pytest.fixture(scope="module")
def beginning(target_folder: Path) -> Beginning:
    return beginning_of(raw(target_folder), 1)


def made(beginning: Beginning, vocabulary: torch.Tensor) -> Student:
    """A student whose every weight is in bfloat16, as its folder keeps it."""
    student = Student(beginning, vocabulary).eval()
    for parameter in student.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return student


@pytest.fixture(autouse=True)
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared here must not depend on what this machine multiplies natively."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


def near(target_folder: Path, vocabulary: torch.Tensor) -> Student:
    """Nearly the target, so that whole proposals stand, and not all."""
    student = made(beginning_of(raw(target_folder), 2), vocabulary)
    generator = torch.Generator().manual_seed(1)
    noisy = student.head.data + 0.1 * torch.randn(student.head.shape, generator=generator)
    student.head.data = noisy.bfloat16().float()
    return student


def answers(target: CausalLM, temperature: float, count: int, length: int = LENGTH) -> Any:
    """Answers to prompts of three tokens."""
    writer = Writer(
        target,
        TEMPLATE._replace(ends=frozenset()),
        **{"seed": 2, "num_slots": 64, "max_length": length, "max_prompt": 3, "num_top": 4},
    )
    first = TEMPERATURES.index(temperature)
    return writer.write([Task(first + 4 * i, [20 + i % 200, 21, 22]) for i in range(count)])


def naive_stands(
    text: Any, vocabulary: list[int], student: Student, target: Any
) -> tuple[list[float], list[float]]:
    """For each token of the answer: whether it is the student's argmax, and min(1, q / p)."""
    tokens = text.token_ids.tolist()
    greedy, sampled = [], []
    for place in (text.kinds == Kind.ANSWER).nonzero()[:, 0].tolist():
        p = logits_after(target, tokens[:place]).softmax(-1)[tokens[place]]
        with torch.no_grad():
            q = (student(torch.tensor([tokens[:place]]))[0, -1] @ student.head.T).softmax(-1)
        inside = tokens[place] in vocabulary
        greedy.append(float(vocabulary[int(q.argmax())] == tokens[place]))
        own = q[vocabulary.index(tokens[place])] if inside else q.new_zeros(())
        sampled.append(min(1.0, float(own / p)))
    return greedy, sampled


def test_acceptance_is_that_of_a_naive_pass(
    target: CausalLM, target_folder: Path, beginning: Beginning
) -> None:
    vocabulary = [token_id for token_id in range(300) if token_id % 5]
    student = made(beginning, torch.tensor(vocabulary))
    model = raw(target_folder)
    texts = answers(target, 1.0, 3)
    found = [acceptance(student, texts, greedy=greedy) for greedy in (True, False)]
    for index, text in enumerate(texts):
        for each, expected in zip(
            found, naive_stands(text, vocabulary, student, model), strict=True
        ):
            assert each[index].tolist() == pytest.approx(expected, abs=1e-3)
    assert any(0.0 in each.tolist() for each in found[1])


def test_the_users_turn_does_not_count(target: CausalLM, beginning: Beginning) -> None:
    writer = Writer(
        target,
        TEMPLATE,
        **{"seed": 2, "num_slots": 4, "max_length": 40, "max_prompt": 9, "num_top": 4},
    )
    texts = writer.write([Task(3), Task(7)])
    found = acceptance(made(beginning, torch.arange(300)), texts, greedy=False)
    assert [len(each) for each in found] == [int((t.kinds == Kind.ANSWER).sum()) for t in texts]
    assert all((t.kinds == Kind.PROMPT).any() for t in texts)


def test_the_target_itself_is_always_accepted(target: CausalLM, target_folder: Path) -> None:
    student = Student(beginning_of(raw(target_folder), 2), torch.arange(300)).eval()
    for temperature, greedy in ((0.0, True), (1.0, False)):
        found = torch.cat(acceptance(student, answers(target, temperature, 4), greedy=greedy))
        assert float(found.min()) > 0.999


@pytest.mark.slow
def test_sampled_acceptance_is_the_overlap_on_average(
    target: CausalLM, target_folder: Path
) -> None:
    """E[min(1, q / p)] over the target's draws is Σ min(p, q). One context, 800 draws."""
    student = near(target_folder, torch.arange(0, 300, 2))
    context = [*TEMPLATE.opening, *PROMPT, *TEMPLATE.bridge]
    writer = Writer(
        target,
        TEMPLATE,
        **{"seed": 2, "num_slots": 1000, "max_length": len(context) + 1},
        **{"max_prompt": 3, "num_top": 4},
    )
    texts = writer.write([Task(3 + 4 * i, PROMPT) for i in range(800)])
    found = torch.cat(acceptance(student, texts, greedy=False))
    p = logits_after(raw(target_folder), context).softmax(-1)
    q = torch.zeros(300)
    with torch.no_grad():
        q[::2] = (student(torch.tensor([context]))[0, -1] @ student.head.T).softmax(-1)
    overlap = float(torch.minimum(p, q).sum())
    assert 0.3 < overlap < 0.7
    pvalue = float(stats.ttest_1samp(found.tolist(), overlap).pvalue)
    assert pvalue > 1e-4
    # One that is worse by a fifth would be noticed.
    assert float(stats.ttest_1samp((found * 0.8).tolist(), overlap).pvalue) < 1e-4


# The decisive comparison: with the three services, as clients see them.


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4])
async def test_the_services_give_the_acceptance_that_was_measured(
    tmp_path: Path, target: CausalLM, target_folder: Path, k: int
) -> None:
    student = near(target_folder, torch.tensor([i for i in range(300) if i % 12]))
    folder.save(student, folder.base_of(raw(target_folder), str(target_folder)), tmp_path / "draft")
    texts = answers(target, 0.0, 12)
    stands = acceptance(student, texts, greedy=True)
    _, tau = rounds(stands, k)
    num_rounds = num_tokens = 0
    async with pair(target_folder, tmp_path / "draft") as stack:
        for text in texts:
            answer = text.token_ids[text.kinds == Kind.ANSWER].tolist()
            prompt = text.token_ids[text.kinds == Kind.GIVEN].tolist()
            result = await stack.generate(
                prompt,
                k=k,
                temperature=0.0,
                max_new_tokens=len(answer),
                ignore_eos=True,
                rule="rejection",
            )
            assert result.token_ids == answer
            num_rounds += result.speculation.rounds
            num_tokens += len(answer)
    assert 1.2 < tau < k + 0.95
    assert num_tokens / num_rounds == pytest.approx(tau, rel=1e-9)
