"""Texts on their way from the target to the student: templates, tasks, shards, batches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.distill import texts as shards
from specdec.distill.batches import collate, columns_of, epoch
from specdec.distill.chat import Template, template_of
from specdec.distill.recipe import Recipe, TrainingRecipe, WritingRecipe, differences, keep
from specdec.distill.shards import Shards
from specdec.distill.texts import Kind, Text
from specdec.distill.writing import TEMPERATURES, Task
from tests.distillation import TEMPLATE, packed, same
from tests.models import EOS, byte_tokens, make_tokenizer

TOP = 4


def make_text(number: int, kinds: Sequence[Kind], seed: int = 0, size: int = 50) -> Text:
    """A text with these kinds of tokens, its numbers all at random."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    written = torch.tensor([kind != Kind.GIVEN for kind in kinds])
    count = int(written.sum())
    logprobs = torch.randn(count, size, generator=generator).log_softmax(-1)
    top = torch.topk(logprobs, TOP, dim=-1)
    token_ids = torch.randint(size, (len(kinds),), generator=generator, dtype=torch.int32)
    return Text(
        number,
        token_ids,
        torch.tensor([int(kind) for kind in kinds], dtype=torch.uint8),
        written,
        top.indices.int(),
        top.values.half(),
        logprobs.gather(1, token_ids[written].long()[:, None])[:, 0],
        torch.rand(count, generator=generator),
    )


def random_texts(count: int, seed: int = 0) -> list[Text]:
    """Of several lengths, template first, bridge in the middle."""
    found = []
    for number in range(count):
        prompt, answer = 1 + number * 7 % 5, 1 + number * 13 % 23
        kinds = [Kind.GIVEN] * 2 + [Kind.PROMPT] * prompt + [Kind.GIVEN] * 3
        found.append(make_text(number, kinds + [Kind.ANSWER] * answer, seed))
    return found


# Shards.


def test_a_shard_holds_what_was_saved(tmp_path: Path) -> None:
    texts = random_texts(9)
    shards.save(texts, tmp_path / "a.safetensors")
    found = shards.load(tmp_path / "a.safetensors")
    assert len(found) == 9
    for text, before in zip(found, texts, strict=True):
        assert same(text, before)
        for name in ("top_logprobs", "logprobs", "weights"):
            assert torch.equal(getattr(text, name), getattr(before, name))
            assert getattr(text, name).dtype == getattr(before, name).dtype
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


# Shards.


def shards_in(folder: Path, target: Any = None, *, prompts: Any = (), **recipe: Any) -> Shards:
    sizes = {"texts_per_shard": 4, "slots": 2, "max_length": 24, "max_prompt": 6, "num_top": TOP}
    writing = WritingRecipe(**{**sizes, **recipe})
    return Shards(folder, writing, 1, target, TEMPLATE, prompts, lambda progress: None)


def test_texts_that_are_there_are_read_and_the_rest_is_written(
    tmp_path: Path, target_folder: Path
) -> None:
    model = packed(target_folder)
    whole = shards_in(tmp_path / "whole", model).texts(200)
    assert len(whole) >= 3
    # One shard less, and one that was begun and never finished.
    lost, begun = whole[1], whole[2]
    before = {path: shards.load(path) for path in whole}
    begun.with_suffix(".partial").write_bytes(begun.read_bytes()[:50])
    begun.unlink()
    lost.unlink()
    kept = whole[0].stat().st_mtime_ns
    again = shards_in(tmp_path / "whole", model).texts(200)
    assert again == whole
    assert whole[0].stat().st_mtime_ns == kept
    for path in whole:
        assert all(map(same, shards.load(path), before[path]))
    # All of it was written that was asked for, and not a shard more.
    counts = [sum(len(text.logprobs) for text in before[path]) for path in whole]
    assert sum(counts[:-1]) < 200 <= sum(counts)


