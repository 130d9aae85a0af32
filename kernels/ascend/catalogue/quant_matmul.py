"""Matrix products over int8 weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from porter.kernels.ascend.catalogue.quantization_dtypes import as_dtype
from porter.kernels.ascend.catalogue.rules import absent, contiguous, dtypes, one_of, rank, short, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, I310P, PAGES, Call, Rule, VendorOp

LONGEST = 65535
"""Largest dimension of a product's operands."""

# scale / offset / bias / pertoken_scale / output_dtype of int8 products, by the page's tables 1 and 2; - is None. The
# row with an int32 output is left out: whether it is scaled is not documented.
ON_310P = ("i64,f32/-/i32,-/-/f16", "i64,f32/f32,-/i32,-/-/i8")
ON_A2 = (*ON_310P, "f32,bf16/-/i32,bf16,f32,-/f32,-/bf16", "f32/-/i32,bf16,f32,-/f32/f16")
COLUMNS = ("scale", "offset", "bias", "pertoken_scale")


def _combination(rows: Sequence[str], chips: Sequence[str]) -> Rule:
    """The dtypes of scale, offset, bias, pertoken_scale and the output are those of one row of the page's table."""
    table = [[cell.split(",") for cell in row.split("/")] for row in rows]

    def holds(call: Call) -> bool:
        given = ["-" if call[n] is None else short(call[n].dtype) for n in COLUMNS]
        try:
            given.append(short(as_dtype(call["output_dtype"]) or torch.int8))
        except KeyError:
            return False
        return any(all(cell in row for cell, row in zip(given, cells, strict=True)) for cells in table)

    says = f"scale / offset / bias / pertoken_scale / output_dtype as {'; '.join(rows)}"
    return Rule((*COLUMNS, "output_dtype"), says, holds, tuple(chips))


def turned(tensor: torch.Tensor) -> bool:
    """Whether the last two dimensions are those of a contiguous tensor exchanged."""
    return tensor.transpose(-1, -2).is_contiguous()


def _plain_or_turned(name: str) -> Rule:
    return that(
        f"{name} contiguous or the transpose of a contiguous one",
        lambda call: call[name].is_contiguous() or turned(call[name]),
        name,
    )


def _short(*names: str) -> Rule:
    return that(
        f"the last dimensions of {' and '.join(names)} at most {LONGEST}",
        lambda call: all(call[n].shape[-1] <= LONGEST for n in names),
        *names,
    )


def _vector(name: str, of: str, *, single: bool = False) -> Rule:
    """One value for each column of `of`; or a single one."""
    return that(
        f"{name} [N]{' or [1]' * single}, N the last of {of}",
        lambda call: (
            call[name] is None
            or (call[name].dim() == 1 and call[name].shape[0] in ((1,) * single + (call[of].shape[-1],)))
        ),
        name,
        of,
    )


def _quant_matmul(call: Call) -> Any:
    x1, x2 = call["x1"], call["x2"]
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    dtype = as_dtype(call["output_dtype"]) or torch.int8
    return torch.empty((*batch, x1.shape[-2], x2.shape[-1]), dtype=dtype, device=x1.device)


def _weight_quant(call: Call) -> Any:
    x, weight = call["x"], call["weight"]
    return x.new_empty((x.shape[0], weight.shape[1]))


def _broadcasts(call: Call) -> bool:
    ahead = zip(reversed(call["x1"].shape[:-2]), reversed(call["x2"].shape[:-2]), strict=False)
    return all(a == b or 1 in (a, b) for a, b in ahead)


