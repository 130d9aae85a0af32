"""What recording costs: a forward alone against the same forward recorded as statistics, sketches and whole tensors.

    python benchmarks/recording [--model qwen3-8x512 | llama-135m | DIRECTORY] [--dtype float32] [--tokens 128]
                                [--threads 1] [--rounds 15] [--msprobe PYTHON]

Rounds are interleaved: in each, every variant runs once. Prints the smallest wall and processor time of each, their
ratios to the plain forward, and the bytes written. The processor time is that of the whole process, so work that other
threads do is in it. The hooks are attached before and removed after the timed forward; weights are not stored.
`--msprobe` names the Python of an environment that holds torch, transformers and mindstudio-probe: msprobe then dumps
the same model (level L0, forward) in processes of its own, round by round beside porter.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from rounds import Rounds
from timed_models import build
from torch import nn

from porter.golden.format import DETAILS
from porter.golden.native import measured_by
from porter.golden.recorder import attached, header
from porter.golden.writer import Writer

PLAIN = "plain"
MSPROBE_TASKS = ("statistics", "tensor")


def recorded(model: nn.Module, tokens: torch.Tensor, detail: str, rounds: Rounds) -> None:
    """One recorded forward."""
    with tempfile.TemporaryDirectory() as directory:
        writer = Writer(Path(directory) / "golden", header(model, detail, None, None, False))
        with attached(model, writer):
            with rounds.timed(detail):
                model(input_ids=tokens, use_cache=False)
        rounds.sizes[detail] = sum(file.stat().st_size for file in writer.path.iterdir())


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8x512")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--msprobe", metavar="PYTHON")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print a line per variant."""
    asked = options()
    torch.set_num_threads(asked.threads)
    model, tokens = build(asked.model, asked.dtype, asked.tokens)
    rounds = Rounds()
    others = [_msprobe(asked, task) for task in MSPROBE_TASKS if asked.msprobe is not None]
    with torch.no_grad():
        for turn in range(asked.rounds + 1):
            with rounds.timed(PLAIN):
                model(input_ids=tokens, use_cache=False)
            for detail in DETAILS:
                recorded(model, tokens, detail, rounds)
            if turn == 0:
                rounds.forget()
            for other in others:
                _round(other)
    modules = sum(1 for _ in model.modules())
    print(f"{asked.model} {asked.dtype}: {modules} modules, {asked.tokens} tokens, {asked.threads} threads")
    print(f"measured by {measured_by()}, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}")
    print("\n".join(rounds.table(PLAIN, "porter")))
    for other in others:
        print(other.communicate("end\n")[0], end="")


def _round(other: subprocess.Popen[str]) -> None:
    assert other.stdin is not None and other.stdout is not None, "opened as pipes"
    other.stdin.write("round\n")
    other.stdin.flush()
    if other.stdout.readline() != "done\n":
        raise SystemExit("msprobe failed: run msprobe_dump.py with its Python to see why")


def _msprobe(asked: argparse.Namespace, task: str) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("msprobe_dump.py")
    arguments = [task, asked.model, asked.dtype, str(asked.tokens), str(asked.threads)]
    return subprocess.Popen(
        [asked.msprobe, str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


if __name__ == "__main__":
    main()
