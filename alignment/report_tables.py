"""The tables of the HTML report: causes, modules, parameters, what was not compared, and the environments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from porter.alignment.report_figures import Row, cosine, named, number, percent, ratio, times

STATUSES = ("drift", "flipped", "inherited", "ok", "skipped")
WEIGHT_HEAD = ("parameter", "status", "error", "expected", "why")
MANY = 1500
"""Rows beyond which the fine ones wait behind their box even where nothing drifts: a page must scroll."""


def table(identifier: str, head: Sequence[str], rows: Sequence[str], figures: Sequence[int] = ()) -> str:
    """A table; `figures` are the columns of numbers."""
    cells = "".join(
        f'<th class="{"figure" if index in figures else ""}">{escape(name)}</th>' for index, name in enumerate(head)
    )
    return (
        f'<div class=scroll><table id="{identifier}"><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _figure(value: str) -> str:
    return f"<td class=figure>{escape(value)}</td>"


def _name(name: Any, source: Any = None) -> str:
    origin = f"<span class=source>from {escape(str(source))}</span>" if source and source != name else ""
    return f"<td class=name>{escape(str(name) or '(model)')}{origin}</td>"


def _status(status: str) -> str:
    return f'<td><span class="status {escape(status)}">{escape(status)}</span></td>'


def causes_section(causes: Sequence[Row]) -> str:
    """Every cause with its error before and after it was undone."""
    if not causes:
        return ""
    rows = [
        f"<tr><td><b>{escape(str(c['kind']))}</b></td>{_name(c['module'])}{_figure(percent(c['confidence']))}"
        f"{_figure(number(c['before']))}{_figure(number(c['after']))}<td>{escape(str(c['says']))}</td></tr>"
        for c in causes
    ]
    head = ("cause", "module", "confidence", "error before", "error after", "what to do")
    return f"<h2>Causes</h2>{table('causes', head, rows, (2, 3, 4))}"


def modules_section(modules: Sequence[Row]) -> str:
    """Every row, with a filter by name and by status."""
    if not modules:
        return ""
    present = [status for status in STATUSES if any(row["status"] == status for row in modules)]
    # With a fault to look at, the rest waits behind its box; the count beside it says that it is there.
    quiet = {"ok", "inherited"} if "drift" in present else {"ok"} if len(modules) > MANY else set()
    boxes = "".join(
        f'<label><input type=checkbox value="{s}"{"" if s in quiet else " checked"}> {s}</label>' for s in present
    )
    search = '<input type=search id=filter placeholder="filter by module name (regular expression)">'
    head = (
        "module",
        "step",
        "status",
        "introduced",
        "budget",
        "ratio",
        "inherited",
        "end to end",
        "cosine",
        "op, provider",
        "why",
    )
    listed = table("modules", head, [_module(row) for row in modules], (1, 3, 4, 5, 6, 7, 8))
    return f"<h2>Modules</h2><div class=filter>{search}{boxes}<span id=shown></span></div>{listed}"


def _module(row: Row) -> str:
    figures = [
        number(row.get("introduced")),
        number(row.get("budget")),
        times(ratio(row)),
        number(row.get("inherited")),
        number(row.get("end_to_end")),
        cosine(row.get("cosine")),
    ]
    op = ", ".join(str(row[key]) for key in ("op", "provider") if row.get(key))
    name, status = escape(str(row["module"])), str(row["status"])
    return (
        f'<tr class="{escape(status)}" data-status="{escape(status)}" data-name="{name}">'
        f"{_name(row['module'], row['source'])}{_figure(str(row['step']))}{_status(status)}"
        f"{''.join(map(_figure, figures))}<td class=op>{escape(op)}</td>"
        f"<td class=why>{escape(str(row.get('why') or ''))}</td></tr>"
    )


def weights_section(weights: Sequence[Row]) -> str:
    """Every parameter, those that differ first."""
    if not weights:
        return ""
    parts = []
    for differ in (True, False):
        rows = [_weight(w) for w in weights if (w["status"] == "drift") is differ]
        if rows:
            listed = table("differing" if differ else "weights", WEIGHT_HEAD, rows, (2, 3))
            said = f"{len(rows)} {'differ' if differ else 'as expected or not compared'}"
            parts.append(f"<details{' open' if differ else ''}><summary>{said}</summary>{listed}</details>")
    return f"<h2>Parameters</h2>{''.join(parts)}"


def _weight(row: Row) -> str:
    why = f"<td class=why>{escape(str(row.get('why') or ''))}</td>"
    return (
        f'<tr class="{escape(row["status"])}">{_name(row["parameter"], row["source"])}{_status(row["status"])}'
        f"{_figure(number(row['error']))}{_figure(number(row['expected']))}{why}</tr>"
    )


def uncompared_section(report: Mapping[str, Any]) -> str:
    """What was skipped, has no counterpart, or could not be captured at all."""
    skipped = report["coverage"]["skipped"]
    items = [f"<li><code>{escape(named(s['module']))}</code>: {escape(str(s['why']))}</li>" for s in skipped]
    for side in ("golden", "candidate"):
        items += [f"<li><code>{escape(str(n))}</code>: only in the {side}</li>" for n in report["unmatched"][side]]
    items += [
        f"<li><code>{escape(str(check['module']) or '(model)')}</code>: {escape(str(check['says']))}</li>"
        for check in report.get("sanity") or ()
        if check["status"] == "uncovered"
    ]
    listed = f"<ul class=plain>{''.join(items)}</ul>" if items else "<p>Everything in the golden was compared.</p>"
    return f"<h2>Not compared</h2>{listed}"


def environment_section(environment: Mapping[str, Any]) -> str:
    """Both environments as they were recorded."""
    text = escape(json.dumps(environment, indent=1, default=str, sort_keys=True))
    return f"<h2>Environment</h2><details><summary>golden and candidate</summary><pre>{text}</pre></details>"
