"""Per Op, what serves it on a chip: provider, dtypes that it accepts, and the evidence that it is right there."""

from __future__ import annotations

from itertools import groupby
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from porter.chips.catalogue import Chip
from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.catalogue.vendor_op import VendorOp
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.contract import Implementation, Op, Rung
from porter.kernels.registry import REFERENCE, OpRegistry, default_registry


def op_rows(chip: Chip, registry: OpRegistry | None = None) -> list[dict[str, Any]]:
    """One row per Op and provider, in the chip's order of preference.

    `dtypes` are those in which the provider accepts the Op's own generated inputs; `refused` says why a provider does
    not serve the Op at all. The reference defines the Op, so it has no evidence of its own. Rows of the Ascend provider
    have `calls`, the vendor's operators in order, judged on shapes alone, and `operators`, what these need.
    """
    known = default_registry() if registry is None else registry
    rows = []
    for op in known.ops.values():
        resolution = known.resolve(op.name, op.variant, chip.name, chip.providers)
        for name, implementation in resolution.implementations:
            evidence = implementation.evidence
            shown = {field: getattr(evidence, field) for field in ("rung", "detail", "date", "device")}
            provider = known.providers[name]
            if isinstance(provider, AscendProvider):
                rows.append(_ascend_row(op, provider, chip, shown))
            else:
                rows.append(_row(op, name, dtypes=accepted_dtypes(op, implementation), evidence=shown))
        rows += [_row(op, name, refused=reason) for name, reason in resolution.refused.items()]
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
    """The table for people: a line per Op and kernel; what evidence rests on, and operators need, once below."""
    console.print(f"{chip.name}: {chip.title}\n", markup=False)
    ascend = any(row["calls"] is not None for row in rows)
    table = Table(box=None, pad_edge=False)
    for heading in ("Op", "provider", *(["vendor's operators"] if ascend else []), "dtypes", "evidence"):
        table.add_column(heading)
    grounds: list[str] = []
    for name, group in groupby(rows, key=lambda row: f"{row['op']}/{row['variant']}"):
        *kernels, reference = group
        served = [row for row in kernels if not row["refused"]]
        for row in served:
            calls = [", ".join(row["calls"]) or ("torch's own" if row["dtypes"] else "")] if ascend else []
            dtypes = ", ".join(row["dtypes"]) or f"none here{': ' * bool(row['refusal'])}{row['refusal'] or ''}"
            says = _says(row["evidence"], grounds) if row["evidence"] else "the reference runs"
            table.add_row(name, row["provider"], *calls, dtypes, says)
        if not served:
            why = "; ".join(f"{row['provider']} {row['refused']}" for row in kernels)
            table.add_row(name, REFERENCE, *([""] if ascend else []), ", ".join(reference["dtypes"]), why)
    console.print(table, markup=False)
    console.print()
    for number, ground in enumerate(grounds, start=1):
        console.print(f"({number}) {ground}", markup=False)
    console.print("Behind every kernel stands the reference, which defines the Op in plain torch.")
    console.print(f"Evidence, weakest to strongest: {', '.join(get_args(Rung))} (run on the chip).")
    _print_operators(console, rows)


def _print_operators(console: Console, rows: list[dict[str, Any]]) -> None:
    operators = {each["name"]: each for row in rows for each in row["operators"]}
    if operators:
        console.print("\nWhat the vendor's operators need here:")
    for name, operator in sorted(operators.items()):
        console.print(f"{name} ({operator['page']})", markup=False)
        for constraint in operator["constraints"]:
            console.print(f"  - {constraint}", markup=False)
        if operator["explicit"]:
            console.print(f"  - always passed, whatever the default: {', '.join(operator['explicit'])}", markup=False)


def _ascend_row(op: Op, provider: AscendProvider, chip: Chip, evidence: dict[str, str]) -> dict[str, Any]:
    """The operators of the accepted cases, in order of first use; where none is accepted, why in bfloat16."""
    calls: dict[str, None] = {}
    refusals: list[str] = []
    made_in: dict[str, list[int]] = {}
    for dtype in op.dtypes:
        verdicts = [provider.calls(op.name, op.variant, chip.name, case.arguments) for case in op.inputs(dtype)]
        made_in[_short(dtype)] = [len(made) for reason, made in verdicts if reason is None]
        refusals += [reason for reason, _ in verdicts if reason is not None and dtype == torch.bfloat16]
        calls |= dict.fromkeys(call.op.name for reason, made in verdicts if reason is None for call in made)
    # A kernel that calls operators returns at once from empty inputs: these show nothing of a dtype.
    accepted = [dtype for dtype, made in made_in.items() if (any(made) if calls else made)]
    row = _row(op, provider.name, dtypes=accepted, evidence=evidence if accepted else None)
    known = catalogue()
    needs = [_operator(known[name], chip.name) for name in calls]
    refusal = None if accepted else next(iter(refusals), None)
    return row | {"calls": list(calls), "operators": needs, "refusal": refusal}


def _operator(op: VendorOp, chip: str) -> dict[str, Any]:
    rules = [rule.says for rule in (*op.rules, *op.value_rules) if not rule.chips or chip in rule.chips]
    return {"name": op.name, "page": op.page, "constraints": rules, "explicit": list(op.explicit)}


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
        "calls": None,
        "operators": [],
        "refusal": None,
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
