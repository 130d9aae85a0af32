"""The parts of the HTML report that are read first: the tree opened at the fault, contracts, checks of the captures."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from porter.alignment.report_figures import before_and_after
from porter.alignment.report_findings import checks_that_say_something, grouped_lint, sanity_of
from porter.alignment.report_summary import causes_of
from porter.alignment.report_tables import table
from porter.alignment.report_tree import (
    OPENED,
    Node,
    group_name,
    group_story,
    groups,
    node_facts,
    node_figures,
    opens,
    tree_of,
)

LISTED = 200
"""Modules named in one line of the lint: beyond that their number says enough."""


def tree_section(report: Mapping[str, Any]) -> str:
    """The module tree as nested details that need no script; every drifting module stands open with its causes."""
    if not report["modules"]:
        return ""
    return f"<h2>Where</h2><div class=tree>{_children(tree_of(report), report, 0)}</div>"


def _children(node: Node, report: Mapping[str, Any], depth: int) -> str:
    items = []
    for group in groups(list(node.children.values()), depth):
        if len(group) == 1 and opens(group[0], depth):
            items.append(_opened(group[0], report, depth))
        else:
            items.append(_closed(group))
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _opened(node: Node, report: Mapping[str, Any], depth: int) -> str:
    summary = node.summary
    figures = status = story = ""
    if summary is not None:
        status = f'<span class="status {escape(summary.status)}">{escape(summary.status)}</span>'
        figures = f"<small>{escape(node_figures(summary))}</small>"
    if summary is not None and summary.status in OPENED:
        told = "".join(f"<p>{escape(line)}</p>" for line in node_facts(summary))
        story = f"<div class=story>{told}{_causes(report, summary.module)}</div>"
    line = f"<summary><b>{escape(node.name)}</b> {status} {figures}</summary>"
    return f"<li><details open>{line}{story}{_children(node, report, depth + 1)}</details></li>"


def _causes(report: Mapping[str, Any], module: str) -> str:
    return "".join(
        f"<p><b>{escape(str(cause['kind']))}</b>: {escape(str(cause['says']))} "
        f"<small>[{escape(before_and_after(cause))}]</small></p>"
        for cause in causes_of(report, module)
    )


def _closed(group: list[Node]) -> str:
    words, figures = group_story(group)
    kind = group[0].kind()
    inside = [summary for node in group for summary in node.summaries()]
    line = (
        f'<b>{escape(group_name(group))}</b> <span class="status {escape(kind)}">{escape(words)}</span>'
        f"<small>{escape(figures)}</small>"
    )
    if len(inside) < 2:
        return f"<li class=leaf>{line}</li>"
    listed = "".join(
        f"<li><code>{escape(s.module)}</code> <small>{escape(node_figures(s))}</small></li>" for s in inside
    )
    return f"<li><details><summary>{line}</summary><ul>{listed}</ul></details></li>"


def lint_section(report: Mapping[str, Any]) -> str:
    """Contracts that the candidate keeps less well than the golden; one row for what all layers have in common."""
    lines = grouped_lint(report)
    if not lines:
        return ""
    rows = []
    for line in lines:
        status = '<span class="status drift">certain</span>' if line.certain else '<span class="status">warning</span>'
        names = escape("\n".join(line.modules[:LISTED]))
        rows.append(
            f'<tr class="{"drift" if line.certain else ""}"><td><b>{escape(line.kind)}</b></td><td>{status}</td>'
            f'<td class=name title="{names}">{escape(line.where)}</td><td>{escape(line.told)}</td>'
            f"<td class=why>{escape(line.why)}</td></tr>"
        )
    said = (
        "<p class=key>Read from dtypes, configs and source text; nothing was run. A warning alone decides nothing.</p>"
    )
    head = ("contract", "", "module", "what", "why it matters")
    return f"<h2>Numeric contracts</h2>{table('lint', head, rows)}{said}"


def checks_section(report: Mapping[str, Any]) -> str:
    """Every check of the captures; opened where one says something."""
    checks = sanity_of(report)
    if not checks:
        return ""
    rows = [
        f'<tr class="{"drift" if check["status"] == "invalid" else ""}">'
        f'<td><span class="status {escape(str(check["status"]))}">{escape(str(check["status"]))}</span></td>'
        f"<td>{escape(str(check['check']))}</td><td class=name>{escape(str(check['module']) or '(model)')}</td>"
        f"<td>{escape(str(check['says']))}</td></tr>"
        for check in checks
    ]
    telling = len(checks_that_say_something(report))
    opened = " open" if telling else ""
    said = f"{telling} of {len(checks)} have something to say" if telling else f"all {len(checks)} in order"
    body = table("checks", ("", "check", "module", "what was found"), rows)
    return f"<h2>Checks of the captures</h2><details{opened}><summary>{said}</summary>{body}</details>"
