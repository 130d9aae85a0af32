"""What one decode step of sparse attention costs beside dense: `python -m benchmarks.sparse_decode`.

One layer of DeepSeek-V3.2 with its released widths, a batch of one, on the CPU kernels: the indexer and the latent
attention over 2,048 selected keys, against latent attention over all keys. Then the shipped tiny checkpoint over 4,096
tokens. Times are the least of interleaved repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import porter
from porter.kernels.dispatch import OpCall
from porter.kv_cache import cache_for
from porter.models.shipped.train import TEXT

HEADS, NOPE, ROPE, RANK, VALUE = 128, 128, 64, 512, 128
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048


def layer_calls(keys: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The attention of one decode step over `keys` cached tokens."""
    draw = torch.Generator().manual_seed(keys)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    query, key, weights = normal(1, 1, INDEX_HEADS, INDEX_DIM), normal(1, keys, INDEX_DIM), normal(1, 1, INDEX_HEADS)
    nope, rope = normal(1, HEADS, 1, NOPE), normal(1, HEADS, 1, ROPE)
    latent, key_rope, weight = normal(1, 1, keys, RANK), normal(1, 1, keys, ROPE), normal(HEADS * (NOPE + VALUE), RANK)
    indexer, sparse = OpCall("indexer", "lightning"), OpCall("sparse_mla_attention", "absorbed")
    dense = OpCall("mla_attention", "absorbed")
    chosen = indexer(query, key, weights, None, 0.01, TOP_K)
    return {
        "dense": lambda: dense(nope, rope, latent, key_rope, weight, None, 0.07),
        "indexer": lambda: indexer(query, key, weights, None, 0.01, TOP_K),
        "sparse": lambda: sparse(nope, rope, latent, key_rope, weight, chosen, None, 0.07),
    }


def least(calls: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Milliseconds of each call: the least of repetitions that take turns."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(repetitions):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            found[name] = min(found[name], 1e3 * (time.perf_counter() - start))
    return found


def fed_steps(model: nn.Module, ids: torch.Tensor, steps: int, top_k: int) -> float:
    """Milliseconds of the fastest decode step after a prefill of `ids`, with indexers that select `top_k` keys."""
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.__dict__["index_topk"] = top_k
    cache, times = cache_for(model.config, ids.shape[1]), []
    for piece in ids.split([ids.shape[1] - steps, *[1] * steps], dim=1):
        start = time.perf_counter()
        model(piece, use_cache=True, cache=cache)
        times.append(1e3 * (time.perf_counter() - start))
    return min(times[1:])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", help="a port of tiny-deepseek-v32 that porter adapt wrote; left out: Ops alone")
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    model = porter.load(arguments.port) if arguments.port else None
    with torch.inference_mode():
        print("cached tokens   dense ms   indexer ms + sparse ms   dense / both")
        for keys in (4096, 16384, 65536):
            found = least(layer_calls(keys, torch.bfloat16), arguments.repetitions)
            both = found["indexer"] + found["sparse"]
            print(
                f"{keys:13,d}   {found['dense']:8.1f}   {found['indexer']:10.1f} + {found['sparse']:9.1f}   "
                f"{found['dense'] / both:12.2f}"
            )
        if model is not None:
            ids = torch.tensor([[256, *TEXT.read_bytes()[5000 : 5000 + 4095]]])
            for name, top_k in (("32 selected", 32), ("all selected", 1 << 30)):
                print(f"tiny-deepseek-v32 at 4,096 tokens, {name}: {fed_steps(model, ids, 32, top_k):.1f} ms a token")


if __name__ == "__main__":
    main()
