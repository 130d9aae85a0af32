"""Calls of the sizes of real models, on meta tensors: what the compiler plans memory for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.ascend_triton.mutations import Key
from porter.kernels.triton.delta_launches import KEY_SIZE
from porter.kernels.triton.launch import Launch
from porter.kernels.triton.plans import plan
from porter.kernels.triton.router_launches import EXPERTS
from porter.kernels.triton.row_launches import COLUMN_BLOCK, ROW_BLOCK

TOKENS = 4096
WIDEST = "largest block that is served"


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Key, tuple[Any, ...]]]:
    """(whose sizes, Op, arguments) with activations and weights of `dtype`."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    def norm(width: int) -> tuple[Any, ...]:
        return empty(TOKENS, width), empty(width), 1e-6

    def add(width: int) -> tuple[Any, ...]:
        return empty(TOKENS, width), empty(TOKENS, width), empty(width), 1e-6

    def turned(heads: int, key_heads: int, size: int, rotary: int) -> tuple[Any, ...]:
        states = (empty(1, TOKENS, count, size).transpose(1, 2) for count in (heads, key_heads))
        return *states, empty(1, TOKENS, rotary), empty(1, TOKENS, rotary)

    def routed(width: int, experts: int, *rest: Any) -> tuple[Any, ...]:
        return empty(TOKENS, width), empty(experts, width), *rest

    wide = torch.float32
    yield "deepseek-v3, hidden 7168", ("rms_norm", "standard"), norm(7168)
    yield "qwen3, head 128", ("rms_norm", "standard"), norm(128)
    yield "qwen3-next, hidden 2048", ("rms_norm", "zero_centered"), norm(2048)
    yield "qwen3-next, head 128", ("rms_norm", "gated"), (empty(TOKENS, 128), empty(128), empty(TOKENS, 128), 1e-6)
    yield "deepseek-v3, hidden 7168", ("add_rms_norm", "standard"), add(7168)
    yield "qwen3-next, hidden 2048", ("add_rms_norm", "zero_centered"), add(2048)
    yield "qwen3-32b, 64 and 8 heads of 128", ("rope", "half"), turned(64, 8, 128, 128)
    yield "qwen3-next, 16 and 2 heads of 256, 64 turned", ("rope", "half"), turned(16, 2, 256, 64)
    yield "deepseek-v3, 128 and 1 heads of 64", ("rope", "interleaved"), turned(128, 1, 64, 64)
    yield "deepseek-v3, intermediate 18432", ("swiglu", "standard"), (empty(TOKENS, 2 * 18432),)
    yield "deepseek-v4, intermediate 2048", ("swiglu", "clamped"), (empty(TOKENS, 2 * 2048), 10.0)
    yield "qwen3-235b-a22b, 8 of 128 experts", ("router", "softmax"), routed(4096, 128, 8, True)
    yield "qwen3-next, 10 of 512 experts", ("router", "softmax"), routed(2048, 512, 10, True)
    grouped = empty(256, of=wide), 8, 8, 4, True, 2.5
    yield "deepseek-v3, 8 of 256 experts", ("router", "grouped_sigmoid"), routed(7168, 256, *grouped)
    heads = empty(64, 1, 16, 128), empty(64, 1, 16, 128), empty(64, 1, 32, 128)
    gates = empty(64, 1, 32, of=wide), empty(64, 1, 32, of=wide)
    state = empty(64, 32, 128, 128, of=wide)
    yield "qwen3-next, 64 sequences, one token", ("gated_delta_rule", "recurrent"), (*heads, *gates, state)
    yield from _widest(dtype)


def _widest(dtype: torch.dtype) -> Iterator[tuple[str, Key, tuple[Any, ...]]]:
    """Calls with the largest blocks that the plans allow."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    rows, weight = empty(TOKENS, ROW_BLOCK), empty(ROW_BLOCK)
    yield WIDEST, ("rms_norm", "zero_centered"), (rows, weight, 1e-6)
    yield WIDEST, ("rms_norm", "gated"), (rows, weight, rows, 1e-6)
    yield WIDEST, ("add_rms_norm", "zero_centered"), (rows, rows, weight, 1e-6)
    yield WIDEST, ("swiglu", "clamped"), (empty(TOKENS, 2 * COLUMN_BLOCK), 10.0)
    states = empty(1, TOKENS, 64, 256).transpose(1, 2)
    yield WIDEST, ("rope", "interleaved"), (states, states, empty(1, TOKENS, 256), empty(1, TOKENS, 256))
    hidden, experts = empty(TOKENS, 4096), empty(EXPERTS, 4096, of=torch.float32)
    yield WIDEST, ("router", "softmax"), (hidden, experts, 16, True)
    bias = empty(EXPERTS, of=torch.float32)
    yield WIDEST, ("router", "grouped_sigmoid"), (hidden, experts, bias, 16, 8, 4, True, 2.5)
    heads = empty(4, 1, 8, KEY_SIZE), empty(4, 1, 8, KEY_SIZE), empty(4, 1, 8, KEY_SIZE)
    gates = empty(4, 1, 8, of=torch.float32), empty(4, 1, 8, of=torch.float32)
    state = empty(4, 8, KEY_SIZE, KEY_SIZE, of=torch.float32)
    yield WIDEST, ("gated_delta_rule", "recurrent"), (*heads, *gates, state)


def launches(dtype: torch.dtype) -> Iterator[tuple[str, Key, Launch]]:
    """(whose sizes, Op, launch) of each kernel of each call, once where two launches differ in no constant."""
    for label, key, arguments in calls(dtype):
        seen = set()
        for launch in plan(*key, arguments).launches:
            marks = launch.kernel, *launch.constants.items()
            if marks not in seen:
                seen.add(marks)
                yield label, key, launch


TOO_LARGE = (
    (("rms_norm", "standard"), "rms_norm", {"BLOCK": 32768}),
    (("swiglu", "standard"), "swiglu", {"BLOCK": 32768}),
    (("rope", "interleaved"), "rope", {"HEADS": 128, "HALF": 256}),
    (("router", "softmax"), "router_logits", {"TOKENS": 256, "EXPERTS": 256}),
    (("gated_delta_rule", "recurrent"), "gated_delta_rule", {"KEYS": 256, "VALUES": 256}),
)
"""Blocks beyond a chip's memory, which the compiler must refuse: Op, kernel, constants."""


def too_large(dtype: torch.dtype) -> Iterator[tuple[Key, Launch]]:
    """(Op, launch) with the constants of TOO_LARGE."""
    for key, kernel, constants in TOO_LARGE:
        launch = next(launch for _, of, launch in launches(dtype) if of == key and launch.kernel == kernel)
        yield key, replace(launch, constants={**launch.constants, **constants})
