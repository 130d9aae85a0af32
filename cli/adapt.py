"""`porter adapt`: port a model to a chip."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from porter.cli.conversion import conversion
from porter.cli.output import JsonOption, emit, say
from porter.cli.plan_view import print_port

CONTEXT, BATCH = 8192, 16


def adapt(
    model: Annotated[str | None, typer.Argument(help="Preset, shipped model or checkpoint directory.")] = None,
    target: Annotated[str | None, typer.Option(help="Chip: a catalogue name or alias; see `porter chips`.")] = None,
    output: Annotated[Path | None, typer.Option(help="Directory to write.")] = None,
    scheme: Annotated[
        str | None, typer.Option(help="fp32, bf16, int8, w8a16, w8a8, w8a8_static, w4a8 or deepseek-w8a8.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="What is computed in: bf16 or fp32.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")] = False,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint to convert when MODEL has none.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size of a plan for Ascend.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert parallel size of a plan for Ascend.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of a sequence in a plan for Ascend.")] = CONTEXT,
    batch: Annotated[int, typer.Option(help="Sequences at once in a plan for Ascend.")] = BATCH,
    workers: Annotated[int, typer.Option(help="Conversion threads.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse an Op without a native provider.")] = False,
    calibration: Annotated[Path | None, typer.Option(help="Data for scales of activations: prompts or ids.")] = None,
    reference_only: Annotated[str, typer.Option(help="Ops to leave on the reference, comma-separated.")] = "",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the checkpoint's code.")] = False,
    allow_nonfinite: Annotated[bool, typer.Option(help="Convert NaN and Inf weights too.")] = False,
    written_as: Annotated[str, typer.Option("--format", help="porter, or ascend-v1 for vllm-ascend.")] = "porter",
    check: Annotated[
        Path | None, typer.Option(help="Check an AscendV1 directory, or a port to Ascend, and port nothing.")
    ] = None,
    json_output: JsonOption = False,
) -> int:
    """Port a model: match, plan, prove in float64, convert the weights, export a directory that runs.

    Example: porter adapt tiny-deepseek-v3 --target cpu --scheme int8 --output port
    """
    from porter.adaptation import adapt as run
    from porter.chips.catalogue import load_catalogue
    from porter.errors import PorterError
    from porter.plan_schemes import ported_as

    planning = {
        "--tp": tp not in (None, 1),
        "--ep": ep not in (None, 1),
        "--context": context != CONTEXT,
        "--batch": batch != BATCH,
    }
    porting = {"--reference-only": reference_only, **planning}
    if check is not None:
        written = {"MODEL": model, "--target": target, "--output": output, "--scheme": scheme, "--dtype": dtype}
        rest = {"--plan": plan, "--weights": weights, "--calibration": calibration}
        _refuse_unused("--check", {**written, **rest, "--format": written_as != "porter", **porting})
        from porter.cli.ascend_v1 import check_command

        return check_command(check, strict=strict, trust_remote_code=trust_remote_code, json_output=json_output)
    if model is None or target is None:
        raise PorterError("name MODEL and --target CHIP; `porter models` and `porter chips` list them")
    if workers < 1:
        raise PorterError(f"--workers {workers}: must be at least 1")
    if written_as == "ascend-v1":
        _refuse_unused("--format ascend-v1", {"--strict": strict, **porting})
        from porter.cli.ascend_v1 import write_command

        return write_command(
            model,
            target,
            output,
            plan=plan,
            json_output=json_output,
            workers=workers,
            allow_nonfinite=allow_nonfinite,
            calibration=calibration,
            scheme=scheme,
            dtype=dtype,
            weights=weights,
            trust_remote_code=trust_remote_code,
        )
    if written_as != "porter":
        raise PorterError(f"--format {written_as}: is not written; choose porter or ascend-v1")
    planned = _plans_cards(target, plan, planning)
    with conversion() as converted:
        port = run(
            model,
            target,
            scheme=ported_as(scheme, load_catalogue().get(target)) if planned else scheme,
            dtype=dtype,
            output=output,
            weights=weights,
            plan=plan,
            calibration=calibration,
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
    if planned:
        from porter.plan_deployment import plan_deployment
        from porter.plan_memory import Load

        say("planning its cards ...")
        result["deployment"] = plan_deployment(port, scheme, Load(context, batch), tp, ep).to_json()
    emit(result, json_output, lambda console: _render(console, result))
    return 0 if not result.get("deployment") or result["deployment"]["possible"] else 1


def _refuse_unused(by: str, given: dict[str, Any]) -> None:
    """Raise PorterError for options that `by` has no use for, and that would say nothing where they were taken."""
    from porter.errors import PorterError

    unused = [name for name, value in given.items() if value not in (None, False, "")]
    if unused:
        raise PorterError(f"{by}: has no use for {', '.join(unused)}; leave {'it' if len(unused) == 1 else 'them'} out")


def _plans_cards(target: str, plan: bool, planning: dict[str, Any]) -> bool:
    """Whether the cards of a port to Ascend are to be planned. Raises PorterError where sizes are given for naught."""
    from porter.chips.catalogue import load_catalogue
    from porter.errors import PorterError

    planned = plan and load_catalogue().get(target).device == "npu"
    if not planned and any(planning.values()):
        raise PorterError(
            "--tp and --ep, --context and --batch: only plans for Ascend have them (--target ascend --plan); ports "
            "run on one card"
        )
    return planned


def _render(console: Console, result: dict[str, Any]) -> None:
    print_port(console, result)
    if result["output"]:
        console.print(f"written: {result['output']}")
