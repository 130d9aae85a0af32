"""Times the kernels of gated delta nets against transformers' eager code, and measures what a rounded state costs.

    python benchmarks/delta_net.py [--threads N] [--seconds S] [--prompt TOKENS] [--steps N]

The layer is Qwen3-Next-80B's: 16 key and 32 value heads of 128, 8192 convolution channels, in bfloat16. Decoding is
one token of one sequence over a float32 state; states rotate over more memory than the last-level cache holds, as a
model's layers do. A figure is the best of many calls, taken in turns; with one thread the clock is the thread's CPU
time. The error of a state is that of the output against a float64 recurrence on the same bfloat16 inputs, after N
decode steps, where the state is stored in float32 (porter, upstream) or rounded to bfloat16 after each step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.models.qwen3_next import modeling_qwen3_next as upstream
from transformers.utils import logging

from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.reference.delta_rule import gated_delta_rule_recurrent

KEY_HEADS, HEADS, SIZE, CHANNELS, KERNEL = 16, 32, 128, 8192, 4
COLD_BYTES = 1 << 28
Clock = Callable[[], float]
Call = Callable[[], object]


def draw(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Activations of one layer for `tokens` tokens: unit-variance projections, decays of trained size."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rates = torch.rand(HEADS, generator=generator) * 15.99 + 0.01
    decay = -0.05 * rates * torch.nn.functional.softplus(normal(1, tokens, HEADS) - 1)
    return {
        "query": normal(1, tokens, KEY_HEADS, SIZE).bfloat16(),
        "key": normal(1, tokens, KEY_HEADS, SIZE).bfloat16(),
        "value": normal(1, tokens, HEADS, SIZE).bfloat16(),
        "decay": decay,
        "beta": normal(1, tokens, HEADS).sigmoid(),
    }


def states() -> Iterator[torch.Tensor]:
    """Recurrent states, a different one each time, over `COLD_BYTES` of memory."""
    kept = [torch.randn(1, HEADS, SIZE, SIZE) * 0.1 for _ in range(COLD_BYTES // (4 * HEADS * SIZE * SIZE))]
    while True:
        yield from kept


def in_turns(calls: dict[str, Call], clock: Clock, seconds: float) -> dict[str, float]:
    """Seconds of the fastest run of each call, run in turns for `seconds` in all."""
    best = dict.fromkeys(calls, float("inf"))
    end = clock() + seconds
    while clock() < end or float("inf") in best.values():
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
    return best


def kernel(name: str, variant: str) -> Callable[..., Any]:
    """The CPU kernel of an Op. Raises RuntimeError where it cannot be built."""
    provider = CpuProvider()
    reason = provider.library.load()
    found = provider.implementation(name, variant)
    if reason is not None or found is None:
        raise RuntimeError(reason or f"no kernel for {name}/{variant}")
    return found.call


def rule_calls(tokens: int) -> dict[str, Call]:
    """porter's and upstream's delta rule over `tokens` tokens, continuing from a state."""
    inputs, rotating = draw(tokens), states()
    ours = kernel("gated_delta_rule", "recurrent" if tokens == 1 else "chunked")
    theirs = upstream.torch_recurrent_gated_delta_rule if tokens == 1 else upstream.torch_chunk_gated_delta_rule
    positional = list(inputs.values())
    return {
        "porter": lambda: ours(*positional, next(rotating)),
        "upstream": lambda: theirs(
            *positional[:3], g=positional[3], beta=positional[4], initial_state=next(rotating),
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        ),
    }  # fmt: skip


def convolution_calls(tokens: int) -> dict[str, Call]:
    """porter's and upstream's convolution over `tokens` tokens, continuing from a state."""
    x, weight = torch.randn(1, tokens, CHANNELS).bfloat16(), torch.randn(CHANNELS, KERNEL).bfloat16()
    state = torch.randn(1, CHANNELS, KERNEL).bfloat16()
    ours, turned = kernel("causal_conv1d", "silu"), x.transpose(1, 2)
    return {
        "porter": lambda: ours(x, weight, None, state),
        "upstream": lambda: (
            upstream.causal_conv1d_update(turned, state, weight, None, "silu")
            if tokens == 1
            else upstream.causal_conv1d_fn(torch.cat((state, turned), -1), weight, None, activation="silu")
        ),
    }


def state_errors(steps: int) -> dict[str, list[float]]:
    """Relative errors of the output at 1, 10, 100, ... steps for each way of storing the state."""
    inputs = list(draw(steps, seed=1).values())
    query, key, value, decay, beta = (t.double() for t in inputs)
    exact, _ = gated_delta_rule_recurrent(query, key, value, decay, beta, None)
    ours, marks = kernel("gated_delta_rule", "recurrent"), [10**n for n in range(8) if 10**n <= steps]
    kept: dict[str, torch.Tensor | None] = {"porter, float32": None, "porter, rounded to bfloat16": None}
    errors: dict[str, list[float]] = {name: [] for name in (*kept, "upstream, float32")}
    theirs: torch.Tensor | None = None
    for t in range(steps):
        # float32 copies of the bfloat16 inputs, so that the output is not rounded and shows the state alone.
        piece = [tensor[:, t : t + 1].float() for tensor in inputs]
        outputs = {}
        for name in kept:
            outputs[name], state = ours(*piece, kept[name])
            kept[name] = state.bfloat16().float() if "bfloat16" in name else state
        outputs["upstream, float32"], theirs = upstream.torch_recurrent_gated_delta_rule(
            *piece[:3], g=piece[3], beta=piece[4], initial_state=theirs, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        if t + 1 in marks:
            wanted = exact[:, t : t + 1]
            for name, output in outputs.items():
                errors[name].append(float((output.double() - wanted).norm() / wanted.norm()))
    return errors


def main() -> None:
    """Reads the command line and prints one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="to spend on each pair")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--steps", type=int, default=1000, help="decode steps for the error of the state")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    with torch.inference_mode():
        for tokens in (1, arguments.prompt):
            for name, calls in (("delta rule", rule_calls(tokens)), ("convolution", convolution_calls(tokens))):
                best = in_turns(calls, clock, arguments.seconds)
                ratio = best["upstream"] / best["porter"]
                print(
                    f"{name:12s} {tokens:5d} tokens: porter {best['porter'] * 1e3:9.3f} ms, "
                    f"upstream {best['upstream'] * 1e3:9.3f} ms, {ratio:.1f} times"
                )
        for name, errors in state_errors(arguments.steps).items():
            print(f"error after 1, 10, 100, ... steps, {name}: {', '.join(f'{e:.1e}' for e in errors)}")


if __name__ == "__main__":
    main()
