"""Cases so wide that every loop and every axis of a grid has several blocks, the last one partial."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.ascend_triton.mutations import Key
from porter.kernels.contract import Case
from porter.kernels.reference.draw import Draw
from porter.kernels.triton.router_launches import WIDTH_TILE
from porter.kernels.triton.row_launches import COLUMN_BLOCK

ROW = 5003
WIDTH = 2 * WIDTH_TILE + 1


def _norms(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 101)
    yield Case(f"rows of {ROW}", (draw.normal(4, ROW), draw.normal(ROW), 1e-6))


def _gated(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 102)
    yield Case(f"rows of {ROW}", (draw.normal(4, ROW), draw.normal(ROW), draw.normal(4, ROW), 1e-6))


def _added(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 103)
    yield Case(f"rows of {ROW}", (draw.normal(4, ROW), draw.normal(4, ROW), draw.normal(ROW), 1e-6))


def _swiglu(*limit: float) -> Callable[[torch.dtype], Iterator[Case]]:
    def cases(dtype: torch.dtype) -> Iterator[Case]:
        width = COLUMN_BLOCK + 907
        yield Case(f"width {width}", (Draw(dtype, 104).normal(4, 2 * width, scale=3.0), *limit))

    return cases


def _rope(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 105)
    query, key = (draw.normal(2, 4, heads, 128).transpose(1, 2) for heads in (70, 35))
    position = draw.integers(0, 5000, 2, 4, 1).float()
    angles = (position * 10000.0 ** (-torch.arange(0, 128, 2).float() / 128)).repeat(1, 1, 2)
    yield Case("70 and 35 heads of 128", (query, key, angles.cos().to(dtype), angles.sin().to(dtype)))


def _softmax(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 106)
    yield Case(f"H={WIDTH} E=130", (draw.normal(19, WIDTH), draw.normal(130, WIDTH, scale=0.1), 9, True))


def _grouped(dtype: torch.dtype) -> Iterator[Case]:
    draw, wide = Draw(dtype, 107), Draw(torch.float32, 108)
    weight, bias = wide.normal(132, WIDTH, scale=0.1), wide.normal(132, scale=0.1)
    yield Case(f"H={WIDTH} E=132", (draw.normal(19, WIDTH), weight, bias, 7, 11, 5, True, 2.5))


def _delta(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 109)
    query, key, value = draw.normal(2, 3, 2, 96), draw.normal(2, 3, 2, 96), draw.normal(2, 3, 6, 131)
    decay, beta = -draw.uniform(2, 3, 6), draw.uniform(2, 3, 6)
    yield Case("K=96 V=131", (query, key, value, decay, beta, draw.normal(2, 6, 96, 131).float()))


WIDER: dict[Key, Callable[[torch.dtype], Iterator[Case]]] = {
    ("rms_norm", "standard"): _norms,
    ("rms_norm", "zero_centered"): _norms,
    ("rms_norm", "gated"): _gated,
    ("add_rms_norm", "standard"): _added,
    ("add_rms_norm", "zero_centered"): _added,
    ("rope", "half"): _rope,
    ("rope", "interleaved"): _rope,
    ("swiglu", "standard"): _swiglu(),
    ("swiglu", "clamped"): _swiglu(2.5),
    ("router", "softmax"): _softmax,
    ("router", "grouped_sigmoid"): _grouped,
    ("gated_delta_rule", "recurrent"): _delta,
}
"""One for each Op with Triton kernels."""
