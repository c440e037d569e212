"""How often the target would accept what a student proposes, from the target's texts alone.

No rounds need to be run. Along a text that the target wrote, every accepted token is the text's
own, so that the student's distributions q are those of a plain pass over the text. Greedily a
token y stands if it is the argmax of q. Sampled, the largest share of acceptance that any coupling
of p and q allows is that of REJECTION, and given that the target's token is y, the draft's is the
same with probability min(1, q(y) / p(y)): p(y) · min(1, q(y) / p(y)) = min(p(y), q(y)).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.distill.batches import collate, columns_of
from specdec.distill.student import Student, half_precision
from specdec.distill.texts import Kind, Text


@torch.no_grad()
def acceptance(student: Student, texts: Sequence[Text], *, greedy: bool) -> list[torch.Tensor]:
    """For each text, how likely each token of its answer is accepted, if it is drafted.

    Args:
        student: on any device.
        texts: written at temperature 0 if `greedy`, at temperature 1 otherwise.
        greedy: at which temperature the student drafts.

    Returns:
        float64 [answer tokens] each, within [0, 1].
    """
    columns = columns_of(student.vocabulary.cpu(), len(student.embedding))
    device = student.head.device
    found = []
    for text in texts:
        batch = collate([text], columns)
        with half_precision(device):
            hidden = student(batch.token_ids.to(device))[0][batch.rows.to(device)]
            logits = (hidden @ student.head.T).float().cpu()
        answer = text.kinds[text.written] == Kind.ANSWER
        rows = columns[text.token_ids[text.written].long()]
        if greedy:
            stands = (logits.argmax(dim=-1) == rows).double()
        else:
            q = logits.log_softmax(dim=-1).gather(1, rows.clamp_min(0)[:, None])[:, 0]
            stands = (q - text.logprobs).double().exp().clamp_max(1.0).masked_fill(rows < 0, 0.0)
        found.append(stands[answer])
    return found


def rounds(stands: Sequence[torch.Tensor], k: int) -> tuple[list[float], float]:
    """Runs rounds of k drafted tokens along texts, over all that may happen.

    Args:
        stands: for each text the probability that each of its tokens is accepted.
        k: at least 1.

    Returns:
        α by position, the k probabilities that a token stands given that those before it do; and
        τ, the tokens a round. The last round of a text is cut off by its end.
    """
    reached, stood = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
    num_rounds, num_tokens = 0.0, 0
    for text in stands:
        # state[i]: the probability that this token is the round's i-th; the last is the bonus.
        state = torch.zeros(k + 1, dtype=torch.float64)
        state[0] = 1.0
        for chance in text.tolist():
            num_rounds += float(state[0])
            reached += state[:k]
            stood += state[:k] * chance
            passed = state[:k] * chance
            ended = float(state.sum() - passed.sum())
            state = torch.cat([state.new_tensor([ended]), passed])
        num_tokens += len(text)
    return (stood / reached.clamp_min(1e-12)).tolist(), num_tokens / max(num_rounds, 1.0)
