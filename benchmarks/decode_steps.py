"""One decode step through the model against the same step replayed, on a directory that `porter adapt` wrote.

python benchmarks/decode_steps.py smollm2-int8 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import porter
from porter.decode_program import model_step
from porter.decoder import Decoder
from porter.kv_cache import contiguous_cache

PROMPT = torch.tensor([[1, 5, 7, 9]])


def timed(step: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor, steps: int) -> list[float]:
    """Seconds of each of `steps` greedy steps, of the steps alone."""
    seconds = []
    for _ in range(steps):
        tokens = logits[:, -1].argmax(-1)[:, None]
        start = time.perf_counter()
        logits = step(tokens)
        seconds.append(time.perf_counter() - start)
    return seconds


def measure(model: nn.Module, steps: int) -> None:
    """Print the median step of both ways; SystemExit where steps of this model are not replayed."""
    layers = int(model.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    with torch.inference_mode():
        for way in ("model", "replayed"):
            cache = contiguous_cache(layers, PROMPT.shape[1] + steps + 2)
            logits = model_step(model, cache, PROMPT)
            if way == "model":
                seconds = timed(lambda tokens, cache=cache: model_step(model, cache, tokens), logits, steps)
            else:
                decode = Decoder(model, cache, steps)
                seconds = timed(decode, logits, steps + 2)[2:]
                if decode.way != way:
                    raise SystemExit(f"steps are not replayed: {decode.refusal}")
            print(f"{way:9} median {statistics.median(seconds) * 1e3:.2f} ms, least {min(seconds) * 1e3:.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measure(porter.load(arguments.directory), arguments.steps)
