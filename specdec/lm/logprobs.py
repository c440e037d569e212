"""The log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.v1 import common_pb2


def token_logprobs(
    scores: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[common_pb2.TokenLogprobs]:
    """The log-probability of each token, and the likeliest tokens at its position.

    Args:
        scores: [R, V], logits or processed scores.
        token_ids: R of them, the token at each row.
        num_top: how many of the likeliest to list; those of probability 0 are left out.
    """
    logprobs = scores.to(torch.float32).log_softmax(dim=-1)
    chosen = logprobs.gather(-1, torch.tensor([token_ids], device=scores.device).T).squeeze(-1)
    top = torch.topk(logprobs, min(num_top, logprobs.shape[-1]), dim=-1)
    found = []
    for logprob, values, ids in zip(
        chosen.tolist(), top.values.tolist(), top.indices.tolist(), strict=True
    ):
        listed = [(i, v) for i, v in zip(ids, values, strict=True) if v > float("-inf")]
        found.append(
            common_pb2.TokenLogprobs(
                logprob=logprob,
                top_token_ids=[i for i, _ in listed],
                top_logprobs=[v for _, v in listed],
            )
        )
    return found