def test_texts_of_one_kind_are_not_those_of_another(tmp_path: Path, target_folder: Path) -> None:
    model = packed(target_folder)
    shelf = shards_in(tmp_path, model, texts_per_shard=8)
    greedy, warm = shelf.held_out()
    assert {text.number % len(TEMPERATURES) for text in greedy} == {TEMPERATURES.index(0.0)}
    assert {text.number % len(TEMPERATURES) for text in warm} == {TEMPERATURES.index(1.0)}
    learned = [text for path in shelf.texts(100) for text in shards.load(path)]
    rollouts = [
        text for path in shelf.rollouts(100, lambda: model, 2) for text in shards.load(path)
    ]
    numbers = [{text.number for text in each} for each in (greedy + warm, learned, rollouts)]
    assert all(not (a & b) for a, b in itertools.combinations(numbers, 2))
    assert min(float(text.weights.min()) for text in rollouts) == pytest.approx(0.1)


def tasks_of(share: float, prompts: Sequence[list[int]], count: int) -> list[Task]:
    shelf = shards_in(Path("/nowhere"), prompts=prompts, corpus_share=share)
    return [task for first in range(0, count, 40) for task in shelf._tasks(first, 40)]


@pytest.mark.parametrize("share", [0.0, 0.125, 0.3, 0.5, 0.77, 1.0])
def test_the_share_of_the_corpus_is_exact_at_every_temperature(share: float) -> None:
    """Else the draft would be measured greedily on one kind of text, sampled on another."""
    tasks = tasks_of(share, [[i] for i in range(30)], 4000)
    assert [task.number for task in tasks] == list(range(4000))
    for place in range(len(TEMPERATURES)):
        given = sum(task.prompt is not None for task in tasks[place :: len(TEMPERATURES)])
        assert given == round(1000 * share)


def test_all_prompts_of_the_corpus_are_answered_by_turns() -> None:
    tasks = tasks_of(0.4, [[i] for i in range(30)], 4000)
    asked = Counter(task.prompt[0] for task in tasks if task.prompt is not None)
    assert sum(asked.values()) == 1600
    assert max(asked.values()) - min(asked.values()) <= 1


def test_prompts_that_are_held_out_are_not_learned_from() -> None:
    prompts = [[i] for i in range(100)] * 2
    shelf = shards_in(Path("/nowhere"), prompts=prompts, corpus_share=1.0)
    held_out = {tuple(task.prompt or ()) for task in shelf._tasks(1 << 40, 128)}
    learned = {tuple(task.prompt or ()) for task in shelf._tasks(0, 4000)}
    rolled = {tuple(task.prompt or ()) for task in shelf._tasks(1 << 41, 4000)}
    assert held_out
    assert len(learned) == 100 - len(held_out)
    assert not held_out & learned
    assert rolled == learned


def test_without_a_corpus_the_target_thinks_of_everything() -> None:
    assert all(task.prompt is None for task in tasks_of(0.5, [], 400))


def test_a_single_prompt_will_do() -> None:
    tasks = tasks_of(0.5, [[3, 4]], 400)
    assert sum(task.prompt == [3, 4] for task in tasks) == 200


# The recipe.

RECIPE = Recipe(
    target="some/model",
    license="mit",
    writing=WritingRecipe(),
    training=TrainingRecipe(layers=(0, 2)),
)


def test_what_was_begun_by_another_recipe_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "work" / "recipe.json"
    assert differences(path, RECIPE) == []
    assert not path.exists()
    keep(path, RECIPE)
    assert differences(path, RECIPE) == []
    other = RECIPE.model_copy(update={"seed": 5, "training": TrainingRecipe(layers=3, epochs=9)})
    assert differences(path, other) == [
        "seed was 0, is 5",
        "layers was [0, 2], is 3",
        "epochs was 4, is 9",
    ]


@pytest.mark.parametrize("content", ["", "{", '{"target": "a"}', "[]"])
def test_a_recipe_that_cannot_be_read_is_another_one(tmp_path: Path, content: str) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(content)
    assert differences(path, RECIPE) == ["recipe.json cannot be read"]


# Templates.

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tokenizer(template: str | None, special: Sequence[str] = ()) -> Any:
    found = make_tokenizer(byte_tokens(300))
    found.add_special_tokens({"additional_special_tokens": list(special)})
    found.chat_template = template
    return found


