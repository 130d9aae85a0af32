"""How many drafted tokens a model accepts, and what a step with drafts costs: `python benchmarks/speculation.py`.

Prompts are windows of the chapters that the shipped models were not trained on. Times are CPU time on one thread, for
each prompt the best of several interleaved runs of each kind; the text of every kind is compared with plain decoding's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import porter
from porter.decode_program import model_step
from porter.generation import generate
from porter.kv_cache import cache_for
from porter.models.shipped.train import read_text
from porter.prediction_layer import load_prediction_layer
from porter.speculation import generate_speculatively

MODELS = ("tiny-deepseek-v3-mtp", "tiny-qwen3-next")
DRAFTS = (1, 2, 3)
Run = Callable[[torch.Tensor], tuple[torch.Tensor, tuple[int, int, int]]]


@dataclass
class Total:
    """Sums over prompts: seconds; steps, drafted and accepted tokens; prompts whose text is plain decoding's."""

    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    same: int = 0


def prompts(count: int, length: int, bos: int | None) -> Iterator[torch.Tensor]:
    """Windows [1, length] of the held-out chapters, evenly apart, each after BOS where the model has one."""
    _, held_out = read_text()
    first = torch.tensor([] if bos is None else [bos], dtype=torch.int64)
    for start in torch.linspace(0, len(held_out) - length, count).long().tolist():
        yield torch.cat((first, held_out[start : start + length - len(first)]))[None]


def runs(model: Any, layer: Any, count: int) -> dict[str, Run]:
    """Ways to generate `count` tokens: each gives tokens [count] and (steps, drafted, accepted); plain comes first."""

    def replayed(prompt: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        return torch.cat([step.tokens for step in generate(model, prompt, count)]), (count, 0, 0)

    def through_the_model(prompt: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        cache, tokens, found = cache_for(model.config, prompt.shape[1] + count), prompt, []
        with torch.inference_mode():
            for _ in range(count):
                tokens = model_step(model, cache, tokens)[:, -1].argmax(-1, keepdim=True)
                found.append(tokens[0])
        return torch.cat(found), (count, 0, 0)

    def speculative(drafts: int, prompt: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        steps = list(generate_speculatively(model, layer, prompt, count, drafts=drafts))
        drafted, accepted = (sum(getattr(s, name) for s in steps) for name in ("drafted", "accepted"))
        return torch.cat([s.tokens[0] for s in steps]), (len(steps), drafted, accepted)

    ways: dict[str, Run] = {"plain, replayed": replayed, "plain, through the model": through_the_model}
    return ways | {f"{drafts} drafted": partial(speculative, drafts) for drafts in DRAFTS}


def measure(ways: dict[str, Run], texts: list[torch.Tensor], repeats: int) -> dict[str, Total]:
    """The totals of each way over all prompts."""
    totals = {name: Total() for name in ways}
    for prompt in texts:
        best = dict.fromkeys(ways, float("inf"))
        plain: torch.Tensor | None = None
        for repeat in range(repeats):
            for name, run in ways.items():
                start = time.process_time()
                tokens, counts = run(prompt)
                best[name] = min(best[name], time.process_time() - start)
                plain = tokens if plain is None else plain
                if not repeat:
                    totals[name].same += torch.equal(tokens, plain)
                    totals[name].counts = [a + b for a, b in zip(totals[name].counts, counts, strict=True)]
        for name, seconds in best.items():
            totals[name].seconds += seconds
    return totals


def main() -> None:
    """Reads the command line, measures, and prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=MODELS[0], choices=MODELS)
    parser.add_argument("--scheme", default="fp32", help="fp32, bf16, w8a16 or w8a8")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "port"
        porter.adapt(arguments.model, scheme=arguments.scheme, output=directory)
        model = porter.load(directory)
        layer = load_prediction_layer(directory, model)
    texts = list(prompts(arguments.prompts, arguments.prompt_length, model.config.bos_token_id))
    generated = arguments.prompts * arguments.new_tokens
    for name, total in measure(runs(model, layer, arguments.new_tokens), texts, arguments.repeats).items():
        steps, drafted, accepted = total.counts
        share = f"{accepted} of {drafted} accepted ({accepted / drafted:.1%})" if drafted else ""
        print(
            f"{arguments.scheme}  {name:26s}{generated / total.seconds:7.0f} tokens/s  {generated / steps:.2f} a step  "
            f"same text {total.same}/{arguments.prompts}  {share}"
        )


if __name__ == "__main__":
    main()
