"""`make demo`: port a small DeepSeek-V3 to this CPU, prove it aligned, break one layer, and find the fault."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule

from porter.cli.app import NO_LIBRARY_BARS, guarded
from porter.cli.output import console

if TYPE_CHECKING:
    from porter.golden.store import Golden

MODEL = "tiny-deepseek-v3"
PROMPT = "She had been forced into prudence in her youth, "
NEW_TOKENS = 4
FAULTY_MODULE = "model.layers.2.self_attn"


def main() -> None:
    """Run the demonstration and exit with 0 when it showed what it promises."""
    os.environ.setdefault(*NO_LIBRARY_BARS)
    sys.exit(guarded(lambda: demonstrate(console(sys.stdout)), debug="--debug" in sys.argv))


def demonstrate(screen: Console) -> int:
    """Port, generate, record, align; then plant a fault and align again. Returns 1 if a verdict is not as expected."""
    with tempfile.TemporaryDirectory(prefix="porter-demo-") as folder:
        port, golden = Path(folder) / "port", Path(folder) / "golden"
        _say(screen, f"porter adapt {MODEL} --target cpu --output port")
        _port(screen, port)
        _say(screen, f'porter golden capture {MODEL} --output golden --prompt "..." --new-tokens {NEW_TOKENS}')
        recorded = _capture(screen, golden)
        _say(screen, "porter align golden port")
        right = _align(screen, recorded, port)
        _say(screen, f"now with a fault: {FAULTY_MODULE} rotates halves where DeepSeek interleaves")
        wrong = _align(screen, recorded, _faulty(port))
    shown = right["verdict"] == "aligned" and right["first_drift"] is None and _is_found(wrong)
    screen.print()
    verdict = "Aligned when right; module and cause named when wrong." if shown else "That is not what was expected."
    screen.print(verdict)
    return 0 if shown else 1


def _port(screen: Console, output: Path) -> None:
    import porter
    from porter.generation import generate
    from porter.tokenization import encode, tokenizer_of

    start = time.perf_counter()
    ported = porter.adapt(MODEL, target="cpu", output=output)
    classes = ", ".join(row["class"] for row in ported.plan.ported)
    screen.print(f"ported and proven in float64 in {time.perf_counter() - start:.1f} s: {classes}", markup=False)
    tokenizer = tokenizer_of(output)
    tokens = [int(step.tokens[0]) for step in generate(porter.load(output), encode(tokenizer, PROMPT), 60)]
    screen.print(f"{PROMPT}[bold]{tokenizer.decode(tokens)}[/bold]")


def _capture(screen: Console, path: Path) -> Golden:
    import porter
    from porter.golden.source import device_of, load_source, source_directory
    from porter.tokenization import encode, tokenizer_of

    directory = source_directory(MODEL)
    source = load_source(directory, "auto", device_of("cpu"), False)
    golden = porter.capture(source, encode(tokenizer_of(directory), PROMPT), path, NEW_TOKENS)
    screen.print(f"{len(golden.records)} module calls recorded from transformers' own code", markup=False)
    return golden


def _align(screen: Console, golden: Golden, candidate: Any) -> dict[str, Any]:
    import porter
    from porter.alignment.report_terminal import print_report

    report = porter.align(golden, candidate).to_json()
    print_report(report, screen)
    return dict(report)


def _faulty(port: Path) -> Any:
    import porter
    from porter.kernels.dispatch import OpCall

    model = porter.load(port)
    model.get_submodule(FAULTY_MODULE).rope = OpCall("rope", "half")
    return model


def _is_found(report: dict[str, Any]) -> bool:
    """Whether the first drift and the leading cause are the planted fault, and nothing else."""
    first, causes = report["first_drift"] or {}, report["causes"]
    where = first.get("module"), causes[0]["module"] if causes else None
    return where == (FAULTY_MODULE, FAULTY_MODULE) and causes[0]["kind"] == "rope-style"


def _say(screen: Console, line: str) -> None:
    screen.print()
    screen.print(Rule(line, align="left", style="dim"))


if __name__ == "__main__":
    main()
