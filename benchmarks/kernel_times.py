"""Times the CPU kernels against torch's: GB/s of weights or cache for decode, GFLOP/s for prefill.

    python benchmarks/kernel_times.py [--threads N] [--isa avx512|avx2|generic] [--seconds S]

Weights rotate over more memory than the last-level cache holds, so decode figures are of memory, not of cache. Each
figure is the best of many calls. With one thread the clock is this thread's CPU time, which other load on the machine
disturbs least; with more it is wall time and wants an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.cpu.variable_length import variable_length

COLD_BYTES = 1 << 28
DECODE_SHAPES = ((3072, 576), (576, 1536), (960, 576), (49152, 576), (4096, 4096))
PREFILL_SHAPES = ((8, 3072, 576), (16, 3072, 576), (64, 3072, 576), (256, 3072, 576), (256, 2048, 2048))
PATCHES = 1024
CACHES = ((9, 3, 64, 4096), (32, 8, 128, 4096))  # query heads, key heads, head size, keys


class Timer:
    """The best time of a call within a budget of seconds."""

    def __init__(self, threads: int, seconds: float) -> None:
        self.clock = time.thread_time if threads == 1 else time.perf_counter
        self.seconds = seconds

    def best(self, call: Callable[[], object]) -> float:
        """Seconds of the fastest of the calls made."""
        fastest, end = float("inf"), self.clock() + self.seconds
        while self.clock() < end:
            start = self.clock()
            call()
            fastest = min(fastest, self.clock() - start)
        return fastest

    def rotating(self, make: Callable[[], torch.Tensor], call: Callable[[torch.Tensor], object]) -> tuple[float, float]:
        """(seconds a call, GB/s of the tensor) with a different tensor each call."""
        first = make()
        size = first.numel() * first.element_size()
        tensors = [first, *(make() for _ in range(COLD_BYTES // size))]

        def all_once() -> None:
            for tensor in tensors:
                call(tensor)

        seconds = self.best(all_once) / len(tensors)
        return seconds, size / seconds / 1e9


def stream(timer: Timer) -> float:
    """GB/s of reading memory: the sum of 512 MiB of float32."""
    data = torch.ones(1 << 27)
    return data.numel() * 4 / timer.best(data.sum) / 1e9


def call_of(provider: CpuProvider, name: str, variant: str) -> Callable[..., torch.Tensor]:
    """The provider's kernel."""
    found = provider.implementation(name, variant)
    assert found is not None
    call: Callable[..., torch.Tensor] = found.call
    return call


def show(what: str, rows: dict[str, tuple[float, float]], unit: str) -> None:
    """One line: microseconds and rate of each implementation."""
    figures = (f"{name} {seconds * 1e6:8.1f} us {rate:6.1f} {unit}" for name, (seconds, rate) in rows.items())
    print(f"{what:34s}", "  ".join(figures), flush=True)


def decode(provider: CpuProvider, timer: Timer) -> None:
    """One row of activations against weights from memory."""
    for n, k in DECODE_SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            _decode_float(provider, timer, n, k, dtype)
        _decode_int8(provider, timer, n, k)


def _decode_float(provider: CpuProvider, timer: Timer, n: int, k: int, dtype: torch.dtype) -> None:
    ours, x = call_of(provider, "linear", "standard"), torch.randn(1, k).to(dtype)

    def make() -> torch.Tensor:
        return torch.randn(n, k).to(dtype)

    rows = {
        "porter": timer.rotating(make, lambda w: ours(x, w, None)),
        "torch": timer.rotating(make, lambda w: functional.linear(x, w)),
    }
    show(f"linear {n}x{k} {str(dtype)[6:]}", rows, "GB/s")


def _decode_int8(provider: CpuProvider, timer: Timer, n: int, k: int) -> None:
    w8a16, w8a8 = call_of(provider, "linear", "w8a16"), call_of(provider, "linear", "w8a8")
    x, scale = torch.randn(1, k).bfloat16(), torch.rand(n)
    half_scale = scale.bfloat16()

    def make() -> torch.Tensor:
        return torch.randint(-127, 128, (n, k), dtype=torch.int8)

    rows = {
        "w8a16": timer.rotating(make, lambda w: w8a16(x, w, scale, None)),
        "w8a8": timer.rotating(make, lambda w: w8a8(x, w, scale, None)),
        "torch": timer.rotating(make, lambda w: torch._weight_int8pack_mm(x, w, half_scale)),
    }
    show(f"linear {n}x{k} int8", rows, "GB/s")


