"""Records what target and draft expect at each position of texts that the target wrote.

    python -m benchmarks.distribution_recorder --temperature 0,0.6,1 --out logs

The target writes by itself, with noise that is keyed as that of the services is, or the texts are
those of `specdec bench --save-log` (`--log`). Both models are then fed these texts, whatever they
would have written themselves, and their most probable tokens are kept at each position. The files
are read by `benchmarks.run_ahead_simulator`, which needs no model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks import common
from benchmarks.distribution_log import DistributionLog, Floats, Ids
from draft_service.settings import DEFAULT_DRAFT
from specdec.bench import prompts, target_log
from specdec.lm.batch import Segment
from specdec.lm.loading import LoadedModel, load
from specdec.lm.model import CausalLM
from specdec.lm.pages import pages_for
from specdec.lm.randomness import Stream, gumbel, key, seed_tensor

KEPT = 256
"""Tokens of each distribution."""
_AT_ONCE = 16
"""Texts that the target writes in one batch."""
_PASS_ROWS = 256


class Text(NamedTuple):
    """A prompt, and what the target wrote after it."""

    prompt: Sequence[int]
    written: Sequence[int]


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    parser = common.parser(__doc__, repeats=1)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prompts", type=common.positive, default=40, help="how many (40)")
    parser.add_argument(
        "--tokens", type=common.positive, default=128, help="of a text, at most (128)"
    )
    parser.add_argument("--temperature", default="0,0.6,1", help="separated by commas (0,0.6,1)")
    parser.add_argument("--log", type=Path, help="texts of specdec bench --save-log instead")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for the files (.)")
    options = parser.parse_args(arguments)
    if options.target and not options.draft:
        parser.error("name the --draft of the --target")
    folder = common.target_folder(options)
    target = load(str(folder), dtype=options.dtype)
    draft = load(str(options.draft or DEFAULT_DRAFT), dtype=options.dtype)
    if target.tokenizer.table_sha256 != draft.tokenizer.table_sha256:
        raise SystemExit("error: the draft has another token table than the target")
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[object, ...]] = []
    for temperature, texts in _all_texts(options, target, folder):
        log = recorded(texts, temperature, target.model, draft.model)
        file = options.out / f"distributions-{temperature:g}.npz"
        log.write(file)
        same = float((log.p_ids[:, 0] == log.q_ids[:, 0]).mean())
        rows.append((str(file), temperature, len(texts), len(log.tokens), same))
    columns = ("file", "temperature", "texts", "positions", "same first choice")
    common.finish(options, columns, rows, {"files": rows})


def _all_texts(
    options: argparse.Namespace, target: LoadedModel, folder: Path
) -> Iterator[tuple[float, list[Text]]]:
    """The texts of each temperature."""
    if options.log is not None:
        try:
            log = target_log.read(options.log)
        except target_log.LogFault as fault:
            raise SystemExit(f"error: {fault}") from None
        outputs = log.outputs[: options.prompts]
        texts = [Text(one.prompt_token_ids, one.token_ids) for one in outputs]
        yield log.header.temperature, texts
        return
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    chats: list[list[int]] = []
    for prompt in prompts.mixed(prompts.KINDS, options.seed):
        turn = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)
        if len(ids["input_ids"]) + options.tokens <= target.max_context_length:
            chats.append(ids["input_ids"])
    for temperature in map(float, options.temperature.split(",")):
        texts = []
        for begin in range(0, min(len(chats), options.prompts), _AT_ONCE):
            some = chats[begin : min(begin + _AT_ONCE, options.prompts)]
            # The texts have places in common, and each needs noise of its own.
            seeds = range(options.seed + begin, options.seed + begin + len(some))
            texts += written(
                *(target.model, some, seeds), options.tokens, temperature, target.eos_token_ids
            )
            common.progress(f"temperature {temperature:g}: {len(texts)} texts")
        yield temperature, texts


def written(
    model: CausalLM,
    chats: Sequence[Sequence[int]],
    seeds: Sequence[int],
    count: int,
    temperature: float,
    eos_token_ids: Sequence[int],
) -> list[Text]:
    """What the target writes, at most `count` tokens each; a token that ends it is the last."""
    each = pages_for(max(map(len, chats)) + count)
    model.allocate(each * len(chats))
    pages = [range(1 + each * row, 1 + each * (row + 1)) for row in range(len(chats))]
    texts = [list(chat) for chat in chats]
    for row, text in enumerate(texts):
        for begin in range(0, len(text) - 1, _PASS_ROWS):
            part = text[begin : min(begin + _PASS_ROWS, len(text) - 1)]
            model.forward([Segment(part, begin, pages[row], 1)])
    going = list(range(len(chats)))
    while going:
        last = [Segment(texts[row][-1:], len(texts[row]) - 1, pages[row], 1) for row in going]
        scores = model.forward(last).double().cpu()
        if temperature > 0:
            keys = [key(seed_tensor(seeds[r]), Stream.COUPLED, len(texts[r])) for r in going]
            noise = gumbel(torch.stack(keys), torch.arange(scores.shape[1]))
            scores = scores / temperature + noise
        for row, token in zip(going, scores.argmax(-1).tolist(), strict=True):
            texts[row].append(token)
        going = [
            row
            for row in going
            if len(texts[row]) < len(chats[row]) + count and texts[row][-1] not in eos_token_ids
        ]
    return [Text(chat, text[len(chat) :]) for chat, text in zip(chats, texts, strict=True)]


def recorded(
    texts: Sequence[Text], temperature: float, target: CausalLM, draft: CausalLM
) -> DistributionLog:
    """Feeds both models the texts."""
    p, q = ([_most_probable(model, text) for text in texts] for model in (target, draft))
    return DistributionLog(
        temperature=temperature,
        tokens=np.concatenate([np.array(text.written, np.int32) for text in texts]),
        begins=np.cumsum([0, *(len(text.written) for text in texts)]).astype(np.int32),
        p_ids=np.concatenate([ids for ids, _ in p]),
        p=np.concatenate([scores for _, scores in p]),
        q_ids=np.concatenate([ids for ids, _ in q]),
        q=np.concatenate([scores for _, scores in q]),
    )


def _most_probable(model: CausalLM, text: Text) -> tuple[Ids, Floats]:
    """Ids and log-probabilities at the places of what was written, the most probable first."""
    fed = [*text.prompt, *text.written[:-1]]
    model.allocate(pages_for(len(fed)))
    pages = range(1, 1 + pages_for(len(fed)))
    every_id, every_score = [], []
    left = list(text.written)
    for begin in range(0, len(fed), _PASS_ROWS):
        rows = fed[begin : begin + _PASS_ROWS]
        wanted = min(len(rows), max(0, begin + len(rows) - len(text.prompt) + 1))
        logits = model.forward([Segment(rows, begin, pages, wanted)])
        if not wanted:
            continue
        scores = torch.log_softmax(logits.float(), dim=-1).cpu()
        values, ids = scores.topk(min(KEPT, scores.shape[1]))
        for row, token in enumerate(left[:wanted]):
            if token not in ids[row]:
                ids[row, -1], values[row, -1] = token, scores[row, token]
        left = left[wanted:]
        every_id.append(ids.numpy().astype(np.int32))
        every_score.append(values.numpy().astype(np.float64))
    return np.concatenate(every_id), np.concatenate(every_score)


if __name__ == "__main__":
    main()