def _fits(call: Call, name: str) -> bool:
    """Whether the scale or offset is one, one per column, or one per group of rows and column."""
    tensor, (k, n), group = call[name], call["weight"].shape, call["antiquant_group_size"]
    if tensor is None:
        return True
    if group:
        return tuple(tensor.shape) == (-(-k // group), n)
    return tuple(tensor.shape) in {(1,), (1, 1), (n,), (1, n)}


OPS = (
    VendorOp(
        name="npu_quant_matmul",
        schema="(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, "
        "Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, int? x2_dtype=None, "
        "int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) "
        "-> Tensor",
        page=PAGES + "torch_npu-npu_quant_matmul.md",
        chips=(A2, A3, I310P),
        outputs=_quant_matmul,
        rules=(
            dtypes("x1 x2", "i8/i8"),
            rank("x1", 2, 3, 4, 5, 6),
            rank("x2", 2, 3, 4, 5, 6),
            that("x1 [.., M, K] and x2 [.., K, N]", lambda c: c["x1"].shape[-1] == c["x2"].shape[-2], "x1", "x2"),
            that("the dimensions before the last two to broadcast", _broadcasts, "x1", "x2"),
            that("x1, x2 and scale not empty", lambda c: all(c[n].numel() for n in ("x1", "x2", "scale")), "x1", "x2"),
            _short("x1", "x2"),
            _plain_or_turned("x2"),
            _combination(ON_A2, (A2, A3)),
            _combination(ON_310P, (I310P,)),
            _vector("scale", "x2", single=True),
            _vector("offset", "x2", single=True),
            _vector("bias", "x2"),
            that(
                "pertoken_scale [M], M the last but one of x1",
                lambda c: c["pertoken_scale"] is None or tuple(c["pertoken_scale"].shape) == (c["x1"].shape[-2],),
                "pertoken_scale",
                "x1",
            ),
            absent("x1_dtype", "x2_dtype", "pertoken_scale_dtype", "scale_dtype", "group_sizes", "y_scale"),
        ),
        explicit=("output_dtype",),
        nz=("x2",),
        note="the output is int8 unless output_dtype says otherwise; an int32 bias is added before the scales, a "
        "floating one after; without pertoken_scale a float16 or int8 output takes float32 scales cut to 19 bits",
    ),
    VendorOp(
        name="npu_weight_quant_batchmatmul",
        schema="(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None, "
        "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, int antiquant_group_size=0, "
        "int inner_precise=0, int? weight_dtype=None) -> Tensor",
        page=PAGES + "torch_npu-npu_weight_quant_batchmatmul.md",
        chips=(A2, A3, I310P),
        outputs=_weight_quant,
        rules=(
            dtypes("x weight", "f16/i8 bf16/i8", (A2, A3)),
            dtypes("x weight", "f16/i8", (I310P,)),
            rank("x", 2),
            rank("weight", 2),
            that("x [M, K] and weight [K, N]", lambda c: c["x"].shape[-1] == c["weight"].shape[0], "x", "weight"),
            that("no empty tensor", lambda c: all(c[n].numel() for n in ("x", "weight")), "x", "weight"),
            that(f"K and N at most {LONGEST}", lambda c: max(c["weight"].shape) <= LONGEST, "weight"),
            _plain_or_turned("weight"),
            dtypes("x antiquant_scale antiquant_offset", "f16/f16/f16 bf16/bf16/bf16"),
            that(
                "antiquant_scale [1], [N] or [1, N], or [ceil(K / group), N] with antiquant_group_size",
                lambda call: _fits(call, "antiquant_scale"),
                "antiquant_scale",
                "weight",
                "antiquant_group_size",
            ),
            that(
                "antiquant_offset of the shape of antiquant_scale",
                lambda c: c["antiquant_offset"] is None or c["antiquant_offset"].shape == c["antiquant_scale"].shape,
                "antiquant_offset",
                "antiquant_scale",
            ),
            that(
                "antiquant_group_size 0, or a multiple of 32 in [32, K - 1]",
                lambda c: (
                    c["antiquant_group_size"] == 0
                    or (c["antiquant_group_size"] % 32 == 0 and 32 <= c["antiquant_group_size"] <= c["x"].shape[-1] - 1)
                ),
                "antiquant_group_size",
                "x",
            ),
            dtypes("x bias", "f16/f16 bf16/f32"),
            contiguous("bias"),
            that(
                "bias [N] or [1, N]",
                lambda c: (
                    c["bias"] is None or tuple(c["bias"].shape) in {c["weight"].shape[1:], (1, c["weight"].shape[1])}
                ),
                "bias",
                "weight",
            ),
            absent("quant_scale", "quant_offset", "weight_dtype"),
            one_of("inner_precise", 0),
        ),
        note="weights are (weight + antiquant_offset) * antiquant_scale; a bfloat16 x needs a float32 bias; FRACTAL_NZ "
        "weights are taken in graph mode alone, so not here",
    ),
)
