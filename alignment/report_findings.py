"""The checks and the lint of a report as the renderers show them: one line for what all layers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from porter.alignment.report_figures import Row

ORDER = ("invalid", "uncovered", "note", "ok")


@dataclass(frozen=True)
class LintLine:
    """Findings that differ only in their module. `where`: the first of them, and how many more there are."""

    kind: str
    where: str
    modules: tuple[str, ...]
    told: str
    why: str
    certain: bool


def grouped_lint(report: Mapping[str, Any]) -> list[LintLine]:
    """The lint of a report, the certain findings first; empty for a report of before there was one."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for finding in report.get("lint") or ():
        key = tuple(finding[name] for name in ("kind", "what", "golden", "candidate", "certain"))
        found.setdefault(key, []).append(finding)
    lines = [_line(group) for group in found.values()]
    return sorted(lines, key=lambda line: not line.certain)


def _line(group: list[Row]) -> LintLine:
    first = group[0]
    modules = tuple(str(finding["module"]) for finding in group)
    more = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
    return LintLine(
        str(first["kind"]),
        f"{modules[0] or '(model)'}{more}",
        modules,
        f"{first['what']} is {first['candidate']}, {first['golden']} in the golden",
        str(first["why"]),
        bool(first["certain"]),
    )


def sanity_of(report: Mapping[str, Any]) -> list[Row]:
    """Every check of the captures, what voids the comparison first."""
    return sorted(report.get("sanity") or (), key=lambda check: ORDER.index(check["status"]))


def checks_that_say_something(report: Mapping[str, Any]) -> list[Row]:
    """Those that are not simply in order."""
    return [check for check in sanity_of(report) if check["status"] != "ok"]


def voiding(report: Mapping[str, Any]) -> Row | None:
    """The first check that voids the comparison."""
    return next((check for check in sanity_of(report) if check["status"] == "invalid"), None)
