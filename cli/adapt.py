"""`porter adapt`: port a model to a chip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from porter.cli.output import JsonOption, emit, progress, say


def adapt(
    model: Annotated[str, typer.Argument(help="Preset, shipped model or checkpoint directory.")],
    target: Annotated[str, typer.Option(help="Chip: a catalogue name or alias; see `porter chips`.")],
    output: Annotated[Path | None, typer.Option(help="Directory to write.")] = None,
    scheme: Annotated[str | None, typer.Option(help="fp32, bf16, int8, w8a16 or w8a8.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What is computed in: bf16 or fp32.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")] = False,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint to convert when MODEL has none.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel size; only 1 is ported.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel size; only 1 is ported.")] = 1,
    workers: Annotated[int, typer.Option(help="Conversion threads.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse an Op without a native provider.")] = False,
    calibration: Annotated[Path | None, typer.Option(help="Calibration file; no scheme here needs one.")] = None,
    reference_only: Annotated[str, typer.Option(help="Ops to leave on the reference, comma-separated.")] = "",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the checkpoint's code.")] = False,
    allow_nonfinite: Annotated[bool, typer.Option(help="Convert NaN and Inf weights too.")] = False,
    json_output: JsonOption = False,
) -> int:
    """Port a model: match, plan, prove in float64, convert the weights, export a directory that runs.

    Example: porter adapt tiny-deepseek-v3 --target cpu --scheme int8 --output port
    """
    from porter.adaptation import adapt as run
    from porter.errors import PorterError

    if tp != 1 or ep != 1:
        raise PorterError("--tp and --ep: parallel layouts are not ported yet; only 1 is")
    if calibration is not None:
        raise PorterError("--calibration: no scheme of this target takes calibration data; leave it out")
    if workers < 1:
        raise PorterError(f"--workers {workers}: must be at least 1")
    with _conversion() as converted:
        port = run(
            model,
            target,
            scheme=scheme,
            dtype=dtype,
            output=output,
            weights=weights,
            plan=plan,
            strict=strict,
            workers=workers,
            reference_only=tuple(filter(None, reference_only.split(","))),
            allow_nonfinite=allow_nonfinite,
            trust_remote_code=trust_remote_code,
            notify=say,
            progress=converted,
        )
    result: dict[str, Any] = {
        "plan": port.plan.to_json(),
        "proof": port.source.proof.errors,
        "unproven": port.source.proof.skipped,
        "output": str(port.directory) if port.directory else None,
    }
    emit(result, json_output, lambda console: _render(console, result))
    return 0


@contextlib.contextmanager
def _conversion() -> Iterator[Callable[[int, int, str], None]]:
    """Progress of a conversion, shown from its first report on, which says how many bytes there are."""
    with contextlib.ExitStack() as shown:
        advance: Callable[[int], None] | None = None
        before = 0

        def converted(done: int, total: int, name: str) -> None:
            nonlocal advance, before
            if advance is None:
                advance = shown.enter_context(progress("converting, bytes", total))
            advance(done - before)
            before = done

        yield converted


def _render(console: Console, result: dict[str, Any]) -> None:
    plan = result["plan"]
    console.print(f"{plan['model_type']} on {plan['chip']}, scheme {plan['scheme']}")
    table = Table("class", "rewrite", "variant", "float64 error")
    for row in plan["ported"]:
        table.add_row(row["class"], row["rewrite"], row["variant"], f"{row['proof_error']:.1e}")
    console.print(table)
    for name, reason in plan["left"].items():
        console.print(f"left as upstream: {name} ({reason})", markup=False)
    ops = Table("op", "variant", "provider", "evidence", "refused")
    for op in plan["ops"]:
        ops.add_row(op["op"], op["variant"], op["provider"], op["evidence"], "; ".join(op["refused"]))
    console.print(ops)
    proof = ", ".join(f"{part} {error:.1e}" for part, error in result["proof"].items())
    console.print(f"float64 proof of the whole model at reduced width: {proof}")
    for part, reason in result["unproven"].items():
        console.print(f"not proven: {part}, which upstream itself cannot run ({reason})", markup=False)
    console.print(
        f"{plan['parameters']:,} parameters, {plan['weight_bytes'] / 1e9:.3g} GB of weights, "
        f"{plan['kv_bytes_per_token']:,} bytes of cache per token, "
        + (f"{plan['state_bytes']:,} of state per sequence, " if plan["state_bytes"] else "")
        + f"{plan['bytes_read_per_token'] / 1e6:.4g} MB read per token"
    )
    if plan["tokens_per_second"]:
        console.print(f"memory-bound limit at batch 1: {plan['tokens_per_second']:.4g} tokens/s")
    if result["output"]:
        console.print(f"written: {result['output']}")
