"""`porter chips`: the catalogue, one chip with the source of every figure, and what each Op has for it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from porter.chips.catalogue import Chip, Figure, load_catalogue
from porter.cli.output import JsonOption, emit


def chips(
    chip: Annotated[str | None, typer.Argument(help="A chip or a vendor's name; all chips when left out.")] = None,
    ops: Annotated[bool, typer.Option("--ops", help="Show, per Op: provider, dtypes, evidence.")] = False,
    json_output: JsonOption = False,
) -> None:
    """List the chips that porter knows, or show one with the source of every figure.

    Example: porter chips ascend --ops
    """
    catalogue = load_catalogue()
    if chip is None and not ops:
        result = {"schema": "porter.chips/1", "chips": [as_json(each) for each in catalogue]}
        emit(result, json_output, lambda console: print_catalogue(console, list(catalogue)))
        return
    chosen = catalogue.get(chip if chip is not None else "cpu")
    shown = as_json(chosen)
    if ops:
        from porter.cli.op_table import op_rows, print_ops

        shown["ops"] = op_rows(chosen)
    emit(
        {"schema": "porter.chips/1", "chips": [shown]},
        json_output,
        lambda console: print_ops(console, chosen, shown["ops"]) if ops else print_chip(console, chosen),
    )


def as_json(chip: Chip) -> dict[str, Any]:
    """A chip as the JSON object that --json prints; figures that no source gives are null."""
    return {
        "name": chip.name,
        "title": chip.title,
        "vendor": chip.vendor,
        "aliases": list(chip.aliases),
        "device": chip.device,
        "extension": chip.extension,
        "distributed": chip.distributed,
        "architecture": chip.architecture,
        "dtypes": list(chip.dtypes),
        "providers": list(chip.providers),
        "source": chip.source,
        "notes": list(chip.notes),
        "memory": _figure(chip.memory),
        "bandwidth": _figure(chip.bandwidth),
        "peaks": {dtype: _figure(figure) for dtype, figure in chip.peaks.items()},
        "alignment": {rule: _figure(figure) for rule, figure in chip.alignment.items()},
    }


def print_catalogue(console: Console, chips: list[Chip]) -> None:
    """One line per chip. A dash stands for a figure that no public source gives."""
    table = Table(box=None, pad_edge=False)
    for heading in ("chip", "also called", "device", "memory", "bandwidth", "bf16 or fp16 peak", "Op providers"):
        table.add_column(heading, no_wrap=heading == "chip")
    for chip in chips:
        peak = chip.peaks.get("bfloat16") or chip.peaks.get("float16")
        figures = (_short(chip.memory), _short(chip.bandwidth), _short(peak))
        table.add_row(chip.name, ", ".join(chip.aliases), chip.device, *figures, ", ".join(chip.providers))
    console.print(table)
    console.print("\n-: depends on the machine, or no public source. porter chips CHIP shows the sources.")


def print_chip(console: Console, chip: Chip) -> None:
    """One chip in full: what torch needs for it, and each figure with where it was read."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    extension = f"{chip.device} (needs {chip.extension})" if chip.extension else chip.device
    for label, text in (
        ("chip", f"{chip.name}: {chip.title}, {chip.vendor}"),
        ("also called", ", ".join(chip.aliases) or "-"),
        ("torch device", extension),
        ("distributed", chip.distributed),
        ("architecture", chip.architecture or "-"),
        ("dtypes", ", ".join(chip.dtypes)),
        ("Op providers", ", ".join(chip.providers)),
        ("source", chip.source),
        *(("note", note) for note in chip.notes),
    ):
        facts.add_row(label, text)
    console.print(facts, markup=False)
    figures = Table(box=None, pad_edge=False)
    for heading in ("figure", "value", "source"):
        figures.add_column(heading)
    named = {"memory": chip.memory, "bandwidth": chip.bandwidth}
    named |= {f"peak {dtype}": figure for dtype, figure in chip.peaks.items()}
    named |= {f"alignment {rule}": figure for rule, figure in chip.alignment.items()}
    for label, figure in named.items():
        figures.add_row(label, _short(figure), figure.source if figure else "no public source")
    console.print()
    console.print(figures, markup=False)


def _short(figure: Figure | None) -> str:
    return f"{figure.value:g} {figure.unit}" if figure else "-"


def _figure(figure: Figure | None) -> dict[str, Any] | None:
    return {"value": figure.value, "unit": figure.unit, "source": figure.source} if figure else None
