"""`porter models`: what porter ports."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from porter.cli.output import JsonOption, emit


def models(
    family: Annotated[str | None, typer.Argument(help="Show this family with its classes.")] = None,
    json_output: JsonOption = False,
) -> int:
    """List families, their presets, what is special, and which classes are ported.

    Example: porter models deepseek_v3
    """
    from porter.models.family import families, family_of
    from porter.models.presets import preset_names

    chosen = [family_of(family, "FAMILY")] if family else list(families().values())
    result: dict[str, Any] = {
        "families": [
            {
                "family": f.model_type,
                "import": f"from porter.models.{f.model_type} import {f.class_name}",
                "rewrites": list(f.expected),
                "special": list(f.special),
                "presets": preset_names(f.model_type),
                "chips": ["cpu"],
            }
            for f in chosen
        ]
    }
    emit(result, json_output, lambda console: _render(console, result))
    return 0


def _render(console: Console, result: dict[str, Any]) -> None:
    table = Table("family", "ported to", "rewrites", "presets")
    for f in result["families"]:
        table.add_row(f["family"], ", ".join(f["chips"]), ", ".join(f["rewrites"]), ", ".join(f["presets"]))
    console.print(table)
    for f in result["families"]:
        console.print(f"{f['family']}: {f['import']}")
        for line in f["special"]:
            console.print(f"  - {line}")
