"""The alignment report for a tired reader: one headline, the cause, and the model's tree opened at the fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from porter.alignment.report_figures import allowed, before_and_after, differs, named, number, percent
from porter.alignment.report_findings import checks_that_say_something, grouped_lint
from porter.alignment.report_headline import headline
from porter.alignment.report_summary import causes_of, leading_cause
from porter.alignment.report_tree import (
    LISTED_AT_MOST,
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

VERDICT_STYLE = {"ALIGNED": "bold green", "DRIFT": "bold red", "INCOMPARABLE": "bold yellow"}
STATUS_STYLE = {"ok": "green", "drift": "bold red", "inherited": "yellow", "flipped": "magenta", "skipped": "dim"}
CAUSES_AT_MOST = 4


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print a `porter.alignment/1` report on `console`; plain text where the console is not a terminal."""
    verdict, sentence = headline(report)
    console.print(Text.assemble((verdict, VERDICT_STYLE[verdict]), "  ", sentence), soft_wrap=True)
    cause = leading_cause(report)
    if cause is not None:
        console.print(Text.assemble(("cause  ", "bold"), cause_line(cause)), soft_wrap=True)
    console.print()
    if report["modules"]:
        console.print(module_tree(report), soft_wrap=True)
        console.print()
    for line in sections(report):
        console.print(line, soft_wrap=True)


def cause_line(cause: Mapping[str, Any]) -> Text:
    """A cause with its confidence and the error before and after undoing it."""
    numbers = f"  [{before_and_after(cause)}]"
    confidence = f" ({percent(cause['confidence'])}): "
    return Text.assemble((str(cause["kind"]), "bold"), confidence, str(cause["says"]), (numbers, "dim"))


def module_tree(report: Mapping[str, Any]) -> Tree:
    """The modules as a tree: fine layers in one line, the drifting module opened with its numbers and causes."""
    root = tree_of(report)
    tree = Tree(_node_line(root, "modules"), guide_style="dim")
    _grow(tree, root, report, depth=0)
    return tree


def _grow(tree: Tree, node: Node, report: Mapping[str, Any], depth: int) -> None:
    for group in groups(list(node.children.values()), depth):
        first = group[0]
        if len(group) == 1 and opens(first, depth):
            branch = tree.add(_node_line(first, first.name))
            _detail(branch, first, report)
            _grow(branch, first, report, depth + 1)
        else:
            words, figures = group_story(group)
            style = STATUS_STYLE[first.kind()]
            tree.add(Text.assemble((group_name(group), "bold"), "  ", (words, style), (figures, "dim")))


def _node_line(node: Node, name: str) -> Text:
    if node.summary is None:
        return Text(name, "bold")
    status = node.summary.status
    label = status.upper() if status in OPENED else status
    return Text.assemble((name, "bold"), "  ", (label, STATUS_STYLE[status]), "  ", node_figures(node.summary))


def _detail(branch: Tree, node: Node, report: Mapping[str, Any]) -> None:
    if node.summary is None or node.summary.status not in OPENED:
        return
    for line in node_facts(node.summary):
        branch.add(Text(line, "dim"))
    for cause in causes_of(report, node.summary.module)[:CAUSES_AT_MOST]:
        branch.add(cause_line(cause))


def sections(report: Mapping[str, Any]) -> Iterator[Text]:
    """The lines below the tree: parameters, tokens, routing, coverage, and what was not compared."""
    yield from _weights(report["weights"])
    elsewhere = [c for c in report["causes"] if c["module"] not in {row["module"] for row in report["modules"]}]
    for cause in elsewhere[:CAUSES_AT_MOST]:
        yield Text.assemble((f"{cause['module']}  ", "bold"), cause_line(cause))
    yield from _tokens(report["tokens"])
    yield from _routing(report["routing"])
    yield from _lint(report)
    yield from _coverage(report)
    yield from _checks(report)


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<14}", "bold"), (text, style))


def _weights(weights: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    if not weights:
        return
    drifted = [w for w in weights if w["status"] == "drift"]
    skipped = sum(w["status"] == "skipped" for w in weights)
    said = f"{len(weights) - skipped} compared, {len(drifted)} differ" + (f", {skipped} skipped" if skipped else "")
    yield _labelled("parameters", said, STATUS_STYLE["drift"] if drifted else "")
    for w in drifted[:LISTED_AT_MOST]:
        yield Text(f"  {w['parameter']}: {differs(w)}{allowed(w)}")
    yield from _rest(len(drifted))


def _tokens(tokens: Mapping[str, Any] | None) -> Iterator[Text]:
    if tokens is None:
        return
    first = tokens["first_divergence"]
    diverges = "no divergence" if first is None else f"first divergence at token {first}"
    kl = f"KL mean {number(tokens['kl_mean'])}, max {number(tokens['kl_max'])}"
    agree = f"top-1 agreement {percent(tokens['top1_agreement'])}"
    yield _labelled("tokens", f"{tokens['compared']} compared, {agree}, {kl}, {diverges}")


def _routing(routing: Mapping[str, Any] | None) -> Iterator[Text]:
    if routing is None:
        return
    faults = routing["flips"] - routing["benign"]
    flips = f"{routing['flips']} flips, {routing['benign']} of them within rounding" if routing["flips"] else "no flips"
    said = f"{routing['decisions']} decisions, {flips}"
    yield _labelled("routing", said, STATUS_STYLE["drift"] if faults else "")


def _lint(report: Mapping[str, Any]) -> Iterator[Text]:
    findings = grouped_lint(report)
    if findings:
        yield _labelled("contracts", f"{len(findings)} kept less well than in the golden (read, not run)")
    for finding in findings[:LISTED_AT_MOST]:
        style = STATUS_STYLE["drift"] if finding.certain else ""
        yield Text.assemble(("  " + finding.where, "bold"), f": {finding.told}; {finding.why}", style=style)
    yield from _rest(len(findings))


def _checks(report: Mapping[str, Any]) -> Iterator[Text]:
    checks = checks_that_say_something(report)
    if checks:
        yield _labelled("captures", f"{len(checks)} of {len(report['sanity'])} checks have something to say")
    for check in checks[:LISTED_AT_MOST]:
        style = STATUS_STYLE["drift"] if check["status"] == "invalid" else "dim"
        where = f"{check['module']}: " if check["module"] else ""
        yield Text(f"  {check['status']}: {where}{check['says']}", style)
    yield from _rest(len(checks))


def _coverage(report: Mapping[str, Any]) -> Iterator[Text]:
    coverage = report["coverage"]
    shares = [
        f"{percent(coverage[key])} of the {key}"
        for key in ("modules", "parameters", "flops")
        if coverage[key] is not None
    ]
    yield _labelled("coverage", ", ".join(shares))
    skipped = coverage["skipped"]
    if skipped:
        yield _labelled("not compared", str(len(skipped)))
    for entry in skipped[:LISTED_AT_MOST]:
        yield Text(f"  {named(entry['module'])}: {entry['why']}", "dim")
    yield from _rest(len(skipped))
    for side in ("golden", "candidate"):
        names = list(report["unmatched"][side])
        if names:
            shown = ", ".join(map(str, names[:LISTED_AT_MOST])) + (", …" if len(names) > LISTED_AT_MOST else "")
            yield _labelled("unmatched", f"only in the {side}: {shown}")


def _rest(count: int) -> Iterator[Text]:
    if count > LISTED_AT_MOST:
        yield Text(f"  and {count - LISTED_AT_MOST} more (--json lists them all)", "dim")
