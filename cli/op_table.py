"""Per Op, what serves it on a chip: provider, dtypes that it accepts, and the evidence that it is right there."""

from __future__ import annotations

from itertools import groupby
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
    """The table for people: a line per Op and kernel; what the evidence rests on stands once, below."""
    console.print(f"{chip.name}: {chip.title}\n", markup=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("Op", "provider", "dtypes", "evidence"):
        table.add_column(heading)
    grounds: list[str] = []
    for name, group in groupby(rows, key=lambda row: f"{row['op']}/{row['variant']}"):
        *kernels, reference = group
        served = [row for row in kernels if not row["refused"]]
        for row in served:
            dtypes = ", ".join(row["dtypes"]) or "none here"
            table.add_row(name, row["provider"], dtypes, _says(row["evidence"], grounds))
        if not served:
            why = "; ".join(f"{row['provider']} {row['refused']}" for row in kernels)
            table.add_row(name, REFERENCE, ", ".join(reference["dtypes"]), why)
    console.print(table, markup=False)
    console.print()
    for number, ground in enumerate(grounds, start=1):
        console.print(f"({number}) {ground}", markup=False)
    console.print("Behind every kernel stands the reference, which defines the Op in plain torch.")
    console.print(f"Evidence, weakest to strongest: {', '.join(get_args(Rung))} (run on the chip).")


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


def _says(evidence: dict[str, str], grounds: list[str]) -> str:
    """The rung, with the number of what it rests on, which is added to `grounds` when it is new."""
    ground = ", ".join(filter(None, (evidence["detail"], evidence["date"], evidence["device"])))
    if not ground:
        return evidence["rung"]
    if ground not in grounds:
        grounds.append(ground)
    return f"{evidence['rung']} ({grounds.index(ground) + 1})"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
