"""The lightning indexer and attention over its selection: by definition, against upstream, and on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference_cases import assert_same, cases, reference
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from porter.kernels.contract import Implementation
from porter.kernels.reference import indexer, sparse_mla_attention
from porter.kernels.reference.attention import causal_mask
from porter.kernels.registry import default_registry

INDEXER, SPARSE = ("indexer", "lightning"), ("sparse_mla_attention", "absorbed")


def cpu(key: tuple[str, str]) -> Implementation:
    provider = default_registry().providers["cpu"]
    found = provider.implementation(*key)
    if provider.supported("cpu") is not None or found is None:
        pytest.skip("no CPU kernels here")
    return found


def states(seed: int, keys: int, queries: int = 1, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """query [1, S, 4, 16], key [1, T, 16], weights [1, S, 4]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, queries, 4, 16), (1, keys, 16), (1, queries, 4)
    query, key, weights = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, weights


def latent_states(seed: int, keys: int, queries: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, 4, queries, 16), (1, 4, queries, 8), (1, 1, keys, 32), (1, 1, keys, 8), (4 * 32, 32)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) * shape[-1] ** -0.25 for shape in shapes)


def test_selection_by_its_definition() -> None:
    query, key, weights = states(1, 11, queries=3, dtype=torch.float64)
    chosen = reference(*INDEXER, query, key, weights, None, 0.25, 4)
    assert chosen.shape == (1, 3, 4) and chosen.dtype == torch.int32
    for s in range(3):
        scores = {}
        for t in range(11 - 3 + s + 1):
            products = [max(0.0, 0.25 * float(query[0, s, h] @ key[0, t])) for h in range(4)]
            scores[t] = math.fsum(float(weights[0, s, h]) * p for h, p in enumerate(products))
        assert set(chosen[0, s].tolist()) == set(sorted(scores, key=lambda t: -scores[t])[:4])


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_selection_is_upstreams(kind: str) -> None:
    """Its whole forward, with projections and rope done by upstream itself on both sides."""
    config = DeepseekV32Config(hidden_size=24, q_lora_rank=12, index_n_heads=3, index_head_dim=10, qk_rope_head_dim=6)
    module = DeepseekV32Indexer(config, 0)
    module.index_topk = 5
    seen: dict[str, torch.Tensor] = {}
    module.wk.register_forward_hook(lambda m, args, output: seen.update(hidden=args[0]))
    hidden, residual = torch.randn(2, 9, 24), torch.randn(2, 9, 12)
    cos, sin = torch.ones(2, 9, 6), torch.zeros(2, 9, 6)
    real = torch.arange(9) >= torch.tensor([3, 0])[:, None]
    mask = causal_mask(9, 9, None, torch.device("cpu"))[None] & real[:, None]
    given = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    theirs = module(hidden, residual, (cos, sin), given, None)
    with torch.no_grad():
        query, key = module.wq_b(residual).view(2, 9, 3, 10), module.k_norm(module.wk(hidden))
        arguments = query, key, module.weights_proj(hidden), given, module.softmax_scale * 3**-0.5, 5
    ours = reference(*INDEXER, *arguments)
    for row, (a, b) in enumerate(zip(ours.flatten(0, 1), theirs.flatten(0, 1), strict=True)):
        visible = set(mask.flatten(0, 1)[row].nonzero().flatten().tolist())
        assert set(a.tolist()) & visible == set(b.tolist()) & visible
        assert len(set(a.tolist()) & visible) == min(5, len(visible))


def worse(chosen: torch.Tensor, into: int, key: int) -> torch.Tensor:
    changed = chosen.clone()
    changed[0, 0, into] = key
    return changed


def test_errors_of_a_selection() -> None:
    query, key, weights = states(2, 40)
    arguments = (query, key, weights, (torch.arange(40) < 30)[None, None], 0.25, 8)
    best = reference(*INDEXER, *arguments)
    exact = default_registry().op(*INDEXER).oracle(*arguments)
    scores = indexer.index_scores(query.double(), key.double(), weights.double(), None, 0.25)[0, 0, :30]
    order = scores.argsort(descending=True)
    assert indexer.selection_error(best, exact, *arguments) == 0.0
    assert indexer.selection_error(best.flip(-1), exact, *arguments) == 0.0
    last = best[0, 0].tolist().index(int(order[7]))
    exchanged = indexer.selection_error(worse(best, last, int(order[8])), exact, *arguments)
    assert 0.0 < exchanged < indexer.selection_error(worse(best, last, int(order[20])), exact, *arguments)
    assert exchanged > 100 * default_registry().op(*INDEXER).tolerance.relative(torch.float32, *arguments)
    for bad in (int(best[0, 0, 0 if last else 1]), 35, -1, 40):
        assert indexer.selection_error(worse(best, last, bad), exact, *arguments) == math.inf
    assert indexer.selection_error(best[..., :-1], exact, *arguments) == math.inf


def test_equal_scores_may_be_exchanged() -> None:
    query, key, weights = states(3, 12)
    key = key[:, :1].expand(1, 12, 16)
    arguments = (query, key, weights, None, 0.25, 4)
    exact = default_registry().op(*INDEXER).oracle(*arguments)
    for chosen in ([0, 1, 2, 3], [11, 3, 7, 5]):
        assert indexer.selection_error(torch.tensor([[chosen]], dtype=torch.int32), exact, *arguments) == 0.0


