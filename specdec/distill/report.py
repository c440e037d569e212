"""What a distilled draft is worth: for the terminal, as JSON, as a picture, as a model card."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.bench.acceptance import predicted_speedup
from specdec.distill.recipe import Recipe
from specdec.distill.training import Step


@dataclass(frozen=True)
class Acceptance:
    """What the target accepts of the draft at one temperature, by the rule REJECTION."""

    temperature: float
    alpha_by_position: list[float]
    """Of proposals of so many tokens: how often each is accepted, given that those before it were.
    Measured on texts that the target wrote and the draft did not learn from."""
    mean_acceptance_length: list[float]
    """τ of proposals of 1, 2, … tokens."""
    num_tokens: int
    """On which it was measured."""


@dataclass(frozen=True)
class DraftReport:
    """All that is known of a draft."""

    recipe: Recipe
    layers: list[int]
    """Of the target, with which the student began."""
    num_outputs: int
    """Tokens that it can propose."""
    num_parameters: int
    """Those that were trained: the frozen embeddings are the target's."""
    num_texts_tokens: int
    """Tokens that the target wrote for it."""
    device: str
    draft_step_ms: float
    target_step_ms: float
    """Milliseconds of one row and the choice of its token, medians in one run."""
    acceptance: list[Acceptance]
    curve: list[Step]

    @property
    def cost_ratio(self) -> float:
        """c: a step of the draft ÷ a step of the target."""
        return self.draft_step_ms / self.target_step_ms

    def speedups(self, acceptance: Acceptance) -> list[float]:
        """Predicted for K = 1, 2, …"""
        return [
            predicted_speedup(tau, k, self.cost_ratio)
            for k, tau in enumerate(acceptance.mean_acceptance_length, 1)
        ]

    def recommended_k(self, acceptance: Acceptance) -> int:
        """The K of the largest predicted speedup; 0 if none pays."""
        speedups = [1.0, *self.speedups(acceptance)]
        return speedups.index(max(speedups))

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "layers": self.layers,
            "outputs": self.num_outputs,
            "parameters": self.num_parameters,
            "tokens_written": self.num_texts_tokens,
            "device": self.device,
            "draft_step_ms": self.draft_step_ms,
            "target_step_ms": self.target_step_ms,
            "cost_ratio": self.cost_ratio,
            "acceptance": [
                {
                    **asdict(each),
                    "predicted_speedup": self.speedups(each),
                    "recommended_num_draft_tokens": self.recommended_k(each),
                }
                for each in self.acceptance
            ],
            "curve": [step._asdict() for step in self.curve],
        }

    def save(self, folder: Path) -> None:
        """Writes report.json, report.png if matplotlib is there, and the model card README.md."""
        text = json.dumps(self.document(), indent=1, ensure_ascii=False)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
        (folder / "README.md").write_text(self.card(), encoding="utf-8")
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return
        self._plot(folder / "report.png")

    def card(self) -> str:
        """The model card, in Markdown with the metadata that hubs read."""
        recipe, training = self.recipe, self.recipe.training
        # Where it lies on one machine is nobody else's business.
        target = Path(recipe.target).name if Path(recipe.target).is_absolute() else recipe.target
        writings = [recipe.writing, *(each.writing for each in training.texts)]
        corpora = any(each.corpus_sha256 for each in writings)
        taught = "prompts of a corpus and of its own" if corpora else "nothing"
        rollouts = (
            f"; then {training.rollout_tokens:,} tokens written with its own proposals, weighted "
            "by rejection"
            if training.rollout_tokens
            else ""
        )
        lines = [
            "---",
            f"license: {recipe.license}",
            f"base_model: {target}",
            "tags: [speculative-decoding, specdec]",
            "---",
            f"# A draft for {Path(recipe.target).name}",
            "",
            f"Proposes tokens for `{target}` to verify. It is no model to talk to. Its use:",
            "",
            "    specdec up --target TARGET --draft THIS_FOLDER",
            "",
            "Embeddings and tokenizer are not in this folder. They are read from the target's, and "
            "the embeddings compared with the SHA-256 in `config.json`.",
            "",
            "## Recipe",
            "",
            f"- Data: {self.num_texts_tokens:,} tokens that the target wrote, given {taught}: a "
            "user's turn at temperature 1, then the answer at temperature 0, 0.5, 0.8 or 1. "
            f"Its {recipe.writing.num_top} likeliest tokens were kept at each position.",
            f"- Student: as many layers as were taken from the target to begin with "
            f"({', '.join(map(str, self.layers))}); a head over the "
            f"{self.num_outputs:,} commonest tokens; {self.num_parameters / 1e6:.1f} million "
            "trained parameters.",
            f"- Training: forward KL divergence, {training.epochs} epochs by Muon and AdamW"
            f"{rollouts}. `report.json` has every setting and the loss of every step.",
            f"- Licence: {recipe.license}.",
            "",
            "## Measured",
            "",
            f"On {' and '.join(f'{each.num_tokens:,}' for each in self.acceptance)} tokens that "
            "were held out, at temperature "
            f"{' and '.join(f'{each.temperature:g}' for each in self.acceptance)}. A step of the "
            f"draft took {self.draft_step_ms:.2f} ms, of the target {self.target_step_ms:.1f} ms "
            f"({self.device}): c = {self.cost_ratio:.3f}. The speedup is what the formula of "
            "arXiv 2211.17192 predicts.",
            "",
            *_table(self),
        ]
        return "\n".join(lines) + "\n"

    def _plot(self, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for each in self.acceptance:
            ks = range(1, len(each.alpha_by_position) + 1)
            label = f"temperature {each.temperature:g}"
            left.plot(ks, each.alpha_by_position, marker="o", label=label)
            right.plot(ks, self.speedups(each), marker="o", label=f"speedup, {label}")
            right.plot(ks, each.mean_acceptance_length, ls="--", marker=".", label=f"τ, {label}")
        left.set(xlabel="position in the proposal", ylabel="α, accepted", ylim=(0, 1))
        right.set(
            xlabel="K, drafted tokens a round", ylabel="τ and predicted speedup", ylim=(0, None)
        )
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend()
        figure.suptitle(f"Draft for {Path(self.recipe.target).name}")
        figure.savefig(path, dpi=120)


def _table(report: DraftReport) -> list[str]:
    heads = ["K"]
    for each in report.acceptance:
        heads += [f"{name}, T = {each.temperature:g}" for name in ("α", "τ", "speedup")]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    columns = [
        (each.alpha_by_position, each.mean_acceptance_length, report.speedups(each))
        for each in report.acceptance
    ]
    for k in range(len(report.acceptance[0].alpha_by_position)):
        cells = [str(k + 1)] + [f"{values[k]:.2f}" for group in columns for values in group]
        lines.append(f"| {' | '.join(cells)} |")
    best = ", ".join(
        f"{f'K = {k}' if (k := report.recommended_k(each)) else 'no speculation'} "
        f"at temperature {each.temperature:g}"
        for each in report.acceptance
    )
    return [*lines, "", f"α is that of position K. Recommended: {best}."]
