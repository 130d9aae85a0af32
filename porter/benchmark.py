"""Time a ported model beside plain transformers: first token, later tokens, memory, distance to the roofline."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.generation import generate, refuse_not_finite
from porter.original import original_model

STREAM_BYTES = 256 << 20


@dataclass(frozen=True)
class Timing:
    """Seconds unless named otherwise; medians over the repeats. `peak_memory_bytes` is of the whole process so far."""

    label: str
    prompt_tokens: int
    new_tokens: int
    time_to_first_token: float
    time_per_output_token: float
    tokens_per_second: float
    peak_memory_bytes: int
    bytes_read_per_token: int | None = None
    memory_bandwidth: float | None = None
    share_of_roofline: float | None = None
    decode: str | None = None
    """How decode steps were run: "replayed", or "model" and why."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def stream_bandwidth(repeats: int = 5) -> float:
    """Bytes per second that this process reads from memory with its current thread count: best of a large sum."""
    buffer = torch.ones(STREAM_BYTES // 4)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - start)
    return STREAM_BYTES / best


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def time_port(
    label: str, model: nn.Module, input_ids: torch.Tensor, new_tokens: int, repeats: int, bytes_read: int | None
) -> Timing:
    """Time greedy generation of a ported `model` over its contiguous cache, after one warm-up."""
    first, later = [], []
    for repeat in range(repeats + 1):
        steps = list(generate(model, input_ids, new_tokens))
        if repeat:
            first.append(steps[0].seconds)
            later.append(statistics.median(step.seconds for step in steps[1:]))
    per_token = statistics.median(later)
    bandwidth = stream_bandwidth() if bytes_read else None
    share = bytes_read / bandwidth / per_token if bytes_read and bandwidth else None
    return Timing(
        label, input_ids.shape[1], new_tokens, statistics.median(first), per_token, 1 / per_token, peak_memory(),
        bytes_read, bandwidth, share, f"{steps[-1].way}: {steps[-1].refusal}".removesuffix(": "),
    )  # fmt: skip


def time_plain(label: str, model: Any, input_ids: torch.Tensor, new_tokens: int, repeats: int) -> Timing:
    """Time `model.generate`, plain transformers with its default cache, after one warm-up."""
    first, later = [], []
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(input_ids)
    with torch.inference_mode():
        refuse_not_finite(model(input_ids, use_cache=False, logits_to_keep=1).logits, label)
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        model.generate(input_ids, attention_mask=mask, max_new_tokens=1, min_new_tokens=1, **options)
        middle = time.perf_counter()
        model.generate(input_ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options)
        end = time.perf_counter()
        if repeat:
            first.append(middle - start)
            later.append((end - middle - (middle - start)) / (new_tokens - 1))
    per_token = statistics.median(later)
    timing = (statistics.median(first), per_token, 1 / per_token)
    return Timing(label, input_ids.shape[1], new_tokens, *timing, peak_memory())


def plain_models(directory: Path) -> dict[str, Any]:
    """The original checkpoint under plain transformers, in float32 and bfloat16."""
    return {
        name: original_model(directory, dtype)
        for name, dtype in (("transformers fp32", torch.float32), ("transformers bf16", torch.bfloat16))
    }