def prefill(provider: CpuProvider, timer: Timer) -> None:
    """Many rows of activations: our blocked kernel, not the choice that the provider makes, against torch's."""
    for m, n, k in PREFILL_SHAPES:
        for code, dtype in enumerate((torch.float32, torch.bfloat16)):
            _prefill_float(provider, timer, m, n, k, dtype, code)
        x, scale = torch.randn(m, k).bfloat16(), torch.rand(n)
        w = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        rows = {}
        for variant in ("w8a16", "w8a8"):
            seconds = timer.best(partial(call_of(provider, "linear", variant), x, w, scale, None))
            rows[variant] = seconds, 2e-9 * m * n * k / seconds
        show(f"linear {m}x{n}x{k} int8", rows, "GFLOP/s")


def _prefill_float(provider: CpuProvider, timer: Timer, m: int, n: int, k: int, dtype: torch.dtype, code: int) -> None:
    x, w, out = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.empty(m, n, dtype=dtype)
    pointers = out.data_ptr(), x.data_ptr(), w.data_ptr(), None, None
    blocked = partial(provider.library.linear, *pointers, m, n, k, k, k, 0, code, code, torch.get_num_threads())
    calls: dict[str, Callable[[], object]] = {"porter": blocked, "torch": partial(functional.linear, x, w)}
    seconds = {name: timer.best(call) for name, call in calls.items()}
    rows = {name: (t, 2e-9 * m * n * k / t) for name, t in seconds.items()}
    show(f"linear {m}x{n}x{k} {str(dtype)[6:]}", rows, "GFLOP/s")


def attention(provider: CpuProvider, timer: Timer) -> None:
    """One query over a bfloat16 cache."""
    for heads, key_heads, size, keys in CACHES:
        _attention(provider, timer, heads, key_heads, size, keys)


def _attention(provider: CpuProvider, timer: Timer, heads: int, key_heads: int, size: int, keys: int) -> None:
    ours, query = call_of(provider, "attention", "gqa"), torch.randn(1, heads, 1, size).bfloat16()

    def make() -> torch.Tensor:
        return torch.randn(2, 1, key_heads, keys, size).bfloat16()

    def theirs(cache: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, cache[0], cache[1], enable_gqa=True)

    rows = {
        "porter": timer.rotating(make, lambda c: ours(query, c[0], c[1], None, 0.125, None)),
        "torch": timer.rotating(make, theirs),
    }
    show(f"attention {heads}/{key_heads}x{size} {keys} keys", rows, "GB/s")


def vision(provider: CpuProvider, timer: Timer) -> None:
    """Attention within segments of 1024 patches, 16 heads of 80: the kernel alone, and torch's once per segment."""
    pairs = PATCHES * PATCHES * 16 * 80 * 4
    for dtype, count in itertools.product((torch.float32, torch.bfloat16), (64, 16, 4, 1)):
        qkv = torch.randn(3, PATCHES, 16, 80).to(dtype)
        bounds = torch.arange(0, PATCHES + 1, PATCHES // count)
        seconds = {
            name: timer.best(partial(variable_length(provider.library, first), *qkv, bounds, 0.1))
            for name, first in (("porter", PATCHES + 1), ("torch", 0))
        }
        rows = {name: (each, pairs / count / each / 1e9) for name, each in seconds.items()}
        show(f"vision {count}x{PATCHES // count} {str(dtype).removeprefix('torch.')}", rows, "GFLOP/s")


def overhead(provider: CpuProvider, timer: Timer) -> None:
    """The cost of a call that does almost nothing."""
    norm, x, weight = call_of(provider, "rms_norm", "standard"), torch.ones(1, 64), torch.ones(64)
    seconds = timer.best(lambda: [norm(x, weight, 1e-6) for _ in range(100)]) / 100
    theirs = timer.best(lambda: [functional.rms_norm(x, (64,), weight, 1e-6) for _ in range(100)]) / 100
    print(f"rms_norm of 64 values: porter {seconds * 1e6:.2f} us, torch {theirs * 1e6:.2f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa")
    parser.add_argument("--seconds", type=float, default=0.3, help="budget of each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    provider, timer = CpuProvider(options.isa), Timer(options.threads, options.seconds)
    reason = provider.library.load()
    if reason is not None:
        raise SystemExit(reason)
    print(f"{provider.library.isa}, {options.threads} threads, memory read {stream(timer):.1f} GB/s")
    for part in (overhead, decode, prefill, attention, vision):
        part(provider, timer)


if __name__ == "__main__":
    with torch.no_grad():
        main()
