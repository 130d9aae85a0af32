"""DeepSeek-V4's hyper-connections: what a block reads of the streams, their mixing, and what it writes back."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.rules import dtypes, one_of, rank, size, that
from porter.kernels.ascend.catalogue.vendor_op import A5, PAGES, Call, VendorOp

STREAMS = (4, 6, 8)


def _pre(call: Call) -> Any:
    x, rows = call["x"], call["phi"].shape[0]
    tokens, count = x.shape[:-2], x.shape[-2]
    shapes = [(*tokens, count), (*tokens, count, count)]
    shapes += [tokens, (*tokens, rows), (*tokens, count)] if call["out_flag"] else [(0,)] * 3
    return x.new_empty((*tokens, x.shape[-1])), *(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _sinkhorn(call: Call) -> Any:
    return call["x"].new_empty(call["x"].shape), call["x"].new_empty(0), call["x"].new_empty(0)


def _post(call: Call) -> Any:
    return call["x"].new_empty(call["x"].shape)


def _read(call: Call) -> bool:
    count, width = call["x"].shape[-2:]
    rows = (count + 2) * count
    shapes = tuple(tuple(call[name].shape) for name in ("phi", "alpha", "bias"))
    return shapes == ((rows, count * width), (3,), (rows,))


def _written(call: Call) -> bool:
    x, count = call["x"], call["x"].shape[-2]
    fits = call["h_out"].shape == (*x.shape[:-2], x.shape[-1]) and call["h_post"].shape == x.shape[:-1]
    return bool(fits and (call["h_res"] is None or call["h_res"].shape == (*x.shape[:-1], count)))


OPS = (
    VendorOp(
        name="npu_mhc_pre",
        schema="(Tensor x, Tensor phi, Tensor alpha, Tensor bias, *, Tensor? gamma=None, float norm_eps=1e-06, "
        "float hc_eps=1e-06, int out_flag=0, int inner_precise=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_mhc_pre.md",
        chips=(A5,),
        outputs=_pre,
        rules=(
            dtypes("x phi alpha bias gamma", "bf16/f32/f32/f32/f32 f16/f32/f32/f32/f32"),
            rank("x", 3, 4),
            size("x", -2, "of 4, 6 or 8 streams", lambda n: n in STREAMS),
            size("x", -1, "a multiple of 16 up to 16384", lambda n: n % 16 == 0 and 0 < n <= 16384),
            that("x of one token or more", lambda c: c["x"].numel() > 0, "x"),
            that(
                "phi [n n + 2 n, n D], alpha [3], bias [n n + 2 n] for x [..., n, D]",
                _read,
                "x",
                "phi",
                "alpha",
                "bias",
            ),
            that("gamma [n, D]", lambda c: c["gamma"] is None or c["gamma"].shape == c["x"].shape[-2:], "gamma", "x"),
            one_of("out_flag", 0, 1),
            one_of("inner_precise", 0),
        ),
        explicit=("norm_eps", "hc_eps"),
        note="result 0 what the block reads, 1 the weights of its output, 2 the mixing before npu_mhc_sinkhorn",
    ),
    VendorOp(
        name="npu_mhc_sinkhorn",
        schema="(Tensor x, *, float eps=1e-06, SymInt num_iters=20, int out_flag=0) -> (Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_mhc_sinkhorn.md",
        chips=(A5,),
        outputs=_sinkhorn,
        rules=(
            dtypes("x", "f32"),
            rank("x", 3, 4),
            that(
                "x [..., n, n] of 4, 6 or 8 streams",
                lambda c: c["x"].shape[-1] == c["x"].shape[-2] and c["x"].shape[-1] in STREAMS and c["x"].numel() > 0,
                "x",
            ),
            that("1 to 65536 tokens", lambda c: 1 <= c["x"].shape[:-2].numel() <= 65536, "x"),
            that("num_iters of 1 to 100", lambda c: 1 <= c["num_iters"] <= 100, "num_iters"),
            one_of("out_flag", 0),
        ),
        explicit=("eps", "num_iters"),
        note="takes logits: the softmax is its first step",
    ),
    VendorOp(
        name="npu_mhc_post",
        schema="(Tensor x, Tensor? h_res, Tensor h_out, Tensor h_post) -> Tensor",
        page=PAGES + "torch_npu-npu_mhc_post.md",
        chips=(A5,),
        outputs=_post,
        rules=(
            dtypes("x h_res h_out h_post", "bf16/f32/bf16/f32 f16/f32/f16/f32"),
            rank("x", 3, 4),
            that(
                "h_out [..., D], h_post [..., n], h_res [..., n, n] for x [..., n, D]",
                _written,
                "x",
                "h_res",
                "h_out",
                "h_post",
            ),
        ),
        note="h_res[j, k] is what stream k takes of stream j, by the vendor's test; the page reads otherwise",
    ),
)
