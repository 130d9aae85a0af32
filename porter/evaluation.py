"""Compare two models on a text: perplexity, KL divergence, top-1 agreement, first diverging token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from porter.generation import refuse_not_finite
from porter.tokenization import check_vocabulary


@dataclass(frozen=True)
class Evaluation:
    """Over `tokens` predicted tokens; KL in nats of (reference || candidate) per token."""

    tokens: int
    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float
    top1_agreement: float
    kl_mean: float
    kl_max: float
    first_divergence: int | None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def evaluate(candidate: nn.Module, reference: nn.Module, token_ids: torch.Tensor, window: int = 512) -> Evaluation:
    """Teacher-forced on `token_ids` [length], in windows of `window` tokens that do not see each other.

    Raises Refusal where a model's logits are not finite: no figure can be computed from them.
    """
    for model in (candidate, reference):
        check_vocabulary(token_ids, model.config)
    losses, divergences, agree = [], [], []
    for chunk in token_ids.split(window):
        if chunk.numel() < 2:
            continue
        with torch.no_grad():
            ours, theirs = (m(chunk[None], use_cache=False).logits[0, :-1].float() for m in (candidate, reference))
        for logits, whose in ((theirs, "the original"), (ours, "the port")):
            refuse_not_finite(logits, whose)
        p, q = theirs.log_softmax(-1), ours.log_softmax(-1)
        target = chunk[1:, None]
        losses.append(torch.cat([-q.gather(1, target), -p.gather(1, target)], dim=1).double())
        divergences.append((p.exp() * (p - q)).sum(-1))
        agree.append(ours.argmax(-1) == theirs.argmax(-1))
    loss, kl, same = torch.cat(losses), torch.cat(divergences), torch.cat(agree)
    mean, reference_mean = loss.mean(0)
    different = (~same).nonzero()
    return Evaluation(
        tokens=int(same.numel()),
        perplexity=float(mean.exp()),
        reference_perplexity=float(reference_mean.exp()),
        perplexity_ratio=float((mean - reference_mean).exp()),
        top1_agreement=float(same.double().mean()),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        first_divergence=int(different[0]) if different.numel() else None,
    )
