"""How `porter adapt` shows a plan: what is ported to which Ops, and on Ascend the cards that it takes."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from porter.kernels.ascend.catalogue.vendor_op import PAGES

GIGA = {"bytes": (1e9, "GB"), "operations": (1e12, "T"), "ms": (1.0, "ms")}
"""Units of a plan's figures and what people read them in."""


def print_port(console: Console, result: dict[str, Any]) -> None:
    """Classes, Ops and proof of a port, its weights and its memory-bound limit on one device."""
    plan = result["plan"]
    deployment = result.get("deployment")
    console.print(f"{plan['model_type']} on {plan['chip']}" + ("" if deployment else f", scheme {plan['scheme']}"))
    table = Table("class", "rewrite", "variant", "float64 error")
    for row in plan["ported"]:
        table.add_row(row["class"], row["rewrite"], row["variant"], f"{row['proof_error']:.1e}")
    console.print(table)
    for name, reason in plan["left"].items():
        console.print(f"left as upstream: {name} ({reason})", markup=False)
    if not deployment:
        ops = Table("op", "variant", "provider", "evidence", "refused")
        for op in plan["ops"]:
            ops.add_row(op["op"], op["variant"], op["provider"], op["evidence"], "; ".join(op["refused"]))
        console.print(ops)
    proof = ", ".join(f"{part} {error:.1e}" for part, error in result["proof"].items())
    console.print(f"float64 proof of the whole model at reduced width: {proof}")
    for part, reason in result["unproven"].items():
        console.print(f"not proven: {part}, which upstream itself cannot run ({reason})", markup=False)
    if deployment:
        print_deployment(console, deployment)
        return
    console.print(
        f"{plan['parameters']:,} parameters, {plan['weight_bytes'] / 1e9:.3g} GB of weights, "
        f"{plan['kv_bytes_per_token']:,} bytes of cache per token, "
        + (f"{plan['state_bytes']:,} of state per sequence, " if plan["state_bytes"] else "")
        + f"{plan['bytes_read_per_token'] / 1e6:.4g} MB read per token"
    )
    if plan["tokens_per_second"]:
        console.print(f"memory-bound limit at batch 1: {per_second(plan['tokens_per_second'])}")


def per_second(rate: float) -> str:
    """A rate in four digits, or more where they stand before the point."""
    return f"{rate:,.0f} tokens/s" if rate >= 1000 else f"{rate:.4g} tokens/s"


def print_deployment(console: Console, plan: dict[str, Any]) -> None:
    """The cards of a port to Ascend: layout, memory, constraints, roofline, schemes, and the vendor's operators."""
    layout, load = plan["layout"], plan["load"]
    sharing = f"{layout['dp']} groups of cards with sequences of their own" if layout["dp"] > 1 else ""
    sharing = (
        f"{layout['expert_tp']} cards share each expert" if layout["expert_tp"] > 1 and layout["ep"] > 1 else sharing
    )
    console.print(
        f"\n{layout['cards']} x {plan['chip']}: TP {layout['tp']}, EP {layout['ep']}"
        + (f" ({sharing})" if sharing else "")
        + f"; scheme {plan['scheme']}; {load['batch']} sequences of {load['context']} tokens",
        markup=False,
    )
    console.print(f"chosen: {plan['why']}", markup=False)
    for kernel in plan["kernels"]:
        console.print(f"{kernel['use']} in {kernel['format']}: {kernel['verdict']}, {kernel['why']}", markup=False)
    _memory(console, plan)
    _split(console, layout["modules"])
    _constraints(console, plan["constraints"])
    console.print(
        "\nbounds, not predictions: bandwidth and peaks in full, experts drawn evenly, no time for communication",
        markup=False,
    )
    for regime in plan["roofline"]:
        _roofline(console, regime, layout["cards"])
    _schemes(console, plan)
    _operators(console, plan)
    verdict = "possible" if plan["possible"] else "not possible: " + "; ".join(reasons_against(plan))
    console.print("\n" + "; ".join([verdict, *reservations(plan)]), markup=False)


def reasons_against(plan: dict[str, Any]) -> list[str]:
    """Why the layout is not possible; empty where it is."""
    memory = plan["memory"]
    reasons = [f"{c['needs']} ({c['numbers']})" for c in plan["constraints"] if c["met"] is False]
    if not plan["fits"]:
        need, usable = memory["bytes"] / 1e9, memory["usable_bytes"] / 1e9
        reasons.append(f"{need:.1f} GB a card do not fit the {usable:.1f} GB usable")
    return reasons


def reservations(plan: dict[str, Any]) -> list[str]:
    """What is less than it looks in a layout that is possible: Ops in plain torch, and a scheme that is not written."""
    found = []
    if refused := sorted({f"{op['op']}/{op['variant']}" for op in plan["ops"] if op["refused"]}):
        found.append(f"in plain torch, since refused: {', '.join(refused)}")
    if any(row["scheme"] == plan["scheme"] and not row["converts"] for row in plan["alternatives"]):
        found.append(f"porter does not write {plan['scheme']} for {plan['chip']} yet")
    return found


