"""Rotary position embeddings (Su et al. 2021): pairs of a head's values turned by the angles of their position."""

import triton
import triton.language as tl


@triton.jit
def rope(
    states,
    cos,
    sin,
    turned,
    positions,
    length,
    heads,
    size,
    half,
    batch_stride,
    head_stride,
    position_stride,
    angle_batch_stride,
    angle_stride,
    NEIGHBOURS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """states [B, heads, length, size] by strides -> turned, contiguous; a position at a time.

    Program axis 1 is HEADS heads. The first 2 * half values of a head are turned: value i with value i + half, or,
    where NEIGHBOURS, value 2i with 2i + 1, written half apart. cos and sin [B or 1, length, 2 * half], whose halves are
    equal, so the first is read; angle_batch_stride is 0 for a batch of 1.
    """
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, HALF)[None, :]
    angle = tl.arange(0, HALF)
    inside = (head < heads) & (pair < half)
    for index in range(tl.program_id(0), positions, tl.num_programs(0)):
        batch = index // length
        position = index % length
        angles = batch * angle_batch_stride + position * angle_stride + angle
        c = tl.load(cos + angles, mask=angle < half, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + angles, mask=angle < half, other=0.0).to(tl.float32)[None, :]
        read = states + batch * batch_stride + position * position_stride + head * head_stride
        if NEIGHBOURS:
            first = tl.load(read + 2 * pair, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(read + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
        else:
            first = tl.load(read + pair, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(read + half + pair, mask=inside, other=0.0).to(tl.float32)
        write = turned + (batch * heads * length + position) * size + head * (length * size)
        tl.store(write + pair, (first * c - second * s).to(turned.dtype.element_ty), mask=inside)
        tl.store(write + half + pair, (second * c + first * s).to(turned.dtype.element_ty), mask=inside)


@triton.jit
def copy_tail(
    states,
    turned,
    positions,
    length,
    heads,
    size,
    start,
    batch_stride,
    head_stride,
    position_stride,
    HEADS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """As `rope` for the values of each head from `start` on, which partial rotary embeddings pass through."""
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    value = start + tl.arange(0, TAIL)[None, :]
    inside = (head < heads) & (value < size)
    for index in range(tl.program_id(0), positions, tl.num_programs(0)):
        batch = index // length
        position = index % length
        read = states + batch * batch_stride + position * position_stride + head * head_stride
        write = turned + (batch * heads * length + position) * size + head * (length * size)
        tl.store(write + value, tl.load(read + value, mask=inside, other=0.0), mask=inside)
