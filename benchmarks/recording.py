"""What recording costs: a forward alone against the same forward recorded as statistics, sketches and whole tensors.

    python benchmarks/recording.py [--model qwen3-8x512 | llama-135m] [--tokens 128] [--threads 1] [--rounds 15]

Prints the median of interleaved rounds, the ratio to the plain forward, and the size of the golden. The hooks are
attached before and removed after the timed forward; weights are not stored.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from porter.golden.format import DETAILS
from porter.golden.recorder import attached, header
from porter.golden.writer import Writer


def qwen3_8x512() -> nn.Module:
    """Qwen3 with 8 layers, hidden 512, vocabulary 4096, random weights: 29 M parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, tie_word_embeddings=False, attn_implementation="eager",
        )
    )  # fmt: skip


def llama_135m() -> nn.Module:
    """Llama with 30 layers, hidden 576, vocabulary 49152, random weights: 135 M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"qwen3-8x512": qwen3_8x512, "llama-135m": llama_135m}


def recorded(model: nn.Module, tokens: torch.Tensor, detail: str) -> tuple[float, int]:
    """Seconds of one recorded forward, and the bytes of its golden."""
    with tempfile.TemporaryDirectory() as directory:
        writer = Writer(Path(directory) / "golden", header(model, detail, None, None, False))
        with attached(model, writer):
            start = time.perf_counter()
            model(input_ids=tokens, use_cache=False)
            seconds = time.perf_counter() - start
        return seconds, sum(file.stat().st_size for file in writer.path.iterdir())


def plain(model: nn.Module, tokens: torch.Tensor) -> float:
    """Seconds of one forward without hooks."""
    start = time.perf_counter()
    model(input_ids=tokens, use_cache=False)
    return time.perf_counter() - start


def main() -> None:
    """Run the benchmark and print one line per level of detail."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-8x512")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = MODELS[options.model]().eval()
    tokens = torch.randint(0, 4096, (1, options.tokens))
    times: dict[str, list[float]] = {name: [] for name in ("plain", *DETAILS)}
    sizes = dict.fromkeys(DETAILS, 0)
    with torch.no_grad():
        for turn in range(options.rounds + 1):
            times["plain"].append(plain(model, tokens))
            for detail in DETAILS:
                seconds, sizes[detail] = recorded(model, tokens, detail)
                times[detail].append(seconds)
            if turn == 0:
                for values in times.values():
                    values.clear()
    base = statistics.median(times["plain"])
    modules = sum(1 for _ in model.modules())
    print(f"{options.model}: {modules} modules, {options.tokens} tokens, {options.threads} threads, plain {base:.4f} s")
    for detail in reversed(DETAILS):
        middle = statistics.median(times[detail])
        print(f"{detail:8} {middle:.4f} s  {middle / base:5.2f}x  {sizes[detail] / 1e6:8.2f} MB")


if __name__ == "__main__":
    main()
