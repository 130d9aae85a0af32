"""Linear attention by the gated delta rule: projections, a short convolution, gates, the rule, a gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.linear import Linear
from porter.models.rewrite import Candidate, Fusion, Mismatch

WIDTHS = ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim")
NEEDED = (*WIDTHS, "conv_kernel_size", "layer_idx", "A_log", "dt_bias")


class GatedDeltaNetForward(nn.Module):
    """The ported forward, copied into the generated class."""

    in_proj_qkvz: Linear
    in_proj_ba: Linear
    conv1d: nn.Conv1d
    norm: nn.Module
    out_proj: Linear
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    causal_conv1d: OpCall
    delta_gates: OpCall
    chunked_rule: OpCall
    recurrent_rule: OpCall
    groups: int
    group_sizes: list[int]
    qkv_sizes: list[int]
    beta_scale: float
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int
    layer_idx: int

    def forward(
        self, hidden_states: torch.Tensor, cache: Any = None, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if attention_mask is not None:
            # A padding token must leave no trace in the states.
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        batch, length = hidden_states.shape[:2]
        by_head = (batch, length, -1, self.head_k_dim)

        projected = self.in_proj_qkvz(hidden_states).view(batch, length, self.groups, -1)
        query, key, value, gate = projected.split_with_sizes(self.group_sizes, dim=-1)
        if self.groups == 1:
            mixed = projected.flatten(2)[..., : sum(self.qkv_sizes)]
        else:
            mixed = torch.cat((query.flatten(2), key.flatten(2), value.flatten(2)), dim=-1)
        strength, time = self.in_proj_ba(hidden_states).view(batch, length, self.groups, -1).chunk(2, dim=-1)

        window = state = None
        if cache is not None:
            window = cache.get_conv_state(self.layer_idx, state_idx=0)
            state = cache.get_recurrent_state(self.layer_idx, state_idx=0)
        if window is not None:
            window = window[..., -self.conv_kernel_size :]
        convolved, last = self.causal_conv1d(mixed, self.conv1d.weight.squeeze(1), self.conv1d.bias, window)
        if cache is not None and (window is None or cache.is_recording_past(self.layer_idx)):
            cache.update_conv_state(mixed.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        elif window is not None:
            window.copy_(last)

        query, key, value = convolved.split_with_sizes(self.qkv_sizes, dim=-1)
        decay, beta = self.delta_gates(time, strength, self.A_log, self.dt_bias, self.beta_scale)
        rule = self.recurrent_rule if length == 1 else self.chunked_rule
        value = value.view(batch, length, -1, self.head_v_dim)
        output, state = rule(query.view(by_head), key.view(by_head), value, decay, beta, state)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        output = self.norm(output.flatten(0, 2), gate.reshape(-1, self.head_v_dim))
        return self.out_proj(output.view(batch, length, -1))


@dataclass(frozen=True)
class Layout:
    """How a model spells its projections.

    `queries` together give query, key, value and output gate, `gates` what is written and what is kept, per key head
    where `grouped`, else one after the other. `rest` are norm and output projection.
    """

    queries: tuple[str, ...]
    gates: tuple[str, ...]
    grouped: bool
    rest: tuple[str, str] = ("norm", "out_proj")

    def names(self) -> set[str]:
        """The children of a layer in this layout."""
        return {*self.queries, *self.gates, *self.rest, "conv1d"}


LAYOUTS = (
    Layout(("in_proj_qkvz",), ("in_proj_ba",), grouped=True),
    Layout(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), grouped=False),
    Layout(("q_proj", "k_proj", "v_proj", "g_proj"), ("b_proj", "a_proj"), grouped=False, rest=("o_norm", "o_proj")),
)


def _lines(layout: Layout, negative: bool) -> tuple[str, ...]:
    """The attributes that the forward reads and upstream's class does not have."""
    share = " // self.num_k_heads" if layout.grouped else ""
    parts = ("key_dim", "key_dim", "value_dim", "value_dim")
    return (
        f"self.groups = {'self.num_k_heads' if layout.grouped else 1}",
        f"self.group_sizes = [{', '.join(f'self.{p}{share}' for p in parts)}]",
        "self.qkv_sizes = [self.key_dim, self.key_dim, self.value_dim]",
        f"self.beta_scale = {'2.0 if self.allow_neg_eigval else 1.0' if negative else '1.0'}",
        "# What a state keeps is applied at every step: the gates' few rows are not worth quantizing.",
        "self.in_proj_ba.keeps_dtype = True",
        'self.causal_conv1d = OpCall("causal_conv1d", "silu")',
        'self.delta_gates = OpCall("delta_gates", "softplus")',
        'self.chunked_rule = OpCall("gated_delta_rule", "chunked")',
        'self.recurrent_rule = OpCall("gated_delta_rule", "recurrent")',
    )


class GatedDeltaNet:
    """Yang et al. 2024 as in Qwen3-Next, Qwen3.5 and OLMo-Hybrid: one decay per head and token."""

    name = "gated_delta_net"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has no convolution and no decay rates of its own."""
        children = dict(module.named_children())
        if not isinstance(children.get("conv1d"), nn.Conv1d) or not hasattr(module, "A_log"):
            return None
        missing = [a for a in NEEDED if not hasattr(module, a)]
        if missing:
            return Mismatch(f"a convolution and decay rates, but no attribute {', '.join(missing)}")
        layout = next((each for each in LAYOUTS if each.names() == children.keys()), None)
        if layout is None:
            return Mismatch(f"a gated delta net with unknown projections: {', '.join(sorted(children))}")
        activation = getattr(module, "activation", None)
        if activation not in ("silu", "swish"):
            return Mismatch(f"a gated delta net whose convolution is followed by {activation}; the Op applies silu")
        norm, output = layout.rest
        fusions = [
            Fusion(target, sources)
            for target, sources in (("in_proj_qkvz", layout.queries), ("in_proj_ba", layout.gates))
            if len(sources) > 1
        ]
        return [
            Candidate(
                rewrite=self.name,
                forward=GatedDeltaNetForward,
                variant=", ".join((*layout.queries, *layout.gates)),
                rename={"norm": norm, "out_proj": output},
                fusions=tuple(fusions),
                append=_lines(layout, hasattr(module, "allow_neg_eigval")),
                drop=("fix_query_key_value_ordering",),
            )
        ]
