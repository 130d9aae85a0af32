"""The alignment report as one HTML file: style, script and plot inline, nothing fetched, every value escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from porter.alignment.report_page import SCRIPT, STYLE
from porter.alignment.report_plot import error_plot
from porter.alignment.report_summary import (
    Row,
    headline,
    leading_cause,
    number,
    percent,
    ratio,
    summarise,
    times,
)

STATUSES = ("drift", "flipped", "inherited", "ok", "skipped")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
KEY = (
    '<p class="key"><i class="status drift">◆</i> over its budget &nbsp; '
    '<i style="color:var(--blue)">●</i> introduced &nbsp; <i class="status inherited">—</i> inherited &nbsp; '
    "<i>- -</i> budget &nbsp; each module at its worst step; hover a point for its figures</p>"
)


def html(report: Mapping[str, Any]) -> str:
    """A self-contained page of a `porter.alignment/1` report; opens from file:// and allows itself no network."""
    verdict, sentence = headline(report)
    plot = error_plot(summarise(report["modules"]))
    body = "".join(
        [
            _headline(report, verdict, sentence),
            _cards(report),
            f"<h2>Error by depth</h2>{plot}{KEY}" if plot else "",
            _causes(report["causes"]),
            _modules(report["modules"]),
            _weights(report["weights"]),
            _uncompared(report),
            _environment(report["environment"]),
        ]
    )
    title = escape(f"porter align: {verdict.lower()}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _headline(report: Mapping[str, Any], verdict: str, sentence: str) -> str:
    cause = leading_cause(report)
    said = ""
    if cause is not None:
        said = (
            f"<p><b>{escape(str(cause['kind']))}</b> ({escape(percent(cause['confidence']))}): "
            f"{escape(str(cause['says']))}</p>"
        )
    return (
        f'<section class="headline {escape(str(report["verdict"]))}"><h1><span class="verdict">{escape(verdict)}</span>'
        f"{escape(sentence)}</h1>{said}</section>"
    )


def _cards(report: Mapping[str, Any]) -> str:
    cards = "".join(
        f"<div class=card><b>{escape(label)}</b><span>{escape(value)}</span><small>{escape(note)}</small></div>"
        for label, value, note in _figures(report)
    )
    return f"<section class=cards>{cards}</section>"


def _figures(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    summaries = summarise(report["modules"])
    if summaries:
        counts = [(status, sum(s.status == status for s in summaries)) for status in STATUSES]
        told = ", ".join(f"{count} {status}" for status, count in counts if count)
        yield "Modules", str(len(summaries)), told
    tokens = report["tokens"]
    if tokens is not None:
        first = tokens["first_divergence"]
        diverges = "no divergence" if first is None else f"first divergence at token {first}"
        note = f"KL mean {number(tokens['kl_mean'])}, max {number(tokens['kl_max'])}; {diverges}"
        yield f"Top-1 agreement, {tokens['compared']} tokens", percent(tokens["top1_agreement"]), note
    routing = report["routing"]
    if routing is not None:
        note = f"of {routing['decisions']} decisions; {routing['benign']} within rounding distance"
        yield "Routing flips", str(routing["flips"]), note
    coverage = report["coverage"]
    flops = "" if coverage["flops"] is None else f", {percent(coverage['flops'])} of the flops"
    note = f"of the parameters; {percent(coverage['modules'])} of the modules{flops}"
    yield "Compared", percent(coverage["parameters"]), note


def _table(identifier: str, head: Sequence[str], rows: Sequence[str], figures: Sequence[int] = ()) -> str:
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


def _causes(causes: Sequence[Row]) -> str:
    if not causes:
        return ""
    rows = [
        f"<tr><td><b>{escape(str(c['kind']))}</b></td>{_name(c['module'])}{_figure(percent(c['confidence']))}"
        f"{_figure(number(c['before']))}{_figure(number(c['after']))}<td>{escape(str(c['says']))}</td></tr>"
        for c in causes
    ]
    head = ("cause", "module", "confidence", "error before", "error after", "what to do")
    return f"<h2>Causes</h2>{_table('causes', head, rows, (2, 3, 4))}"


def _modules(modules: Sequence[Row]) -> str:
    if not modules:
        return ""
    present = [status for status in STATUSES if any(row["status"] == status for row in modules)]
    # With a fault to look at, the fine rows wait behind their box; the count beside it says that they are there.
    quiet = {"ok"} if "drift" in present else set()
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
    table = _table("modules", head, [_module(row) for row in modules], (1, 3, 4, 5, 6, 7, 8))
    return f"<h2>Modules</h2><div class=filter>{search}{boxes}<span id=shown></span></div>{table}"


def _module(row: Row) -> str:
    figures = [
        number(row.get("introduced")),
        number(row.get("budget")),
        times(ratio(row)),
        number(row.get("inherited")),
        number(row.get("end_to_end")),
        "-" if row.get("cosine") is None else f"{row['cosine']:.6f}",
    ]
    op = ", ".join(str(row[key]) for key in ("op", "provider") if row.get(key))
    name, status = escape(str(row["module"])), str(row["status"])
    return (
        f'<tr class="{escape(status)}" data-status="{escape(status)}" data-name="{name}">'
        f"{_name(row['module'], row['source'])}{_figure(str(row['step']))}{_status(status)}"
        f"{''.join(map(_figure, figures))}<td class=op>{escape(op)}</td>"
        f"<td class=why>{escape(str(row.get('why') or ''))}</td></tr>"
    )


def _weights(weights: Sequence[Row]) -> str:
    if not weights:
        return ""
    ordered = sorted(weights, key=lambda w: STATUSES.index(w["status"]))
    rows = [
        f'<tr class="{escape(w["status"])}">{_name(w["parameter"], w["source"])}{_status(w["status"])}'
        f"{_figure(number(w['error']))}{_figure(number(w['expected']))}</tr>"
        for w in ordered
    ]
    differ = sum(w["status"] == "drift" for w in weights)
    table = _table("weights", ("parameter", "status", "error", "expected"), rows, (2, 3))
    opened = " open" if differ else ""
    said = f"{len(weights)} listed, {differ} differ"
    return f"<h2>Parameters</h2><details{opened}><summary>{said}</summary>{table}</details>"


def _uncompared(report: Mapping[str, Any]) -> str:
    skipped = report["coverage"]["skipped"]
    items = [f"<li><code>{escape(str(s['module']))}</code>: {escape(str(s['why']))}</li>" for s in skipped]
    for side in ("golden", "candidate"):
        items += [f"<li><code>{escape(str(n))}</code>: only in the {side}</li>" for n in report["unmatched"][side]]
    listed = f"<ul>{''.join(items)}</ul>" if items else "<p>Everything in the golden was compared.</p>"
    return f"<h2>Not compared</h2>{listed}"


def _environment(environment: Mapping[str, Any]) -> str:
    text = escape(json.dumps(environment, indent=1, default=str, sort_keys=True))
    return f"<h2>Environment</h2><details><summary>golden and candidate</summary><pre>{text}</pre></details>"
