"""`porter align`: golden against candidate, module by module, and the cause where the numbers drift."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from porter.cli.emulation import EmulateOption, emulation
from porter.cli.output import JsonOption, emit, progress, say

ALIGNED, NOT_ALIGNED = 0, 1
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
PASSES = ("weights", "replay", "free", "all")


def align(
    golden: Annotated[Path, typer.Argument(help="Directory that `porter golden capture` wrote.")],
    candidate: Annotated[
        str,
        typer.Argument(help="Directory of `porter adapt`, checkpoint or ranks' shards, golden, or FILE.py:FUNCTION."),
    ],
    passes: Annotated[
        str, typer.Option("--pass", help="weights, replay, free or all (cheapest first).", show_default=True)
    ] = "all",
    modules: Annotated[str | None, typer.Option(help="Compare only modules whose name matches this regex.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML file.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the report as JUnit XML.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write the findings as SARIF 2.1.0, for CI.")] = None,
    correspondence: Annotated[
        Path | None, typer.Option(help="JSON list of entries that map the candidate's module names to the source's.")
    ] = None,
    layout: Annotated[
        Path | None, typer.Option(help="JSON list of rules: how the shards of ranks in CANDIDATE make up its weights.")
    ] = None,
    device: Annotated[str, typer.Option(help="Torch device to run the candidate on.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Precision of the candidate: auto, float32, bfloat16, float16.")] = "auto",
    factor: Annotated[float, typer.Option(help="How many times its own rounding floor a module may err.")] = 2.0,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Repeat over length, position, batch, padding, decode and chunked prefill."),
    ] = False,
    sweep_length: Annotated[
        int | None, typer.Option(help="With --sweep: the longest sequence (default: what a budget allows, up to 4097).")
    ] = None,
    also: Annotated[
        list[Path] | None, typer.Option(help="Another golden of the same tokens; several vote which of them is wrong.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that a checkpoint contains.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start anew instead of continuing a comparison that was interrupted.")
    ] = False,
    emulate: EmulateOption = False,
    json_output: JsonOption = False,
) -> int:
    """Compare CANDIDATE with GOLDEN module by module; name the first drift and its cause.

    Interrupted while it compares a directory, the same command continues where it was.

    Exit status 0: aligned. 1: drift, or too little compared to say. 2: bad input.

    Example: porter align golden port --html report.html
    """
    check_options(passes, dtype, factor, sweep, sweep_length, fresh, layout)
    check_goldens(golden, also or [], sweep)
    for path in (html, junit, sarif):
        check_output(path)
    from porter.alignment.align import align as compare
    from porter.alignment.journal import Resumption
    from porter.alignment.sweep import sweep as compare_in_regimes
    from porter.certificate import certify

    resumable = partial(compare, resumption=Resumption(fresh, say), also=also or (), layout=layout)
    compared = partial(compare_in_regimes, longest=sweep_length) if sweep else resumable
    with emulation(candidate, emulate), progress("aligning") as advance:
        report = compared(
            golden,
            candidate,
            passes=passes,
            modules=modules,
            correspondence=correspondence,
            device=device,
            dtype=None if dtype == "auto" else dtype,
            factor=factor,
            trust_remote_code=trust_remote_code,
            progress=advance,
        )
    result: dict[str, Any] = report.to_json()
    write_reports(result, html, junit, sarif)
    if passes == "all" and modules is None and not also and certify(Path(candidate), str(golden), result):
        say(f"entered into {candidate}/alignment.json")
    emit(result, json_output, lambda console: render(result, console))
    return ALIGNED if result["verdict"] == "aligned" else NOT_ALIGNED


def render(result: dict[str, Any], console: Console) -> None:
    """Print the report, and below it what a sweep tried."""
    from porter.alignment.report_sweep import print_sweep
    from porter.alignment.report_terminal import print_report

    print_report(result, console)
    if "sweep" in result:
        print_sweep(result["sweep"], console)


def check_options(
    passes: str,
    dtype: str,
    factor: float,
    sweep: bool,
    sweep_length: int | None,
    fresh: bool = False,
    layout: Path | None = None,
) -> None:
    """Refuse what cannot be done, before any work. Raises PorterError naming the option."""
    from porter.errors import PorterError

    if sweep_length is not None and not sweep:
        raise PorterError("--sweep-length: only with --sweep")
    if layout is not None and sweep:
        raise PorterError("--layout: not with --sweep, which puts no shards of ranks together")
    if fresh and sweep:
        raise PorterError("--fresh: not with --sweep, which always starts anew")
    if passes not in PASSES:
        raise PorterError(f"--pass: {passes!r} is no pass; choose one of {', '.join(PASSES)}")
    if dtype not in DTYPES:
        raise PorterError(f"--dtype: {dtype!r} is no precision to compare in; choose one of {', '.join(DTYPES)}")
    if not factor >= 1.0 or factor == float("inf"):
        raise PorterError(f"--factor: {factor:g} must be at least 1, since no module errs less than its own rounding")


def check_goldens(golden: Path, also: list[Path], sweep: bool) -> None:
    """Refuse further goldens that cannot vote, before any work. Raises PorterError naming the option."""
    from porter.errors import PorterError

    if also and sweep:
        raise PorterError("--also: not with --sweep, which records goldens of its own")
    for path in also:
        if path.resolve() == golden.resolve():
            raise PorterError(f"--also {path}: is GOLDEN itself; a golden cannot confirm itself")


def check_output(path: Path | None) -> None:
    """Refuse a report path that cannot be written, before the work whose result it is to hold."""
    from porter.errors import PorterError

    if path is None:
        return
    if path.is_dir():
        raise PorterError(f"{path}: is a directory; name a file to write the report to")
    if not path.parent.is_dir():
        raise PorterError(f"{path.parent}: no such directory; create it, or write the report elsewhere")


def write_reports(result: dict[str, Any], html: Path | None, junit: Path | None, sarif: Path | None = None) -> None:
    """Write the HTML, JUnit and SARIF files that were asked for, and say where they are."""
    from porter.alignment.report_html import html as to_html
    from porter.alignment.report_junit import junit as to_junit
    from porter.alignment.report_sarif import sarif as to_sarif

    for path, render in ((html, to_html), (junit, to_junit), (sarif, to_sarif)):
        if path is not None:
            path.write_text(render(result), encoding="utf-8")
            say(f"wrote {path}")
