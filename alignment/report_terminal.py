"""The alignment report for a tired reader: one headline, the cause, and the model's tree opened at the fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from porter.alignment.report_summary import (
    ModuleSummary,
    causes_of,
    headline,
    leading_cause,
    number,
    percent,
    summarise,
    times,
)

VERDICT_STYLE = {"ALIGNED": "bold green", "DRIFT": "bold red", "INCOMPARABLE": "bold yellow"}
STATUS_STYLE = {"ok": "green", "drift": "bold red", "inherited": "yellow", "flipped": "magenta", "skipped": "dim"}
OPENED = ("drift", "flipped")
LISTED_AT_MOST = 12
CAUSES_AT_MOST = 4
SUMMARY_WORDS = {
    "ok": "within budget",
    "inherited": "with inherited error only",
    "skipped": "not compared",
}


@dataclass
class Node:
    """One segment of the module names, with the modules under it."""

    name: str
    summary: ModuleSummary | None = None
    children: dict[str, Node] = field(default_factory=dict)

    def summaries(self) -> Iterator[ModuleSummary]:
        """The summaries of this node and of all below it."""
        if self.summary is not None:
            yield self.summary
        for child in self.children.values():
            yield from child.summaries()

    def kind(self) -> str:
        """One of `OPENED`'s reasons to open the node, or the one quiet status that sums it up."""
        statuses = {summary.status for summary in self.summaries()}
        for status in (*OPENED, "inherited", "ok", "skipped"):
            if status in statuses:
                return status
        return "skipped"


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
    numbers = f"  [{number(cause['before'])} before, {number(cause['after'])} after]"
    confidence = f" ({percent(cause['confidence'])}): "
    return Text.assemble((str(cause["kind"]), "bold"), confidence, str(cause["says"]), (numbers, "dim"))


def module_tree(report: Mapping[str, Any]) -> Tree:
    """The modules as a tree: fine layers in one line, the drifting module opened with its numbers and causes."""
    root = Node("")
    for summary in summarise(report["modules"]):
        node = root
        for segment in filter(None, summary.module.split(".")):
            node = node.children.setdefault(segment, Node(segment))
        node.summary = summary
    tree = Tree(_node_line(root, "modules"), guide_style="dim")
    _grow(tree, root, report, depth=0)
    return tree


def _grow(tree: Tree, node: Node, report: Mapping[str, Any], depth: int) -> None:
    for group in _groups(list(node.children.values()), depth):
        first = group[0]
        if len(group) == 1 and _opens(first, depth):
            branch = tree.add(_node_line(first, first.name))
            _detail(branch, first, report)
            _grow(branch, first, report, depth + 1)
        else:
            tree.add(_group_line(group))


def _opens(node: Node, depth: int) -> bool:
    return node.kind() in OPENED or (depth < 2 and bool(node.children) and not node.name.isdigit())


def _groups(nodes: Sequence[Node], depth: int) -> list[list[Node]]:
    """Neighbours that need no line of their own, together when they have the same story."""
    groups: list[list[Node]] = []
    for node in nodes:
        last = groups[-1][0] if groups else None
        joins = last is not None and not _opens(node, depth) and not _opens(last, depth) and last.kind() == node.kind()
        if joins:
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _group_line(group: Sequence[Node]) -> Text:
    names = [node.name for node in group]
    if len(names) > 1 and all(name.isdigit() for name in names):
        name = f"{names[0]}-{names[-1]}"
    else:
        name = ", ".join(names) if len(names) <= LISTED_AT_MOST else f"{names[0]} … {names[-1]}"
    summaries = [summary for node in group for summary in node.summaries()]
    kind = group[0].kind()
    parts = [
        words if len(summaries) == len(group) == 1 else f"{sum(s.status == status for s in summaries)} {words}"
        for status, words in SUMMARY_WORDS.items()
        if any(s.status == status for s in summaries)
    ]
    text = Text.assemble((name, "bold"), "  ", (", ".join(parts), STATUS_STYLE[kind]))
    ratios = [r for s in summaries if (r := s.ratio) is not None]
    if ratios:
        text.append(f"; tightest {times(max(ratios))}", "dim")
    ends = [float(e) for s in summaries if kind == "inherited" and (e := s.worst.get("end_to_end")) is not None]
    if ends:
        text.append(f"; end to end up to {number(max(ends))}", "dim")
    return text


def _node_line(node: Node, name: str) -> Text:
    if node.summary is None:
        return Text(name, "bold")
    status = node.summary.status
    label = status.upper() if status in OPENED else status
    return Text.assemble((name, "bold"), "  ", (label, STATUS_STYLE[status]), "  ", (_numbers(node.summary), ""))


def _numbers(summary: ModuleSummary) -> str:
    row = summary.worst
    shown = [
        f"introduced {number(row.get('introduced'))}",
        f"budget {number(row.get('budget'))} ({times(summary.ratio)})",
        f"inherited {number(row.get('inherited'))}",
        f"end to end {number(row.get('end_to_end'))}",
    ]
    return "  ".join(shown)


def _detail(branch: Tree, node: Node, report: Mapping[str, Any]) -> None:
    if node.summary is None or node.summary.status not in OPENED:
        return
    row = node.summary.worst
    facts = [
        f"step {row['step']}" if node.summary.steps > 1 else "",
        f"source {row['source']}" if row["source"] != row["module"] else "",
        f"op {row['op']}" if row.get("op") else "",
        f"provider {row['provider']}" if row.get("provider") else "",
        f"cosine {row['cosine']:.6f}" if row.get("cosine") is not None else "",
    ]
    said = ", ".join(filter(None, facts))
    for line in filter(None, (said, str(row.get("why") or ""))):
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
    yield from _coverage(report)


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
        yield Text(f"  {w['parameter']}: differs by {number(w['error'])}, expected {number(w['expected'])}")
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
    said = f"{routing['decisions']} decisions, {routing['flips']} flips, {routing['benign']} of them within rounding"
    yield _labelled("routing", said, STATUS_STYLE["drift"] if faults else "")


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
        yield _labelled("not compared", f"{len(skipped)} modules")
    for entry in skipped[:LISTED_AT_MOST]:
        yield Text(f"  {entry['module']}: {entry['why']}", "dim")
    yield from _rest(len(skipped))
    for side in ("golden", "candidate"):
        names = list(report["unmatched"][side])
        if names:
            shown = ", ".join(map(str, names[:LISTED_AT_MOST])) + (", …" if len(names) > LISTED_AT_MOST else "")
            yield _labelled("unmatched", f"only in the {side}: {shown}")


def _rest(count: int) -> Iterator[Text]:
    if count > LISTED_AT_MOST:
        yield Text(f"  and {count - LISTED_AT_MOST} more (--json lists them all)", "dim")
