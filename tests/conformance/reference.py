"""What a parameter means, said by transformers or by a slow obvious loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.v1.common_pb2 import Sampling


def load(folder: Path) -> PreTrainedModel:
    """The model, without anything of specdec around it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@torch.inference_mode()
def logits_after(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[T, V]: the logits after each of T tokens, by one plain pass without a cache."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits


def penalized(scores: torch.Tensor, sampling: Sampling, output: Sequence[int]) -> torch.Tensor:
    """Presence and frequency penalties, which transformers does not have."""
    scores = scores.clone()
    for token_id, count in Counter(output).items():
        scores[token_id] -= sampling.presence_penalty + count * sampling.frequency_penalty
    return scores


def scores_of(
    logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> torch.Tensor:
    """float64 [V]: one row of logits, processed as of its history by transformers' own classes.

    Args:
        logits: [V].
        sampling: resolved settings. A grammar is not looked at.
        prompt: not empty.
        output: what was generated so far.
    """
    ids = torch.tensor([[*prompt, *output]])
    first: list[Any] = []
    if sampling.logit_bias:
        first.append(
            SequenceBiasLogitsProcessor([[[i], b] for i, b in sampling.logit_bias.items()])
        )
    if sampling.repetition_penalty != 1.0:
        first.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    scores = LogitsProcessorList(first)(ids, logits.double().unsqueeze(0))
    scores = penalized(scores[0], sampling, output).unsqueeze(0)
    then: list[Any] = []
    if sampling.min_new_tokens:
        then.append(
            MinNewTokensLengthLogitsProcessor(
                len(prompt), sampling.min_new_tokens, list(sampling.stop_token_ids), device="cpu"
            )
        )
    if sampling.allowed_token_ids:
        allowed = list(sampling.allowed_token_ids)
        then.append(PrefixConstrainedLogitsProcessor(lambda batch, sent: allowed, num_beams=1))
    if sampling.suppressed_token_ids:
        then.append(SuppressTokensLogitsProcessor(list(sampling.suppressed_token_ids)))
    if sampling.temperature not in (0.0, 1.0):
        then.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        then.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        then.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        then.append(MinPLogitsWarper(sampling.min_p))
    processed: torch.Tensor = LogitsProcessorList(then)(ids, scores)[0]
    return processed
