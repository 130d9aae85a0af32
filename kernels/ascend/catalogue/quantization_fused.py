"""Quantization that the vendor fuses with what comes before it: the residual sum and norm, or the gated activation."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.quantization_dtypes import dtype_one_of
from porter.kernels.ascend.catalogue.rules import absent, dtypes, given, one_of, rank, same_shape, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, I310P, PAGES, Call, VendorOp

WIDEST, ALIGNED = 10496, 64
"""The documented limits of half the last dimension of npu_dequant_swiglu_quant by groups."""
GLU = ("clamp_limit", "glu_alpha", "glu_bias")


def _codes(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=torch.int8, device=x.device)


def _norm_quant(call: Call) -> Any:
    x = call["x1"]
    return _codes(x), _codes(x), torch.empty_like(x, memory_format=torch.contiguous_format)


def _norm_dynamic(call: Call) -> Any:
    x = call["x1"]
    first, second = (_codes(x) if kept else _codes(x.new_empty(0)) for kept in call["output_mask"])
    scales = (x.new_empty(x.shape[:-1] if kept else (0,), dtype=torch.float32) for kept in call["output_mask"])
    return first, second, torch.empty_like(x, memory_format=torch.contiguous_format), *scales


def _swiglu_quant(call: Call) -> Any:
    x = call["x"]
    tokens, width = x.shape
    codes = torch.empty((tokens, width // 2), dtype=torch.int8, device=x.device)
    return codes, x.new_empty(tokens, dtype=torch.float32)


def _trailing(*names: str) -> Any:
    def holds(call: Call) -> bool:
        gamma = call["gamma"].shape
        fits = call["x1"].shape[call["x1"].dim() - len(gamma) :] == gamma
        return fits and all(call[n] is None or call[n].shape == gamma for n in names)

    return that(
        f"gamma of the last dimensions of x1, and {', '.join(names)} of its shape", holds, "x1", "gamma", *names
    )


def _grouped(name: str, columns: int) -> Any:
    """[groups, width of x // columns]: one group without group_index."""

    def holds(call: Call) -> bool:
        groups = 1 if call["group_index"] is None else call["group_index"].shape[0]
        return call[name] is None or tuple(call[name].shape) == (groups, call["x"].shape[-1] // columns)

    return that(f"{name} [groups, {'H' if columns == 2 else '2H'}] of x [tokens, 2H]", holds, name, "x", "group_index")


def _groups_fit(call: Call) -> bool:
    groups = call["group_index"]
    return groups is None or (bool((groups >= 0).all()) and int(groups.sum()) <= call["x"].shape[0])


_NORM_BF16 = "bf16/bf16/bf16/bf16/bf16/bf16/bf16/bf16"
_NORM_F16 = "f16/f16/f16/f32/f32/i32/i32/f16"

OPS = (
    VendorOp(
        name="npu_add_rms_norm_quant",
        schema="(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1, Tensor? beta=None, "
        "Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, float epsilon=1e-06, bool div_mode=True, "
        "int? dst_type=None) -> (Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_add_rms_norm_quant.md",
        chips=(A2, A3, I310P),
        outputs=_norm_quant,
        rules=(
            dtypes("x1 x2 gamma scales1 scales2 zero_points1 zero_points2 beta", f"{_NORM_F16} {_NORM_BF16}", (A2, A3)),
            dtypes("x1 x2 gamma scales1 scales2 zero_points1 zero_points2 beta", _NORM_F16, (I310P,)),
            same_shape("x1", "x2"),
            _trailing("scales1", "zero_points1", "scales2", "zero_points2", "beta"),
            one_of("axis", -1),
            dtype_one_of("dst_type", None, torch.int8),
            that(
                "at least 32 values in gamma and in the last of x1",
                lambda call: min(call["x1"].shape[-1], call["gamma"].numel()) >= 32,
                "x1",
                "gamma",
                chips=(I310P,),
            ),
        ),
        explicit=("epsilon", "div_mode"),
        note="scales are of gamma's shape; without scales2 the second result is not defined; the third is the sum",
    ),
    VendorOp(
        name="npu_add_rms_norm_dynamic_quant",
        schema="(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None, Tensor? smooth_scale2=None, "
        "Tensor? beta=None, float epsilon=1e-06, bool[2]? output_mask=None, int? y_dtype=None) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_add_rms_norm_dynamic_quant.md",
        chips=(A2, A3),
        outputs=_norm_dynamic,
        rules=(
            dtypes(
                "x1 x2 gamma smooth_scale1 smooth_scale2 beta", "f16/f16/f16/f16/f16/f16 bf16/bf16/bf16/bf16/bf16/bf16"
            ),
            rank("x1", 2, 3, 4, 5, 6, 7, 8),
            rank("gamma", 1),
            same_shape("x1", "x2"),
            _trailing("smooth_scale1", "smooth_scale2", "beta"),
            that("x1 not empty", lambda call: call["x1"].numel() > 0, "x1"),
            given("output_mask", why="which of the two results are defined depends on it"),
            that("output_mask to keep a result", lambda call: any(call["output_mask"]), "output_mask"),
            that(
                "output_mask to keep every result that is smoothed",
                lambda call: all(
                    kept or call[n] is None
                    for kept, n in zip(call["output_mask"], ("smooth_scale1", "smooth_scale2"), strict=True)
                ),
                "output_mask",
                "smooth_scale1",
                "smooth_scale2",
            ),
            dtype_one_of("y_dtype", None, torch.int8),
        ),
        explicit=("epsilon", "output_mask"),
        note="codes, codes, sum, scale, scale: the sum is the third of five",
    ),
    VendorOp(
        name="npu_dequant_swiglu_quant",
        schema="(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, "
        "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=False, "
        "int quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None, int swiglu_mode=0, "
        "float clamp_limit=7., float glu_alpha=1.702, float glu_bias=1.) -> (Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_dequant_swiglu_quant.md",
        chips=(A2, A3),
        outputs=_swiglu_quant,
        rules=(
            rank("x", 2),
            dtypes("x weight_scale activation_scale", "i32/f32/f32 f16/f32/- bf16/f32/-"),
            that(
                "activation_scale [tokens, 1] and weight_scale for int32 x, no activation_scale for others",
                lambda call: (
                    (call["activation_scale"] is not None and call["weight_scale"] is not None)
                    if call["x"].dtype == torch.int32
                    else call["activation_scale"] is None
                ),
                "x",
                "activation_scale",
                "weight_scale",
            ),
            that(
                "activation_scale [tokens, 1]",
                lambda c: c["activation_scale"] is None or tuple(c["activation_scale"].shape) == (c["x"].shape[0], 1),
                "activation_scale",
                "x",
            ),
            that("the last dimension of x even", lambda call: call["x"].shape[-1] % 2 == 0, "x"),
            _grouped("weight_scale", 1),
            _grouped("quant_scale", 2),
            dtypes("quant_scale", "f32 f16 bf16"),
            dtypes("group_index", "i64"),
            rank("group_index", 1),
            that(
                f"half the last dimension of x at most {WIDEST} and a multiple of {ALIGNED} with group_index",
                lambda call: (
                    call["group_index"] is None
                    or (call["x"].shape[-1] // 2 <= WIDEST and call["x"].shape[-1] // 2 % ALIGNED == 0)
                ),
                "x",
                "group_index",
            ),
            absent("bias", "quant_offset"),
            one_of("quant_mode", 1),
            dtype_one_of("dst_type", None, torch.int8),
            one_of("round_mode", None, 0),
            one_of("activate_dim", None, -1, 1),
            one_of("swiglu_mode", 0, 1, 2),
            that(
                "clamp_limit, glu_alpha and glu_bias passed where swiglu_mode is not 0 (7, 1.702 and 1 are gpt-oss's)",
                lambda call: call["swiglu_mode"] == 0 or all(name in call.given for name in GLU),
                "swiglu_mode",
                *GLU,
            ),
        ),
        value_rules=(
            that("group_index to hold counts that sum to the tokens of x at most", _groups_fit, "group_index", "x"),
        ),
        explicit=("activate_left", "quant_mode"),
        note="activate_left True activates the first half, as gate and up lie in models; group_index holds counts, and "
        "rows past their sum are not written; quant_mode 1 quantizes per token, 0 with given scales",
    ),
)
