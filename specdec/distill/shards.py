"""The texts of a distillation: what is written already is read, the rest is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specdec.distill.chat import Template
from specdec.distill.progress import Progress, Report
from specdec.distill.recipe import WritingRecipe
from specdec.distill.texts import Text, lengths, load, num_written, save
from specdec.distill.writing import TEMPERATURES, Task, Writer
from specdec.lm.model import CausalLM

_HELD_OUT = 1 << 40
_ROLLOUTS = 1 << 41
"""Numbers of the first text that nobody learns from, and of the first of the on-policy phase."""
_HELD_OUT_TEXTS = 128
_HELD_OUT_PROMPTS = 16
"""One prompt of so many is answered in texts that nobody learns from, and in no others."""


class Shards:
    """Shards of texts in a folder."""

    def __init__(
        self,
        folder: Path,
        recipe: WritingRecipe,
        seed: int,
        target: CausalLM,
        template: Template,
        prompts: Sequence[list[int]],
        report: Report,
    ) -> None:
        """
        Args:
            folder: where the shards are.
            recipe: how texts are written.
            seed: of the texts.
            target: by whom.
            template: of its conversations.
            prompts: token ids of what users say, if the target is not to think of all of it.
            report: told of progress.
        """
        self._folder, self._recipe, self._seed, self._report = folder, recipe, seed, report
        self._target, self._template = target, template
        # Said twice, a prompt could be on both sides.
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        self._held_out_prompts = distinct[::_HELD_OUT_PROMPTS]
        del distinct[::_HELD_OUT_PROMPTS]
        # The only prompt there is has to do for both.
        self._prompts = distinct or self._held_out_prompts

    def held_out(self) -> tuple[list[Text], list[Text]]:
        """Texts that nobody learns from: those answered at temperature 0, and at temperature 1."""
        path = self._folder / "held-out.safetensors"
        if not path.exists():
            tasks = self._tasks(_HELD_OUT, min(_HELD_OUT_TEXTS, self._recipe.texts_per_shard))
            self._write("Writing what is held out", self._writer(), tasks, path, 0, None)
        texts = load(path)
        greedy, warm = (
            [text for text in texts if TEMPERATURES[text.number % len(TEMPERATURES)] == wanted]
            for wanted in (0.0, 1.0)
        )
        return greedy, warm

    def texts(self, num_tokens: int) -> list[Path]:
        """Shards of at least so many written tokens together."""
        return self._shards("texts", "Writing", num_tokens, 0, self._writer)

    def rollouts(self, num_tokens: int, student: Callable[[], CausalLM], k: int) -> list[Path]:
        """The same, of texts that were written with a student's proposals of k tokens."""
        stage = "Writing with the student"
        return self._shards(
            "rollouts", stage, num_tokens, _ROLLOUTS, lambda: self._writer(student(), k)
        )

    def _writer(self, student: CausalLM | None = None, k: int = 0) -> Writer:
        recipe = self._recipe
        return Writer(
            self._target,
            self._template,
            seed=self._seed,
            num_slots=recipe.slots,
            max_length=recipe.max_length,
            max_prompt=recipe.max_prompt,
            num_top=recipe.num_top,
            student=student,
            num_draft_tokens=k,
        )

    def _shards(
        self, name: str, stage: str, num_tokens: int, first: int, open_writer: Callable[[], Writer]
    ) -> list[Path]:
        recipe = self._recipe
        paths: list[Path] = []
        written = 0
        writer: Writer | None = None
        while written < num_tokens:
            path = self._folder / name / f"{len(paths):05d}.safetensors"
            if not path.exists():
                writer = writer or open_writer()
                # The last shards are no larger than what is missing, but fill the slots.
                missing = -(-(num_tokens - written) // recipe.max_length)
                count = min(max(missing, recipe.slots), recipe.texts_per_shard)
                tasks = self._tasks(first, count)
                self._write(stage, writer, tasks, path, written, num_tokens)
            written += num_written(path)
            first += len(lengths(path))
            paths.append(path)
        return paths

    @torch.inference_mode()
    def _write(
        self,
        stage: str,
        writer: Writer,
        tasks: Sequence[Task],
        path: Path,
        before: int,
        total: int | None,
    ) -> None:
        """Writes a shard; `before` and `total` are tokens, for the report."""
        most = total or len(tasks) * self._recipe.max_length

        def report(done: int) -> None:
            self._report(Progress(stage, min(before + done, most), most))

        path.parent.mkdir(parents=True, exist_ok=True)
        save(writer.write(tasks, report), path)
        if total is None:
            report(most)

    def _tasks(self, first: int, count: int) -> list[Task]:
        """Tasks from a number on. As many of them as the recipe says answer the user's prompts."""
        prompts = self._held_out_prompts if first == _HELD_OUT else self._prompts
        share = self._recipe.corpus_share if prompts else 0.0
        tasks = []
        for number in range(first, first + count):
            # Shares spread evenly, whatever the share: a Bresenham line. It counts the rounds
            # through the temperatures, so that each of them has its share.
            turn, place = divmod(number, len(TEMPERATURES))
            rank = int((turn + 1) * share)
            given = rank > int(turn * share)
            index = (rank - 1) * len(TEMPERATURES) + place
            tasks.append(Task(number, list(prompts[index % len(prompts)]) if given else None))
        return tasks
