"""`porter adapt --format ascend-v1` and `porter adapt --check`: checkpoints that vllm-ascend loads."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from porter.checkpoint.strict_json import shown
from porter.cli.conversion import conversion
from porter.cli.output import emit, progress, say

SHOWN = 5
"""Findings of one rule that are printed; --json has all of them."""


def write_command(
    model: str,
    target: str,
    output: Path | None,
    *,
    plan: bool,
    json_output: bool,
    workers: int,
    allow_nonfinite: bool,
    calibration: Path | None,
    **options: Any,
) -> int:
    """Write MODEL as AscendV1 into `output`, or print what would be written. The exit status."""
    from porter.adaptation import refuse_occupied
    from porter.ascend_v1.scheme import static_linears
    from porter.ascend_v1.writer import plan_ascend_v1, write_ascend_v1
    from porter.errors import PorterError

    if output is None and not plan:
        raise PorterError("--output is missing: name the directory to write, or pass --plan to stop before it")
    if output is not None and not plan:
        refuse_occupied(output)
    _check_chip(target)
    measure = None if calibration is None else _measured(calibration)
    planned = plan_ascend_v1(model, calibration=measure, **options)
    if measure is not None and not static_linears(planned.conversion.types):
        raise PorterError(f"--calibration: scheme {planned.scheme.name} measures activations as it runs; leave it out")
    _check_dtype(target, str(planned.dtype).removeprefix("torch."))
    result = planned.to_json()
    if output is not None and not plan:
        with conversion() as converted:
            write_ascend_v1(planned, output, workers=workers, allow_nonfinite=allow_nonfinite, progress=converted)
        result["output"] = str(output)
    emit(result, json_output, lambda console: _print_plan(console, result))
    return 0


def check_command(directory: Path, *, strict: bool, trust_remote_code: bool, json_output: bool) -> int:
    """Check an AscendV1 directory, or a port to an Ascend chip by the lint of its calls: 0 where it is sound, 1 with
    faults (with `strict`, notes too)."""
    if (directory / "port.json").is_file():
        from porter.cli.ascend_lint import check_port

        return check_port(directory, strict=strict, trust_remote_code=trust_remote_code, json_output=json_output)
    from porter.ascend_v1.check.checker import check_directory

    say(f"checking {directory} ...")
    with contextlib.ExitStack() as stack:
        steps: list[Callable[[int], None]] = []

        def advance(done: int, total: int) -> None:
            if not steps:
                steps.append(stack.enter_context(progress("checking linears", total)))
            steps[0](1)

        checked = check_directory(directory, trust_remote_code=trust_remote_code, progress=advance)
    result = checked.to_json()
    emit(result, json_output, lambda console: _print_findings(console, result, checked.findings))
    return 1 if checked.faults or (strict and checked.findings) else 0


def _measured(file: Path) -> Any:
    from porter.calibration import calibration_of
    from porter.correspondence import Correspondence

    def measure(home: Path, names: list[str]) -> Mapping[str, Any]:
        say(f"measuring the inputs of {len(names)} linears ...")
        return calibration_of(file, home, names, Correspondence(())).linears

    return measure


def _check_chip(target: str) -> None:
    from porter.chips.catalogue import load_catalogue
    from porter.errors import PorterError

    if load_catalogue().get(target).device != "npu":
        raise PorterError(f"--format ascend-v1 --target {target}: is loaded by vllm-ascend; name an Ascend chip")


def _check_dtype(target: str, dtype: str) -> None:
    from porter.chips.catalogue import load_catalogue
    from porter.errors import PorterError

    chip = load_catalogue().get(target)
    if dtype not in chip.dtypes:
        raise PorterError(f"--target {target}: {chip.name} has no {dtype}; choose --dtype fp16")


def _print_plan(console: Console, result: Mapping[str, Any]) -> None:
    linears = ", ".join(f"{count} {kind}" for kind, count in result["linears"].items())
    source = f"{result['source_bytes'] / 1e9:.4g} GB" + (" in FP8 blocks" if result["fp8_source"] else "")
    console.print(f"{result['model_type']} as AscendV1, scheme {result['scheme']}, loaded in {result['dtype']}")
    console.print(f"linears: {linears}")
    console.print(f"{result['tensors']} tensors, {result['bytes'] / 1e9:.4g} GB (the source has {source})")
    if result["output"]:
        console.print(f"written: {result['output']}", markup=False)


def _print_findings(console: Console, result: Mapping[str, Any], findings: Any) -> None:
    counts = Counter(finding.rule for finding in findings)
    printed: Counter[str] = Counter()
    for finding in findings:
        printed[finding.rule] += 1
        if printed[finding.rule] <= SHOWN:
            console.print(finding.line(), markup=False, soft_wrap=True)
    for rule, count in counts.items():
        if count > SHOWN:
            console.print(f"... and {count - SHOWN} more of [{rule}]; --json lists all", markup=False)
    types = ", ".join(f"{count} {shown(kind)}" for kind, count in sorted(result["types"].items()))
    console.print(
        f"{shown(result['model_type'])}: {types}: {result['faults']} faults, {result['notes']} notes", markup=False
    )