def _memory(console: Console, plan: dict[str, Any]) -> None:
    memory = plan["memory"]
    table = Table("of one card", "GB", "arithmetic", box=None, pad_edge=False, title="memory", title_justify="left")
    for part in ("weights", "cache", "workspace"):
        for row in plan[part]:
            per = row["name"].startswith(("cache of", "states of"))
            value = f"({row['value'] / 1e3:.4g} kB)" if per else f"{row['value'] / 1e9:.3f}"
            table.add_row(row["name"], value, row["arithmetic"])
    usable = (
        f"of {memory['memory_bytes'] / 1e9:g} GB x (1 - {memory['reserve']:g}) = {memory['usable_bytes'] / 1e9:.1f} GB"
    )
    table.add_row(
        "all", f"{memory['bytes'] / 1e9:.3f}", f"{usable} usable: {'fits' if plan['fits'] else 'does not fit'}"
    )
    console.print()
    console.print(table, markup=False)


def _split(console: Console, modules: list[dict[str, Any]]) -> None:
    table = Table("layers", "weight", "shape", "on a card", "format", box=None, pad_edge=False)
    for row in modules:
        if len(row["shape"]) > 1:
            shape = " x ".join(map(str, row["shape"]))
            table.add_row(str(row["layers"]), row["name"], shape, row["split"], row["format"])
    console.print()
    console.print(table, markup=False)


def _constraints(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("constraint", "numbers", "verdict", "source", box=None, pad_edge=False)
    words = {True: "met", False: "BROKEN", None: "not documented so"}
    for row in rows:
        source = row["source"].removeprefix(f"{PAGES}torch_npu-")
        table.add_row(row["needs"], row["numbers"], words[row["met"]], source)
    console.print()
    console.print(table, markup=False)


def _roofline(console: Console, regime: dict[str, Any], cards: int) -> None:
    rate = regime["tokens_per_second"]
    said = (
        f"at most {per_second(rate)} of {cards} cards, bound by {regime['bound']}" if rate else "no bound: no figure"
    )
    console.print(f"\n{regime['regime']}: {said}", markup=False)
    for figure in regime["figures"]:
        scale, unit = GIGA[figure["unit"]]
        value = f"{figure['value'] / scale:.4g} {unit}"
        console.print(f"  {figure['name']}: {value} = {figure['arithmetic']}", markup=False)


def _schemes(console: Console, plan: dict[str, Any]) -> None:
    table = Table(
        "scheme", "kernels", "cards", "TP, EP", "GB a card", "decode", "porter writes it", box=None, pad_edge=False
    )
    for row in plan["alternatives"]:
        kernels = "; ".join(f"{k['use']} {k['format']} {k['verdict']}" for k in row["kernels"])
        if row["cards"] is None:
            table.add_row(
                row["scheme"], kernels, "more than planned for", "", "", "", "yes" if row["converts"] else "no"
            )
            continue
        rate = per_second(row["tokens_per_second"]) if row["tokens_per_second"] else "-"
        sizes = f"{row['tp']}, {row['ep']}"
        weights = f"{row['weight_bytes'] / 1e9:.1f}"
        table.add_row(
            row["scheme"], kernels, str(row["cards"]), sizes, weights, rate, "yes" if row["converts"] else "no"
        )
    console.print(f"\nschemes on {plan['chip']}, each on its fewest cards (weights alone a card):", markup=False)
    console.print(table, markup=False)
    reasons = dict.fromkeys(
        k["why"] for row in plan["alternatives"] for k in row["kernels"] if k["verdict"] != "native"
    )
    for reason in reasons:
        console.print(f"  {reason}", markup=False)


def _operators(console: Console, plan: dict[str, Any]) -> None:
    table = Table("Op", "regime", "calls", "vendor's operators", "refused", box=None, pad_edge=False)
    rows = sorted(plan["ops"], key=_same_verdict)
    for (op, variant, regime, calls, refused), group in groupby(rows, key=_same_verdict):
        alike = list(group)
        table.add_row(f"{op}/{variant}", regime, str(sum(r["sites"] for r in alike)), ", ".join(calls), refused)
    named = (
        "" if plan["ops_scheme"] == plan["scheme"] else f" (Ops of {plan['ops_scheme']}: {plan['scheme']} has none yet)"
    )
    console.print(f"\nOps at the widths of one card, two layers of each kind{named}:", markup=False)
    console.print(table, markup=False)


def _same_verdict(row: dict[str, Any]) -> tuple[str, str, str, tuple[str, ...], str]:
    return row["op"], row["variant"], row["regime"], tuple(row["calls"]), row["refused"] or ""
