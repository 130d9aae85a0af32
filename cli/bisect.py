"""`porter bisect`: which kernels and modules of a port, put back, restore the golden's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from porter.cli.output import JsonOption, emit, progress

NOTHING_TO_RESTORE, DIFFERS = 0, 1
LISTED_AT_MOST = 12


def bisect(
    golden: Annotated[Path, typer.Argument(help="Directory that `porter golden capture` wrote.")],
    candidate: Annotated[
        str, typer.Argument(help="Directory of `porter adapt`, checkpoint directory, or FILE.py:FUNCTION.")
    ],
    correspondence: Annotated[
        Path | None, typer.Option(help="JSON list of entries that map the candidate's module names to the source's.")
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device to run the candidate on.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Precision of the candidate: auto, float32, bfloat16, float16.")] = "auto",
    factor: Annotated[float, typer.Option(help="How many times the rounding noise the logits may err.")] = 2.0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that a checkpoint contains.")
    ] = False,
    json_output: JsonOption = False,
) -> int:
    """Find which replaced kernels and modules, put back, restore the golden's tokens.

    Exit status 0: the candidate gives the golden's tokens as it is. 1: it does not. 2: bad input.

    Example: porter bisect golden port
    """
    from porter.cli.align import check_options

    check_options("all", dtype, factor, False, None)
    from porter.alignment.bisect import bisect as search

    with progress("bisecting") as advance:
        found = search(
            golden,
            candidate,
            factor=factor,
            correspondence=correspondence,
            device=device,
            dtype=None if dtype == "auto" else dtype,
            trust_remote_code=trust_remote_code,
            progress=advance,
        )
    result = found.to_json()
    emit(result, json_output, lambda console: render(result, console))
    return NOTHING_TO_RESTORE if found.matches else DIFFERS


def render(result: Mapping[str, Any], console: Console) -> None:
    """Print the headline, the logits before and after, and what was put back."""
    verdict, style = ("MATCHES", "bold green") if result["matches"] else ("DIFFERS", "bold red")
    console.print(Text.assemble((verdict, style), "  ", result["says"]), soft_wrap=True)
    console.print()
    limit = f"KL mean {result['limit']['kl_mean']:.3g}, max {result['limit']['kl_max']:.3g}"
    for label, text in (
        ("candidate", _tokens(result["baseline"])),
        ("put back", _tokens(result["restored"]) if result["parts"] else ""),
        ("rounding", f"explains up to {limit}"),
        ("runs", str(result["runs"])),
    ):
        if text:
            console.print(Text.assemble((f"{label:<14}", "bold"), text), soft_wrap=True)
    if result["limit"]["unmeasured"]:
        why = f"in one precision alone, in the other the source fails: {result['limit']['unmeasured']}"
        console.print(Text(f"  rounding is measured {why}", "yellow"), soft_wrap=True)
    for name, why in list(result["not_runnable"].items())[:LISTED_AT_MOST]:
        console.print(Text(f"  cannot run with {name or 'nothing'} put back: {why}", "dim"), soft_wrap=True)


def _tokens(tokens: Mapping[str, Any] | None) -> str:
    if tokens is None:
        return "raises"
    first = tokens["first_divergence"]
    diverges = "no divergence" if first is None else f"first divergence at token {first}"
    kl = f"KL mean {tokens['kl_mean']:.3g}, max {tokens['kl_max']:.3g}"
    return f"{kl}, top-1 agreement {tokens['top1_agreement']:.2%} of {tokens['compared']}, {diverges}"
