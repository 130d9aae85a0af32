"""`porter models`: what porter ports."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from porter.cli.output import JsonOption, emit, progress


def models(
    family: Annotated[str | None, typer.Argument(help="Show this family with its classes.")] = None,
    json_output: JsonOption = False,
) -> int:
    """List families with presets, what is special and what runs natively on which chip, and the shipped checkpoints.

    The Ops are counted on a port that is made and proven at reduced width, which takes a second for each family.

    Example: porter models deepseek_v3
    """
    from porter.chips.catalogue import load_catalogue
    from porter.models.family import families, family_of
    from porter.models.presets import preset_names, shipped_names
    from porter.support import support

    chosen = [family_of(family, "FAMILY")] if family else list(families().values())
    chips = list(load_catalogue())
    result: dict[str, Any] = {"families": [], "shipped": shipped_names()}
    with progress("proving each family's port", len(chosen)) as advance:
        for f in chosen:
            result["families"].append(
                {
                    "family": f.model_type,
                    "import": f"from porter.models.{f.model_type} import {f.class_name}",
                    "rewrites": list(f.expected),
                    "special": list(f.special),
                    "presets": preset_names(f.model_type),
                    "chips": [asdict(s) for s in support(f, chips)],
                }
            )
            advance(1)
    emit(result, json_output, lambda console: _render(console, result, details=family is not None))
    return 0


def _render(console: Console, result: dict[str, Any], details: bool) -> None:
    table = Table("family", "chip", "native Ops", "evidence", "presets")
    for f in result["families"]:
        first = f["family"]
        for chip in f["chips"]:
            if chip["native"]:
                counted = f"{chip['native']} of {chip['ops']}"
                known = ", ".join(f"{count} {rung}" for rung, count in chip["rungs"].items())
                table.add_row(first, chip["chip"], counted, known, ", ".join(f["presets"]) if first else "")
                first = ""
    console.print(table)
    without = [c["chip"] for c in result["families"][0]["chips"] if not any(_native(f, c) for f in result["families"])]
    console.print(f"checkpoints that come with porter: {', '.join(result['shipped'])}")
    console.print(f"catalogued, without an Op provider yet: {', '.join(without)}")
    for f in result["families"] if details else ():
        console.print(f["import"])
        for line in f["special"]:
            console.print(f"  - {line}")
        for chip in f["chips"]:
            if chip["native"] and chip["reference"]:
                console.print(f"  in plain torch on {chip['chip']}: {', '.join(chip['reference'])}")


def _native(family: dict[str, Any], chip: dict[str, Any]) -> int:
    return next(int(c["native"]) for c in family["chips"] if c["chip"] == chip["chip"])