def test_a_template_is_what_stands_around_the_users_text() -> None:
    made = tokenizer(CHATML, ["<s>", "</s>"])
    begin, end, eos = made.convert_tokens_to_ids(["<s>", "</s>", EOS])
    found = template_of(made, (eos,))
    assert found.opening == [begin, *made.encode("user\n")]
    assert found.bridge == [end, *made.encode("\n"), begin, *made.encode("assistant\n")]
    # What ends the user's turn, and what ends the model's.
    assert found.ends == {end, eos}


def test_what_begins_the_bridge_ends_no_turn_if_it_is_ordinary_text() -> None:
    made = tokenizer("{{ 'u:' + messages[0]['content'] + '\na:' }}")
    found = template_of(made, (0, 17))
    assert found.opening == made.encode("u:")
    assert found.bridge == made.encode("\na:")
    assert found.ends == {0, 17}


def test_without_a_template_there_is_what_a_text_begins_with() -> None:
    made = tokenizer(None)
    assert template_of(made, (0, 17)) == Template([0], [], frozenset({0, 17}))
    made.bos_token = "a"
    assert template_of(made, (0,)).opening == [made.convert_tokens_to_ids("a")]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0]['content'] | upper }}", "does not hold"),
        ("{{ messages[0]['content'] * 2 }}", "does not hold"),
        ("assistant:", "does not hold"),
        ("{{ raise_exception('no system prompt') }}", "no system prompt"),
    ],
)
def test_a_template_of_another_kind_is_refused(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        template_of(tokenizer(template), (0,))


def test_a_text_must_begin_with_something() -> None:
    with pytest.raises(ValueError, match="begin"):
        template_of(tokenizer(None), ())


# Batches.


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 40), limit=st.sampled_from([1, 16, 40, 200]), seed=st.integers(0, 99))
def test_an_epoch_has_every_text_once_in_batches_of_a_size(
    count: int, limit: int, seed: int
) -> None:
    texts = random_texts(count)
    batches = list(epoch(texts, limit, seed))
    assert sorted(text.number for batch in batches for text in batch) == list(range(count))
    for batch in batches:
        padded = len(batch) * max(len(text.token_ids) - 1 for text in batch)
        assert padded <= limit or len(batch) == 1
    again = list(epoch(texts, limit, seed))
    numbers = [[text.number for text in batch] for batch in batches]
    assert numbers == [[text.number for text in batch] for batch in again]


def test_epochs_differ_and_many_texts_make_several_pools() -> None:
    texts = random_texts(600)
    orders = [[t.number for batch in epoch(texts, 64, seed) for t in batch] for seed in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(600))
    assert orders[0] != orders[1]


def test_a_batch_is_what_a_naive_construction_gives() -> None:
    texts = random_texts(6)
    # Token 0 is in the vocabulary, and so are few others.
    vocabulary = torch.tensor([0, 3, 4, 9, 20, 33, 49])
    names = vocabulary.tolist()
    batch = collate(texts, columns_of(vocabulary, 50))
    fed = batch.token_ids.flatten().tolist()
    width = batch.token_ids.shape[1]
    assert width == max(len(text.token_ids) for text in texts) - 1
    row = 0
    missing = 0
    for index, text in enumerate(texts):
        for place, thought in zip(
            text.written.nonzero()[:, 0].tolist(), range(len(text.logprobs)), strict=True
        ):
            # The state after all tokens before the place.
            assert int(batch.rows[row]) == index * width + place - 1
            assert fed[index * width : index * width + place] == text.token_ids[:place].tolist()
            assert float(batch.weights[row]) == float(text.weights[thought])
            for column, p, token_id, logprob in zip(
                batch.columns[row].tolist(),
                batch.probabilities[row].tolist(),
                text.top_ids[thought].tolist(),
                text.top_logprobs[thought].tolist(),
                strict=True,
            ):
                if token_id in names:
                    assert names[column] == token_id
                    assert p == pytest.approx(2.718281828**logprob, rel=1e-3)
                else:
                    missing += 1
                    assert p == 0.0
                    assert 0 <= column < len(names)
            row += 1
    assert row == len(batch.rows) == len(batch.columns)
    assert missing > row
