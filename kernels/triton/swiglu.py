"""Gated activations over the fused gate and up projections (Shazeer 2020, SwiGLU without the matrices)."""

import triton
import triton.language as tl


@triton.jit
def swiglu(gate_up, activated, rows, width, row_stride, limit, CLAMPED: tl.constexpr, BLOCK: tl.constexpr):
    """gate_up [rows, 2 * width], the gate first -> activated [rows, width] = silu(gate) * up.

    Where CLAMPED, gate is at most `limit` and up within +-limit (DeepSeek-V4). Program axis 1 is BLOCK columns.
    """
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        read = gate_up + row * row_stride + columns
        gate = tl.load(read, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(read + width, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
        opened = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(activated + row * width + columns, opened.to(activated.dtype.element_ty), mask=inside)