def test_in_blocks_of_queries_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {key: [reference(*key, *case.arguments) for case in cases(*key)] for key in (INDEXER, SPARSE)}
    monkeypatch.setattr(indexer, "SCORES", 100)
    monkeypatch.setattr(sparse_mla_attention, "GATHERED", 300)
    for case, expected in zip(cases(*SPARSE), whole[SPARSE], strict=True):
        assert_same(reference(*SPARSE, *case.arguments), expected)
    for case, expected in zip(cases(*INDEXER), whole[INDEXER], strict=True):
        ours = reference(*INDEXER, *case.arguments)
        assert indexer.selection_error(ours, expected, *case.arguments) <= 1e-14, case.label


def test_sparse_attention_is_dense_attention_under_the_mask_of_the_selection() -> None:
    for case in cases(*SPARSE):
        *dense, indices, mask, scaling = case.arguments
        queries, keys = dense[0].shape[2], dense[2].shape[2]
        if mask is None:
            mask = causal_mask(queries, keys, None, torch.device("cpu"))[None, None]
        chosen = torch.zeros(*indices.shape[:2], keys + 1, dtype=torch.bool)
        chosen.scatter_(-1, torch.where(indices < 0, keys, indices).long(), True)
        chosen = chosen[..., :keys].unsqueeze(1)
        lowest = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        whole = chosen & mask if mask.dtype == torch.bool else mask.masked_fill(~(chosen & lowest), -math.inf)
        theirs = reference("mla_attention", "absorbed", *dense, whole, scaling)
        assert_same(reference(*SPARSE, *case.arguments), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", ["reference", "cpu"])
def test_what_is_not_selected_is_not_read(run: str, dtype: torch.dtype) -> None:
    """NaN in every latent that no query selects: a mask over all keys would multiply it by zero."""
    nope, rope, latent, key_rope, weight = latent_states(4, 300, 2, dtype)
    indices = torch.stack([torch.randperm(299)[:33], torch.randperm(299)[:33]])[None].to(torch.int32)
    rest = torch.ones(300, dtype=torch.bool)
    rest[indices.flatten().long()] = False
    latent[:, :, rest], key_rope[:, :, rest] = math.nan, math.nan
    call = default_registry().op(*SPARSE).reference if run == "reference" else cpu(SPARSE).call
    assert bool(call(nope, rope, latent, key_rope, weight, indices, None, 0.2).isfinite().all())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("keys", [64, 65, 1023, 1024, 1025, 5000])
def test_cpu_indexer_over_long_caches(keys: int, threads: int) -> None:
    op, before = default_registry().op(*INDEXER), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for queries in (1, 3):
            arguments = (*states(keys, keys, queries), None, 0.25, 48)
            error = op.error(cpu(INDEXER).call(*arguments), op.oracle(*arguments), *arguments)
            assert error <= op.tolerance.relative(torch.float32, *arguments)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_cpu_attention_over_more_keys_than_a_block(threads: int) -> None:
    op, before = default_registry().op(*SPARSE), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for queries in (1, 600):
            indices = torch.rand(1, queries, 700).argsort(-1)[..., :200].to(torch.int32)
            arguments = (*latent_states(5, 700, queries), indices, None, 0.2)
            error = op.error(cpu(SPARSE).call(*arguments), op.oracle(*arguments), *arguments)
            assert error <= op.tolerance.relative(torch.float32, *arguments)
    finally:
        torch.set_num_threads(before)


def test_cpu_takes_the_earlier_of_equal_keys_and_lists_them_in_order() -> None:
    query, key, weights = states(6, 50)
    chosen = cpu(INDEXER).call(query, key, weights * 0, None, 0.25, 7)
    assert chosen.tolist() == [[list(range(7))]]
    ordered = cpu(INDEXER).call(query, key, weights, None, 0.25, 20)[0, 0].tolist()
    assert ordered == sorted(ordered)


def test_cpu_fills_short_rows_with_hidden_keys() -> None:
    query, key, weights = states(7, 6, queries=6)
    chosen = cpu(INDEXER).call(query, key, weights, None, 0.25, 4)
    assert chosen[0, 1].tolist() == [0, 1, 2, 3]
    mask = (torch.arange(6) >= 4).expand(1, 6, 6)
    assert cpu(INDEXER).call(query, key, weights, mask, 0.25, 4)[0, 3].tolist() == [4, 5, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_cpu_survives_scores_that_are_not_finite(bad: float) -> None:
    """Distinct keys, and those with NaN first, as torch ranks them."""
    query, key, weights = states(8, 100)
    key[0, 60] = bad
    chosen = cpu(INDEXER).call(query, key, weights, None, 0.25, 9)[0, 0].tolist()
    assert len(set(chosen)) == 9 and all(0 <= t < 100 for t in chosen)
    assert not math.isnan(bad) or 60 in chosen


def test_cost_follows_the_selection_not_the_cache() -> None:
    op = default_registry().op(*SPARSE)

    def bytes_of(keys: int) -> int:
        arguments: list[Any] = [*latent_states(9, keys, 1), torch.zeros(1, 1, 32, dtype=torch.int32), None, 0.2]
        return op.cost(*arguments).bytes

    assert bytes_of(4096) == bytes_of(64) > bytes_of(16)
