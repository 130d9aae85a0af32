"""RMS norms, a row at a time: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, equation 4)."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(hidden_states, weight, normed, rows, width, row_stride, eps, CENTRE: tl.constexpr, BLOCK: tl.constexpr):
    """normed[rows, width] = norm(hidden_states) * (CENTRE + weight). CENTRE: 0, or 1 for a weight about zero."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = CENTRE + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(hidden_states + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        root = tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
        tl.store(normed + row * width + columns, (x / root * scale).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm(
    hidden_states,
    residual,
    weight,
    normed,
    total,
    rows,
    width,
    row_stride,
    residual_stride,
    eps,
    CENTRE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total = hidden_states + residual, rounded as it is stored; normed = norm(total) * (CENTRE + weight)."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = CENTRE + tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(hidden_states + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(total.dtype.element_ty)
        tl.store(total + row * width + columns, stored, mask=inside)
        x = stored.to(tl.float32)
        root = tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
        tl.store(normed + row * width + columns, (x / root * scale).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def gated_rms_norm(hidden_states, weight, gate, normed, rows, width, row_stride, gate_stride, eps, BLOCK: tl.constexpr):
    """normed[rows, width] = norm(hidden_states) * weight * silu(gate) (Qwen3-Next's gated delta net)."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(hidden_states + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
        root = tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
        opened = x / root * scale * (g / (1.0 + tl.exp(-g)))
        tl.store(normed + row * width + columns, opened.to(normed.dtype.element_ty), mask=inside)
