"""The alignment report as one HTML file: style, script and plots inline, nothing fetched, every value escaped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from porter.alignment.report_figures import number, percent
from porter.alignment.report_findings import grouped_lint, voiding
from porter.alignment.report_headline import headline
from porter.alignment.report_outline import checks_section, lint_section, tree_section
from porter.alignment.report_page import SCRIPT, STYLE
from porter.alignment.report_plot import error_plot
from porter.alignment.report_siblings import siblings_plot
from porter.alignment.report_summary import leading_cause, summarise
from porter.alignment.report_tables import (
    STATUSES,
    causes_section,
    environment_section,
    modules_section,
    uncompared_section,
    weights_section,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
KEY = (
    '<p class="key"><i class="status drift">◆</i> over its budget &nbsp; '
    '<i style="color:var(--blue)">●</i> introduced &nbsp; <i class="status inherited">—</i> inherited &nbsp; '
    "<i>▔</i> budget &nbsp; each module at its worst step, in execution order; hover a point for its figures</p>"
)
SIBLINGS_KEY = (
    '<p class="key">each point is one layer&#39;s module; the line at 1 is the budget, and a point far to the right of '
    "its row is an outlier among its siblings even where it stays within</p>"
)


def html(report: Mapping[str, Any]) -> str:
    """A self-contained page of a `porter.alignment/1` report; opens from file:// and allows itself no network."""
    verdict, sentence = headline(report)
    summaries = summarise(report["modules"])
    depth, siblings = error_plot(summaries), siblings_plot(summaries)
    body = "".join(
        [
            _headline(report, verdict, sentence),
            _cards(report),
            tree_section(report),
            f"<h2>Error by depth: introduced against inherited</h2>{depth}{KEY}" if depth else "",
            f"<h2>Introduced error over budget, among siblings</h2>{siblings}{SIBLINGS_KEY}" if siblings else "",
            causes_section(report["causes"]),
            lint_section(report),
            modules_section(report["modules"]),
            weights_section(report["weights"]),
            uncompared_section(report),
            checks_section(report),
            environment_section(report["environment"]),
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
    cause, void = leading_cause(report), voiding(report)
    said = ""
    if cause is not None:
        said = (
            f"<p><b>{escape(str(cause['kind']))}</b> ({escape(percent(cause['confidence']))}): "
            f"{escape(str(cause['says']))}</p>"
        )
    if void is not None and report["verdict"] != "incomparable":
        said += f'<p class="void"><b>check first</b>: {escape(str(void["says"]))}</p>'
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
        yield f"Top-1 agreement, {tokens['compared']} tokens", percent(tokens["top1_agreement"]), diverges
        yield "KL divergence, mean per token", number(tokens["kl_mean"]), f"worst token {number(tokens['kl_max'])}"
    routing = report["routing"]
    if routing is not None:
        flips, benign = int(routing["flips"]), int(routing["benign"])
        fault = f", {flips - benign} not" if flips > benign else ""
        yield "Routing flips", str(flips), f"of {routing['decisions']} decisions; {benign} within rounding{fault}"
    coverage = report["coverage"]
    flops = "" if coverage["flops"] is None else f", {percent(coverage['flops'])} of the flops"
    note = f"of the parameters; {percent(coverage['modules'])} of the modules{flops}"
    yield "Compared", percent(coverage["parameters"]), note
    lint = grouped_lint(report)
    if lint:
        certain = sum(line.certain for line in lint)
        yield "Numeric contracts", str(len(lint)), f"kept less well than in the golden; {certain} certain"
