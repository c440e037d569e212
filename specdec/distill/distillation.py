"""From a target to a draft: write, learn, learn from mistakes, measure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specdec.distill import folder
from specdec.distill.chat import template_of
from specdec.distill.cost import step_seconds
from specdec.distill.evaluation import acceptance, rounds
from specdec.distill.progress import Progress, Report
from specdec.distill.recipe import Recipe, differences, keep
from specdec.distill.report import Acceptance, DraftReport
from specdec.distill.reuse import reuse
from specdec.distill.shards import Shards
from specdec.distill.student import Student, beginning_of
from specdec.distill.texts import Text, load, num_written
from specdec.distill.training import Step, Trainer
from specdec.lm import loading
from specdec.lm.distilled import source_of
from specdec.lm.model import CausalLM

MOST_DRAFT_TOKENS = 10
"""K up to which the report goes."""
_LIVE_TEXTS = 8
_LIVE_SECONDS = 60.0
"""How often α is measured while the student learns, and on how many texts."""


class DistillError(Exception):
    """No draft can be made. The message is one line that says what to do."""


class Distillation:
    """Makes a draft for a target in a folder. What is done there already is not done again."""

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        *,
        device: str,
        compile_model: bool | None,
        corpus: Sequence[str],
        texts_of: Sequence[Path],
        report: Report,
    ) -> None:
        """
        Args:
            recipe: how.
            out: the draft's folder. Texts and checkpoints are in its folder `work`.
            device: of target and student.
            compile_model: whether to compile the student's layers for training; None does on CUDA.
            corpus: what users say, if the target is not to think of all of it.
            texts_of: folders of distillations whose texts are learned as well.
            report: told of progress.

        Raises:
            DistillError: the settings fit neither the target nor what was begun in the folder.
            ModelLoadError: the target cannot be loaded.
        """
        try:
            reused = [reuse(each, recipe.target, recipe.writing.num_top) for each in texts_of]
        except ValueError as error:
            raise DistillError(str(error)) from error
        self._reused = [shard for each in reused for shard in each.shards]
        if not self._reused and not recipe.training.tokens:
            raise DistillError("there is nothing to learn from: give --tokens, or --texts")
        texts = tuple(each.texts for each in reused)
        training = recipe.training.model_copy(update={"texts": texts})
        recipe = recipe.model_copy(update={"training": training})
        self._recipe, self._out, self._report = recipe, out, report
        self._work = out / "work"
        changed = differences(self._work / "recipe.json", recipe)
        if changed:
            raise DistillError(
                f"{out} holds the beginning of another distillation ({'; '.join(changed)}): give "
                "the same settings to go on, or another --out"
            )
        report(Progress("Loading the target", 0, 1))
        raw = loading.read_model(
            source_of(recipe.target), device=device, dtype=recipe.writing.dtype
        )
        try:
            self._base = folder.base_of(raw.model, recipe.target)
            # Before the target is made ready, which uses up its layers.
            self._beginning = beginning_of(raw.model, recipe.training.layers)
            target = loading.ready(raw, recipe.target)
            template = template_of(raw.tokenizer, target.eos_token_ids)
        except ValueError as error:
            raise DistillError(str(error)) from error
        needed = len(template.opening) + recipe.writing.max_prompt + len(template.bridge)
        if needed >= min(recipe.writing.max_length, target.max_context_length):
            raise DistillError(
                f"template and user's turn take up to {needed} tokens: no room is left for an "
                f"answer in {recipe.writing.max_length}; give more --max-length or less "
                "--max-prompt"
            )
        # Not before: settings that do not fit can still be changed.
        keep(self._work / "recipe.json", recipe)
        cuda = target.model.device.type == "cuda"
        self._compile = cuda if compile_model is None else compile_model
        self._target, self._ends = target.model, sorted(template.ends)
        self._max_context = target.max_context_length
        prompts = [raw.tokenizer.encode(text, add_special_tokens=False) for text in corpus]
        self._shards = Shards(
            self._work, recipe.writing, recipe.seed, target.model, template, prompts, report
        )
        report(Progress("Loading the target", 1, 1))

    def run(self) -> DraftReport:
        """Does what is left to do. The draft is in the folder afterwards."""
        recipe = self._recipe.training
        held_out = self._shards.held_out()
        shards = self._shards.texts(recipe.tokens) + self._reused
        # What does not begin as a part of the target begins at random.
        torch.manual_seed(self._recipe.seed)
        student = Student(self._beginning, self._vocabulary(shards), recipe.hidden_size)
        student.to(self._target.device)
        curve = self._train(student, "Learning", shards, recipe.epochs, 1.0, held_out[0])
        if recipe.rollout_tokens:
            rollouts = self._shards.rollouts(
                recipe.rollout_tokens, lambda: self._ready(student), recipe.num_draft_tokens
            )
            stage = "Learning from mistakes"
            curve += self._train(student, stage, rollouts, 1, recipe.rollout_rate, held_out[0])
        report = self._measure(student, held_out, shards, curve)
        report.save(self._out)
        return report

    def _vocabulary(self, shards: Sequence[Path]) -> torch.Tensor:
        """int64 [V'], ascending: the tokens that the target wrote most often, and those that end a
        turn."""
        counts = torch.zeros(len(self._beginning.embedding), dtype=torch.int64)
        for path in shards:
            written = torch.cat([text.token_ids[text.written] for text in load(path)])
            counts += torch.bincount(written.long(), minlength=len(counts))
        counts[self._ends] = counts.max() + 1
        size = min(self._recipe.training.draft_vocab, self._target.effective_vocab_size)
        counts[self._target.effective_vocab_size :] = -1
        return counts.sort(descending=True, stable=True).indices[:size].sort().values

    def _train(
        self,
        student: Student,
        stage: str,
        shards: Sequence[Path],
        epochs: int,
        rate: float,
        live: Sequence[Text],
    ) -> list[Step]:
        recipe = self._recipe.training
        trainer = Trainer(
            student,
            shards,
            epochs=epochs,
            seed=self._recipe.seed,
            tokens_per_step=recipe.tokens_per_step,
            learning_rate=recipe.learning_rate * rate,
            head_learning_rate=recipe.head_learning_rate * rate,
            checkpoint=self._work / f"{stage.lower().replace(' ', '-')}.pt",
            compile_model=self._compile,
        )
        measured, alpha = time.monotonic(), ""
        losses: list[float] = []

        def report(step: Step, total: int) -> None:
            nonlocal measured, alpha
            losses.append(step.loss)
            if time.monotonic() - measured > _LIVE_SECONDS:
                stands = acceptance(student, live[:_LIVE_TEXTS], greedy=True)
                alpha = f", α {float(torch.cat(stands).mean()):.3f}"
                student.train()
                measured = time.monotonic()
            recent = losses[-20:]
            note = f"loss {sum(recent) / len(recent):.3f}{alpha}"
            self._report(Progress(stage, step.step, total, note))

        trainer.train(report)
        return trainer.curve

    def _ready(self, student: Student) -> CausalLM:
        """The student as the draft service runs it."""
        folder.save(student, self._base, self._out)
        device = str(self._target.device)
        return loading.load(str(self._out), device=device).model

    def _measure(
        self,
        student: Student,
        held_out: tuple[list[Text], list[Text]],
        shards: Sequence[Path],
        curve: list[Step],
    ) -> DraftReport:
        stage = "Measuring"
        self._report(Progress(stage, 0, 3))
        draft_seconds, target_seconds = step_seconds(
            self._ready(student), self._target, self._max_context
        )
        found = []
        for index, (texts, greedy) in enumerate(zip(held_out, (True, False), strict=True)):
            self._report(Progress(stage, index + 1, 3))
            stands = acceptance(student, texts, greedy=greedy)
            alphas, _ = rounds(stands, MOST_DRAFT_TOKENS)
            taus = [rounds(stands, k)[1] for k in range(1, MOST_DRAFT_TOKENS + 1)]
            found.append(Acceptance(0.0 if greedy else 1.0, alphas, taus, sum(map(len, stands))))
        self._report(Progress(stage, 3, 3))
        return DraftReport(
            recipe=self._recipe,
            layers=list(self._beginning.indices),
            num_outputs=len(student.vocabulary),
            num_parameters=sum(p.numel() for p in student.parameters()),
            num_texts_tokens=sum(map(num_written, shards)),
            device=str(self._target.device),
            draft_step_ms=draft_seconds * 1e3,
            target_step_ms=target_seconds * 1e3,
            acceptance=found,
            curve=curve,
        )
