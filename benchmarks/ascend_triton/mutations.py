"""Faults planted in copies of the kernels, each of which the numerics must find."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.ascend_triton.tools import SOURCES

Key = tuple[str, str]


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` wherever it stands in the source of that name; `op` is run with it, in `dtype`."""

    what: str
    source: str
    old: str
    new: str
    op: Key
    dtype: torch.dtype = torch.float32

    def text(self) -> str:
        """The changed source. Raises ValueError where nothing of it changes."""
        text = (SOURCES / f"{self.source}.py").read_text(encoding="utf-8")
        if self.old not in text:
            raise ValueError(f"{self.source} has no {self.old!r}")
        return text.replace(self.old, self.new)


NORM, ZERO_CENTRED, ADD = ("rms_norm", "standard"), ("rms_norm", "zero_centered"), ("add_rms_norm", "standard")
HALF, INTERLEAVED, SWIGLU = ("rope", "half"), ("rope", "interleaved"), ("swiglu", "standard")
SOFTMAX, GROUPED, DELTA = ("router", "softmax"), ("router", "grouped_sigmoid"), ("gated_delta_rule", "recurrent")

MUTATIONS = (
    Mutation("no eps", "rms_norm", "/ width + eps", "/ width", NORM),
    Mutation("no eps, bfloat16", "rms_norm", "/ width + eps", "/ width", NORM, torch.bfloat16),
    Mutation("mask one too wide", "rms_norm", "columns < width", "columns <= width", NORM),
    Mutation("mask one too narrow", "rms_norm", "columns < width", "columns < width - 1", NORM),
    Mutation("mean over the block", "rms_norm", "/ width + eps", "/ BLOCK + eps", NORM),
    Mutation("weight about zero taken as it is", "rms_norm", "CENTRE + tl.load", "tl.load", ZERO_CENTRED),
    Mutation("16-bit squares", "rms_norm", "other=0.0).to(tl.float32)", "other=0.0)", NORM, torch.float16),
    Mutation("residual not added", "rms_norm", "x += tl.load", "x += 0.0 * tl.load", ADD),
    Mutation("sum not stored", "rms_norm", "tl.store(total + row * width", "tl.store(normed + row * width", ADD),
    Mutation("neighbours turned as halves", "rope", "if NEIGHBOURS:", "if HALF < 0:", INTERLEAVED),
    Mutation("halves turned as neighbours", "rope", "if NEIGHBOURS:", "if HALF > 0:", HALF),
    Mutation("turned the other way", "rope", "first * c - second * s", "first * c + second * s", HALF),
    Mutation("pairs half of the head apart", "rope", "read + half + pair", "read + size // 2 + pair", HALF),
    Mutation("angles of the first sequence", "rope", "batch * angle_batch_stride + ", "", HALF),
    Mutation("mask of heads one too wide", "rope", "(head < heads)", "(head <= heads)", HALF),
    Mutation("heads beyond a block left out", "rope", "tl.program_id(1) * HEADS + ", "", HALF),
    Mutation("gate and up exchanged", "swiglu", "/ (1.0 + tl.exp(-gate)) * up", "* up / (1.0 + tl.exp(-up))", SWIGLU),
    Mutation("mask one too wide", "swiglu", "columns < width", "columns <= width", SWIGLU),
    Mutation("columns beyond a block left out", "swiglu", "tl.program_id(1) * BLOCK + ", "", SWIGLU),
    Mutation("up not clamped below", "swiglu", "tl.maximum(up, -limit)", "up", ("swiglu", "clamped")),
    Mutation("last columns of hidden left out", "router_logits", "range(0, width,", "range(0, width - 1,", SOFTMAX),
    Mutation("not renormalized", "router_softmax", "if RENORMALIZE:", "if TOP_K < 0:", SOFTMAX),
    Mutation("padding among the experts", "router_softmax", "expert < experts", "expert < EXPERTS", SOFTMAX),
    Mutation("a pick too few", "router_softmax", "in range(TOP_K)", "in range(TOP_K - 1)", SOFTMAX),
    Mutation("experts beyond a block left out", "router_logits", "tl.program_id(1) * EXPERTS", "0", SOFTMAX),
    Mutation("groups by their best alone", "router_grouped_sigmoid", "first + second,", "first,", GROUPED),
    Mutation("padding numbered", "router_grouped_sigmoid", "(inside, expert,", "(expert > -1, expert,", GROUPED),
    Mutation("bias in the weights", "router_grouped_sigmoid", "== where, score, 0.0", "== where, choice, 0.0", GROUPED),
    Mutation("factor left out", "router_grouped_sigmoid", "picked * factor", "picked", GROUPED),
    Mutation("groups not limited", "router_grouped_sigmoid", "kept[:, None] > 0", "kept[:, None] > -1", GROUPED),
    Mutation("no decay", "gated_delta_rule", "memory = memory * kept", "memory = memory * 1.0", DELTA),
    Mutation("read before it is written", "gated_delta_rule", "memory += k[:, None]", "recalled += k[:, None]", DELTA),
    Mutation("query not scaled", "gated_delta_rule", "1e-6) * scale", "1e-6)", DELTA),
    Mutation("no eps", "gated_delta_rule", " + 1e-6", "", DELTA),
    Mutation("key head of another value head", "gated_delta_rule", "head // share", "head % share", DELTA),
    Mutation("columns beyond a block left out", "gated_delta_rule", "tl.program_id(1) * VALUES + ", "", DELTA),
    Mutation("state of the first head", "gated_delta_rule", "(batch * heads + head) *", "batch * heads *", DELTA),
)
