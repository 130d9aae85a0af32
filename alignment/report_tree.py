"""The model's tree as a report shows it: opened where a module drifts, fine neighbours in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from porter.alignment.report_figures import cosine, measured, number, times
from porter.alignment.report_summary import ModuleSummary, summarise

OPENED = ("drift", "flipped")
LISTED_AT_MOST = 12
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


def tree_of(report: Mapping[str, Any]) -> Node:
    """The modules of a report as a tree; the root is the model itself."""
    root = Node("")
    for summary in summarise(report["modules"]):
        node = root
        for segment in filter(None, summary.module.split(".")):
            node = node.children.setdefault(segment, Node(segment))
        node.summary = summary
    return root


def opens(node: Node, depth: int) -> bool:
    """Whether a node gets a line of its own and shows its children: down to the layers, and wherever something is."""
    return node.kind() in OPENED or (depth < 2 and bool(node.children) and not node.name.isdigit())


def groups(nodes: Sequence[Node], depth: int) -> list[list[Node]]:
    """Neighbours that need no line of their own, together when they have the same story."""
    found: list[list[Node]] = []
    for node in nodes:
        last = found[-1][0] if found else None
        joins = last is not None and not opens(node, depth) and not opens(last, depth) and last.kind() == node.kind()
        if joins:
            found[-1].append(node)
        else:
            found.append([node])
    return found


def group_name(group: Sequence[Node]) -> str:
    """`0-11` for layers, the names for others."""
    names = [node.name for node in group]
    if len(names) > 1 and all(name.isdigit() for name in names):
        return f"{names[0]}-{names[-1]}"
    return ", ".join(names) if len(names) <= LISTED_AT_MOST else f"{names[0]} … {names[-1]}"


def group_story(group: Sequence[Node]) -> tuple[str, str]:
    """What a closed group has to say: counts by status, and the figures that stand out."""
    summaries = [summary for node in group for summary in node.summaries()]
    kind = group[0].kind()
    parts = [
        words if len(summaries) == len(group) == 1 else f"{sum(s.status == status for s in summaries)} {words}"
        for status, words in SUMMARY_WORDS.items()
        if any(s.status == status for s in summaries)
    ]
    ratios = [r for s in summaries if (r := s.ratio) is not None]
    figures = f"; tightest {times(max(ratios))}" if ratios else ""
    ends = [float(e) for s in summaries if kind == "inherited" and (e := s.worst.get("end_to_end")) is not None]
    return ", ".join(parts), figures + (f"; end to end up to {number(max(ends))}" if ends else "")


def node_figures(summary: ModuleSummary) -> str:
    """The errors of a module at its worst step; of those that were measured."""
    return "  ".join(f"{what} {figure}" for what, figure in measured(summary.worst))


def node_facts(summary: ModuleSummary) -> list[str]:
    """What else is known of an opened module: where it comes from and what runs it, then why it is judged so."""
    row = summary.worst
    facts = [
        f"step {row['step']}" if summary.steps > 1 else "",
        f"source {row['source']}" if row["source"] != row["module"] else "",
        f"op {row['op']}" if row.get("op") else "",
        f"provider {row['provider']}" if row.get("provider") else "",
        f"cosine {cosine(row['cosine'])}" if row.get("cosine") is not None else "",
    ]
    return [line for line in (", ".join(filter(None, facts)), str(row.get("why") or "")) if line]
