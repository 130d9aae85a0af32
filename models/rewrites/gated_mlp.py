"""down(act(gate(x)) * up(x)) -> down(swiglu(gate_up(x)))."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Fusion, Mismatch
from porter.models.rewrites.activation_probe import Gated, form_of, large


class GatedMLPForward(nn.Module):
    """The ported forward, copied into the generated class."""

    gate_up_proj: Linear
    down_proj: Linear
    swiglu: OpCall

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.swiglu(self.gate_up_proj(hidden_states)))


class ClampedMLPForward(GatedMLPForward):
    """As GatedMLPForward, the gate clamped from above and the other half on both sides (DeepSeek-V4)."""

    limit: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.swiglu(self.gate_up_proj(hidden_states), float(self.limit)))


def is_silu(module: nn.Module) -> bool:
    """Whether a child module computes silu, judged by its values."""
    if any(module.parameters()) or any(module.children()):
        return False
    x = torch.linspace(-4, 4, 9)
    try:
        return torch.allclose(module(x), torch.nn.functional.silu(x), atol=1e-6)
    except (TypeError, RuntimeError):
        return False


class GatedMLP:
    """Three linears, two of them alike, and a silu: which of the two is the gate, the proof decides."""

    name = "gated_mlp"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """Both assignments of gate and up; None when the module has other children than such an MLP."""
        linears = {n: m for n, m in module.named_children() if isinstance(m, nn.Linear)}
        others = {n: m for n, m in module.named_children() if n not in linears}
        if len(linears) != 3 or any(list(m.parameters()) for m in others.values()):
            return None
        downs = [n for n in linears if all(_feeds(linears[o], linears[n]) for o in linears if o != n)]
        if not downs:
            return Mismatch("three linears, but no two of them feed the third")
        if others and not any(is_silu(m) for m in others.values()):
            return Mismatch("a gated MLP, but none of its child modules computes silu")
        roles = [
            (gate, up, down)
            for down in downs
            for gate, up in itertools.permutations([n for n in linears if n != down])
        ]
        found = [(each, form_on_large_inputs(module, *each)) for each in roles]
        if all(form is None for _, form in found):
            return Mismatch("a gated MLP that does something else to its activation where this is large")
        return [_candidate(*each, form) for each, form in found if form is not None]


def form_on_large_inputs(module: nn.Module, gate: str, up: str, down: str) -> str | None:
    """As `form_of`, where the children of these names are gate, up and down."""
    gates, ups, downs = (module.get_submodule(name) for name in (gate, up, down))
    x = large(module, 1, 3, int(gates.in_features))  # type: ignore[arg-type]

    def expected(form: Gated) -> torch.Tensor:
        result: torch.Tensor = downs(form(gates(x), ups(x)))
        return result

    return form_of(module, lambda: module(x), expected)


def _candidate(gate: str, up: str, down: str, limit: str) -> Candidate:
    rename = {"down_proj": down, **({"limit": limit} if limit not in ("", "limit") else {})}
    return Candidate(
        rewrite=GatedMLP.name,
        forward=ClampedMLPForward if limit else GatedMLPForward,
        variant=f"{gate} gates {up}, clamped" if limit else f"{gate} gates {up}",
        rename=rename,
        fusions=(Fusion("gate_up_proj", (gate, up)),),
        append=(f'self.swiglu = OpCall("swiglu", "{"clamped" if limit else "standard"}")',),
    )


def _feeds(first: nn.Linear, second: nn.Linear) -> bool:
    return (first.in_features, first.out_features) == (second.out_features, second.in_features)
