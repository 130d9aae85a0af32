"""Hyper-connections: what a block reads of several residual streams, how it writes them back, and how they end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from porter.kernels.dispatch import OpCall
from porter.models.rewrite import Candidate, Mismatch, attribute_named

EPSILONS = ("hc_eps", "eps")
COUNTS = ("hc_mult", "num_streams", "expansion_rate")
ITERATIONS = ("hc_sinkhorn_iters", "sinkhorn_iterations", "sinkhorn_iters")
NORM_EPSILONS = ("eps", "variance_epsilon")
PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")


class CollapseForward(nn.Module):
    """The ported forward, copied into the generated class."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm_eps: float
    eps: float
    iterations: int
    hyper_connection: OpCall

    def forward(self, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = self.fn, self.base, self.scale
        return self.hyper_connection(hidden_streams, *weights, self.norm_eps, self.eps, self.iterations)


class HeadForward(nn.Module):
    """The ported forward, copied into the generated class."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm_eps: float
    eps: float
    hyper_connection: OpCall

    def forward(self, hidden_streams: torch.Tensor) -> torch.Tensor:
        weights = self.fn, self.base, self.scale
        return self.hyper_connection(hidden_streams, *weights, self.norm_eps, self.eps)


class HyperLayerForward(nn.Module):
    """The ported forward, copied into the generated class."""

    attn_hc: nn.Module
    ffn_hc: nn.Module
    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    expand: OpCall

    def forward(
        self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        post, comb, collapsed = self.attn_hc(hidden_states)
        attention_output, _ = self.self_attn(self.input_layernorm(collapsed), **kwargs)
        hidden_states = self.expand(hidden_states, attention_output, post, comb)
        post, comb, collapsed = self.ffn_hc(hidden_states)
        mlp_output = self.mlp(self.post_attention_layernorm(collapsed), input_ids=input_ids)
        return self.expand(hidden_states, mlp_output, post, comb)


class HyperConnection:
    """Three parameters that mix streams: a matrix over all of them at once, a bias, and one or three scales."""

    name = "hyper_connection"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate, for a block's connection or for the last one; None when the parameters are others."""
        parameters = dict(module.named_parameters())
        names = _roles(parameters)
        if names is None:
            return None
        count = attribute_named(module, COUNTS, int)
        rows, width = parameters[names["fn"]].shape
        n = 0 if count is None else int(getattr(module, count))
        head = rows == n
        if n < 1 or width % n or (not head and rows != (2 + n) * n):
            return Mismatch(f"a matrix [{rows}, {width}] over residual streams, but no attribute tells their number")
        eps, iterations = attribute_named(module, EPSILONS, float), attribute_named(module, ITERATIONS, int)
        norm = [name for name, child in module.named_children() if attribute_named(child, NORM_EPSILONS, float)]
        if eps is None or len(norm) != 1 or (iterations is None and not head):
            return Mismatch("hyper-connections without an epsilon, a norm of their own, or a number of iterations")
        norm_eps = attribute_named(module.get_submodule(norm[0]), NORM_EPSILONS, float)
        rename = {**names, "eps": eps, **({} if head or iterations is None else {"iterations": iterations})}
        return [
            Candidate(
                rewrite=self.name,
                forward=HeadForward if head else CollapseForward,
                variant="head" if head else "collapse",
                rename={ours: theirs for ours, theirs in rename.items() if ours != theirs},
                append=(
                    f"self.norm_eps = self.{norm[0]}.{norm_eps}",
                    f'self.hyper_connection = OpCall("hyper_connection", "{"head" if head else "collapse"}")',
                ),
            )
        ]


class HyperLayer:
    """A decoder layer whose two blocks read and write residual streams through hyper-connections."""

    name = "hyper_layer"

    def candidates(self, module: nn.Module) -> list[Candidate] | Mismatch | None:
        """One candidate; None when the module has no attention and MLP, or no two hyper-connections beside them."""
        children = dict(module.named_children())
        connections = [name for name, child in children.items() if _roles(dict(child.named_parameters())) is not None]
        if not {"self_attn", "mlp"} <= children.keys() or not connections:
            return None
        if len(connections) != 2 or set(children) != {*PARTS, *connections}:
            odd = ", ".join(sorted(set(children) ^ set(PARTS)))
            return Mismatch(f"a layer with hyper-connections whose parts differ from {', '.join(PARTS)} and two: {odd}")
        rename = dict(zip(("attn_hc", "ffn_hc"), connections, strict=True))
        return [
            Candidate(
                rewrite=self.name,
                forward=HyperLayerForward,
                variant="pre_norm, hyper-connections",
                rename={ours: theirs for ours, theirs in rename.items() if ours != theirs},
                append=('self.expand = OpCall("hyper_connection", "expand")',),
            )
        ]


def _roles(parameters: Mapping[str, torch.Tensor]) -> dict[str, str] | None:
    """Which parameter is fn [M, N D], base [M] and scale [1 or 3]; None where there are others."""
    matrices = [n for n, p in parameters.items() if p.dim() == 2]
    vectors = [n for n, p in parameters.items() if p.dim() == 1]
    if len(matrices) != 1 or len(vectors) != 2 or len(parameters) != 3:
        return None
    rows = parameters[matrices[0]].shape[0]
    base = [n for n in vectors if parameters[n].shape[0] == rows and "scale" not in n]
    scale = [n for n in vectors if parameters[n].shape[0] in (1, 3) and n not in base]
    if len(base) != 1 or len(scale) != 1:
        return None
    return {"fn": matrices[0], "base": base[0], "scale": scale[0]}
