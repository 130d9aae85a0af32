"""Per Op, what serves it on a chip: provider, dtypes that it accepts, and the evidence that it is right there."""

from __future__ import annotations

from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from porter.chips.catalogue import Chip
from porter.kernels.contract import Implementation, Op, Rung
from porter.kernels.registry import REFERENCE, OpRegistry, default_registry


def op_rows(chip: Chip, registry: OpRegistry | None = None) -> list[dict[str, Any]]:
    """One row per Op and provider, in the chip's order of preference.

    `dtypes` are those in which the provider accepts the Op's own generated inputs; `refused` says why a provider does
    not serve the Op at all. The reference defines the Op, so it has no evidence of its own.
    """
    known = default_registry() if registry is None else registry
    rows = []
    for op in known.ops.values():
        resolution = known.resolve(op.name, op.variant, chip.name, chip.providers)
        for provider, implementation in resolution.implementations:
            evidence = implementation.evidence
            shown = {name: getattr(evidence, name) for name in ("rung", "detail", "date", "device")}
            rows.append(_row(op, provider, dtypes=accepted_dtypes(op, implementation), evidence=shown))
        rows += [_row(op, provider, refused=reason) for provider, reason in resolution.refused.items()]
        rows.append(_row(op, REFERENCE, dtypes=[_short(dtype) for dtype in op.dtypes]))
    return rows


def accepted_dtypes(op: Op, implementation: Implementation) -> list[str]:
    """The activation dtypes in which the implementation accepts at least one of the Op's generated cases."""
    accepted = []
    for dtype in op.dtypes:
        if any(implementation.accepts(*case.arguments) is None for case in op.inputs(dtype)):
            accepted.append(_short(dtype))
    return accepted


def print_ops(console: Console, chip: Chip, rows: list[dict[str, Any]]) -> None:
    """The table for people: an Op once, then a line per provider."""
    console.print(f"{chip.name}: {chip.title}\n", markup=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("Op", "provider", "dtypes", "evidence"):
        table.add_column(heading, no_wrap=heading != "evidence")
    previous = ""
    for row in rows:
        name = f"{row['op']}/{row['variant']}"
        table.add_row("" if name == previous else name, row["provider"], ", ".join(row["dtypes"]) or "-", _says(row))
        previous = name
    console.print(table, markup=False)
    console.print(f"\nevidence, weakest to strongest: {', '.join(get_args(Rung))} (run on the chip)")


def _row(
    op: Op,
    provider: str,
    *,
    dtypes: list[str] | None = None,
    evidence: dict[str, str] | None = None,
    refused: str | None = None,
) -> dict[str, Any]:
    return {
        "op": op.name,
        "variant": op.variant,
        "provider": provider,
        "dtypes": dtypes or [],
        "evidence": evidence,
        "refused": refused,
    }


def _says(row: dict[str, Any]) -> str:
    if row["refused"]:
        return f"none: {row['refused']}"
    if row["evidence"] is None:
        return "defines the Op, in plain torch"
    evidence = row["evidence"]
    return ", ".join(filter(None, (evidence["rung"], evidence["detail"], evidence["date"], evidence["device"])))


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
