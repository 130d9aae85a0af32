"""The Ops of DeepSeek-V4: against upstream's classes, against faults, and with shapes that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as upstream

from porter.kernels.contract import tensors
from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.registry import default_registry
from porter.precision import float64_mode

SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_attention_heads": 6,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "vocab_size": 31,
    "hc_mult": 4,
    "swiglu_limit": 0.9,
    "num_hidden_layers": 1,
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
}
CONFIG = DeepseekV4Config(**SIZES)
CONFIG._experts_implementation = "eager"


def drawn(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(3)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return module.double().eval()


def floats(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def op(name: str, variant: str) -> Any:
    return default_registry().op(name, variant).reference


def same(ours: Any, theirs: Any) -> None:
    for mine, wanted in zip(tensors(ours), tensors(theirs), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def test_hyper_connections_are_upstreams() -> None:
    streams = floats(2, 3, 4, 24)
    module, head = (drawn(m(CONFIG)) for m in (upstream.DeepseekV4HyperConnection, upstream.DeepseekV4HyperHead))
    with torch.no_grad(), float64_mode():
        wanted = module(streams)
        post, comb, collapsed = op("hyper_connection", "collapse")(
            streams, module.fn, module.base, module.scale, 1e-6, 1e-6, 20
        )
        same((post, comb, collapsed), wanted)
        mixed = post.unsqueeze(-1) * collapsed.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
        same(op("hyper_connection", "expand")(streams, collapsed, post, comb), mixed)
        weights = head.hc_fn, head.hc_base, head.hc_scale
        same(op("hyper_connection", "head")(streams, *weights, 1e-6, 1e-6), head(streams))
    columns = comb.sum(-2)
    assert torch.allclose(columns, torch.ones_like(columns), atol=1e-5)


def test_routers_are_upstreams() -> None:
    hidden, ids = floats(2, 5, 24), torch.arange(10).view(2, 5)
    best, table = drawn(upstream.DeepseekV4TopKRouter(CONFIG)), drawn(upstream.DeepseekV4HashRouter(CONFIG))
    table.tid2eid.copy_(floats(31, 8).topk(3).indices)
    with torch.no_grad():
        logits, weights, chosen = best(hidden)
        ours = op("router", "sqrtsoftplus")(hidden.flatten(0, 1), best.weight, best.e_score_correction_bias, 3, 1.5)
        by_id = op("router", "hash")(hidden.flatten(0, 1), table.weight, table.tid2eid, ids.flatten(), 1.5)
        same(by_id, table(hidden, ids))
    same((ours[0], ours[2].sort().values), (logits, chosen.sort().values))
    same(ours[1].gather(1, ours[2].argsort()), weights.gather(1, chosen.argsort()))


def test_clamped_experts_and_grouped_linear_are_upstreams() -> None:
    experts, linear = drawn(upstream.DeepseekV4Experts(CONFIG)), drawn(upstream.DeepseekV4GroupedLinear(8, 12, 3))
    hidden, index, weights = floats(7, 24), floats(7, 8).topk(3).indices, floats(7, 3).abs()
    with torch.no_grad():
        wanted = experts(hidden, index, weights)
        ours = op("experts", "clamped")(hidden, index, weights, experts.gate_up_proj, experts.down_proj, 0.9)
        same(ours, wanted)
        plain = op("experts", "standard")(hidden, index, weights, experts.gate_up_proj, experts.down_proj)
        assert not torch.allclose(plain, wanted, rtol=0.1)
        same(op("linear", "grouped")(floats(2, 5, 3, 8), linear.weight), linear(floats(2, 5, 3, 8)))


def test_sinks_and_rope_are_upstreams() -> None:
    query, key = floats(2, 6, 5, 16), floats(2, 1, 9, 16, seed=6)
    module = nn.Module()
    module.num_key_value_groups, module.sinks = 6, floats(6)  # type: ignore[assignment]
    mask = torch.zeros(1, 1, 5, 9, dtype=torch.float64).masked_fill(torch.ones(5, 9).tril(4) == 0, -torch.inf)
    wanted, _ = upstream.eager_attention_forward(module.eval(), query, key, key, mask, 0.3)
    same(op("attention", "sink")(query, key, key, module.sinks, mask, 0.3, None), wanted)
    same(op("attention", "sink")(query, key, key, module.sinks, None, 0.3, None), wanted)
    angles = floats(2, 5, 4).cos(), floats(2, 5, 4).sin()
    with float64_mode():
        same(op("rope", "trailing")(query, *angles), upstream.apply_rotary_pos_emb(query, *angles))


@pytest.mark.parametrize("prior", [False, True])
def test_overlapped_windows_by_definition(prior: bool) -> None:
    kv, gate, bias = floats(1, 3, 4, 10), floats(1, 3, 4, 10, seed=6), floats(4, 10, seed=7)
    before = (floats(1, 4, 5, seed=8), floats(1, 4, 5, seed=9)) if prior else (None, None)
    ours = op("compressor", "overlapped")(kv, gate, bias, *before)
    scores = gate + bias
    for window in range(3):
        slots = [(kv[0, window, j, 5:], scores[0, window, j, 5:]) for j in range(4)]
        if window:
            slots += [(kv[0, window - 1, j, :5], scores[0, window - 1, j, :5]) for j in range(4)]
        elif prior:
            slots += [(before[0][0, j], before[1][0, j]) for j in range(4)]  # type: ignore[index]
        weights = torch.softmax(torch.stack([score for _, score in slots]), dim=0)
        same(ours[0, window], (weights * torch.stack([value for value, _ in slots])).sum(0))


FAULTS: dict[tuple[str, str], Any] = {
    ("swiglu", "clamped"): lambda gate_up, limit: (gate_up, limit * 1.5),
    ("experts", "clamped"): lambda *given: (*given[:-1], 1e6),
    ("rms_norm", "unweighted"): lambda x, eps: (x, 0.0),
    ("rope", "trailing"): lambda states, cos, sin: (states, cos, -sin),
    ("router", "sqrtsoftplus"): lambda hidden, weight, bias, *rest: (hidden, weight, torch.zeros_like(bias), *rest),
    ("router", "hash"): lambda hidden, weight, table, ids, factor: (hidden, weight, table.roll(1, 0), ids, factor),
    ("attention", "sink"): lambda q, k, v, sinks, *rest: (q, k, v, sinks.roll(1), *rest),
    ("linear", "grouped"): lambda x, weight: (x, weight.roll(1, 0)),
    ("compressor", "windowed"): lambda kv, gate, bias: (kv, gate, bias.roll(1, 0)),
    ("compressor", "overlapped"): lambda kv, gate, bias, *prior: (kv, gate, bias, None, None),
    ("hyper_connection", "collapse"): lambda *given: (*given[:-1], 2),
    ("hyper_connection", "expand"): lambda streams, output, post, comb: (streams, output, post, comb.transpose(-1, -2)),
    ("hyper_connection", "head"): lambda streams, fn, base, *rest: (streams, fn, base.roll(1), *rest),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", FAULTS, ids="/".join)
def test_the_cases_and_bounds_catch_a_fault(key: tuple[str, str], dtype: torch.dtype) -> None:
    found = default_registry().op(*key)

    def caught(arguments: Any) -> bool:
        error = found.error(found.reference(*FAULTS[key](*arguments)), found.oracle(*arguments), *arguments)
        return not error <= found.tolerance.relative(dtype, *arguments)

    assert sum(caught(case.arguments) for case in found.inputs(dtype)) >= 1


def single(*shape: int) -> torch.Tensor:
    return floats(*shape).float()


IDS = torch.zeros(3, dtype=torch.int64)
MISFITS: dict[tuple[str, str], tuple[tuple[Any, ...], dict[int, tuple[Any, ...]]]] = {
    ("rope", "trailing"): (
        (single(2, 4, 3, 8), single(2, 3, 2), single(2, 3, 2)),
        {0: (single(4, 3, 8),), 1: (single(2, 2, 2), single(2, 3, 5)), 2: (single(2, 3, 1),)},
    ),
    ("attention", "sink"): (
        (single(2, 4, 3, 8), single(2, 1, 5, 8), single(2, 1, 5, 8), single(4), None, 0.3, None),
        {1: (single(2, 1, 5, 7),), 3: (single(3), single(1, 4), torch.zeros(4, dtype=torch.int64))},
    ),
    ("linear", "grouped"): ((single(2, 3, 4), single(6, 4)), {0: (single(2, 3, 5), single(4)), 1: (single(7, 4),)}),
    ("router", "sqrtsoftplus"): (
        (single(3, 8), single(4, 8), single(4), 2, 1.5),
        {0: (single(3, 9),), 2: (single(5), single(4).double()), 3: (5, 0)},
    ),
    ("router", "hash"): (
        (single(3, 8), single(4, 8), IDS.expand(2, 3).T.contiguous(), IDS, 1.5),
        {2: (IDS, IDS.expand(2, 3).int()), 3: (IDS[:2], IDS[None])},
    ),
    ("compressor", "overlapped"): (
        (single(2, 3, 4, 10), single(2, 3, 4, 10), single(4, 10), single(2, 4, 5), single(2, 4, 5)),
        {1: (single(2, 3, 4, 8),), 2: (single(4, 8), single(3, 10)), 3: (None, single(2, 4, 4)), 4: (single(1, 4, 5),)},
    ),
    ("hyper_connection", "collapse"): (
        (single(2, 3, 4, 6), single(24, 24), single(24), single(3), 1e-6, 1e-6, 3),
        {0: (single(2, 3, 3, 8), single(3, 4, 6)), 1: (single(4, 24), single(24, 24).bfloat16()), 3: (single(1),)},
    ),
    ("hyper_connection", "expand"): (
        (single(2, 3, 4, 6), single(2, 3, 6), single(2, 3, 4), single(2, 3, 4, 4)),
        {1: (single(2, 3, 5), single(2, 3, 6).bfloat16()), 2: (single(2, 3, 3),), 3: (single(2, 3, 4, 3),)},
    ),
}


@pytest.mark.parametrize("key", MISFITS, ids="/".join)
def test_shapes_that_do_not_fit_are_refused(key: tuple[str, str]) -> None:
    kernel = CpuProvider().implementation(*key)
    arguments, misfits = MISFITS[key]
    assert kernel is not None and kernel.accepts(*arguments) is None
    for position, replacements in misfits.items():
        for replacement in replacements:
            changed = (*arguments[:position], replacement, *arguments[position + 1 :])
            assert kernel.accepts(*changed), (position, getattr(replacement, "shape", replacement))


def test_a_table_that_names_no_expert_is_refused() -> None:
    kernel = CpuProvider().implementation("router", "hash")
    assert kernel is not None
    with pytest.raises(IndexError, match="an expert outside the 4 there are"):
        kernel.call(single(3, 8), single(4, 8), torch.full((2, 2), 4), IDS, 1.5)
