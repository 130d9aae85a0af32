"""down(silu(gate) * up) of one linear's output (GLM-4, Phi-3) -> down(swiglu(gate_up(x)))."""

from __future__ import annotations

import inspect

from torch import nn

from porter.models.rewrite import Candidate, Mismatch
from porter.models.rewrites.gated_mlp import GatedMLPForward, is_silu


class FusedGatedMLP:
    """Two linears, the first with twice the outputs that the second reads, and a silu. The gate comes first."""

    name = "gated_mlp"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has other children than such an MLP."""
        linears = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
        others = [m for n, m in module.named_children() if n not in linears]
        takes = inspect.signature(type(module).forward).parameters
        if len(linears) != 2 or len(takes) != 2 or any(list(m.parameters()) for m in others):
            return None
        (first, wide), (last, narrow) = sorted(
            linears.items(), key=lambda item: -item[1].out_features / item[1].in_features
        )
        if (wide.out_features, wide.in_features) != (2 * narrow.in_features, narrow.out_features):
            return None
        if others and not any(is_silu(m) for m in others):
            return Mismatch("a gated MLP, but none of its child modules computes silu")
        return [
            Candidate(
                rewrite=self.name,
                forward=GatedMLPForward,
                variant=f"{first} holds gate and up",
                rename={"gate_up_proj": first, "down_proj": last},
                append=('self.swiglu = OpCall("swiglu", "standard")',),
            )
        ]
