"""DeepSeek-V4's routers: scores sqrt(softplus(logits)), of the best experts or of those that a table names."""

from __future__ import annotations

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch

READS = ("top_k", "routed_scaling_factor")


class ScoreRouterForward(nn.Module):
    """The ported forward, copied into the generated class."""

    weight: torch.Tensor
    e_score_correction_bias: torch.Tensor
    router: OpCall
    top_k: int
    routed_scaling_factor: float

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return self.router(
            flat, self.weight, self.e_score_correction_bias, self.top_k, float(self.routed_scaling_factor)
        )


class HashRouterForward(nn.Module):
    """The ported forward, copied into the generated class."""

    weight: torch.Tensor
    tid2eid: torch.Tensor
    router: OpCall
    routed_scaling_factor: float

    def forward(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        table = self.tid2eid
        return self.router(flat, self.weight, table, input_ids.reshape(-1), float(self.routed_scaling_factor))


class ScoreRouter:
    """A router with a score function of its own, told by its values, and weights that are divided by their sum."""

    name = "router"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has no `score_fn` or no single weight [experts, hidden]."""
        score = getattr(module, "score_fn", None)
        parameters = dict(module.named_parameters())
        if not callable(score) or [p.dim() for p in parameters.values()] != [2]:
            return None
        missing = [name for name in READS if not hasattr(module, name)]
        if missing:
            return Mismatch(f"a router with a score function, but without {', '.join(missing)}")
        if not _is_root_of_softplus(score):
            return Mismatch(f"a router whose scores are {type(score).__name__}, not sqrt(softplus)")
        buffers = dict(module.named_buffers())
        kinds = {name: (buffer.dim(), buffer.is_floating_point()) for name, buffer in buffers.items()}
        known: dict[tuple[int, bool], tuple[str, type[nn.Module], str]] = {
            (1, True): ("e_score_correction_bias", ScoreRouterForward, "sqrtsoftplus"),
            (2, False): ("tid2eid", HashRouterForward, "hash"),
        }
        if len(kinds) != 1 or next(iter(kinds.values())) not in known:
            names = ", ".join(kinds) or "none"
            return Mismatch(f"a router by score with other buffers than a bias or a table: {names}")
        ((name, kind),) = kinds.items()
        ours, forward, variant = known[kind]
        (weight,) = parameters
        return [
            Candidate(
                rewrite=self.name,
                forward=forward,
                variant=variant,
                rename={a: b for a, b in ((ours, name), ("weight", weight)) if a != b},
                append=(f'self.router = OpCall("router", "{variant}")',),
            )
        ]


def _is_root_of_softplus(score: object) -> bool:
    x = torch.linspace(-6, 30, 13)
    expected = torch.nn.functional.softplus(x).sqrt()
    return callable(score) and torch.allclose(score(x), expected, rtol=1e-5, atol=1e-6)
