"""What a sweep tried, for the terminal: below the report of the regime that it found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from porter.alignment.report_figures import number

LISTED_AT_MOST = 16


def print_sweep(sweep: Mapping[str, Any], console: Console) -> None:
    """Print the report's `sweep` on `console`."""
    console.print()
    for line in _lines(sweep):
        console.print(line, soft_wrap=True)


def _lines(sweep: Mapping[str, Any]) -> Iterator[Text]:
    tried = sweep["tried"]
    regimes = len({each["says"] for each in tried})
    yield _labelled("sweep", f"{regimes} regimes in {sweep['runs']} runs; {sweep['says']}")
    yield _labelled("", f"lengths up to {sweep['longest']}, limited by {sweep['limited_by']}", "dim")
    loads = sweep["tokens_per_expert"]
    if loads is not None:
        met = f"none {loads['none']} times, one {loads['one']} times, at most {loads['most']}"
        yield _labelled("", f"tokens per expert and call: {met}", "dim")
    if sweep["failing"] is not None:
        for each in tried[-LISTED_AT_MOST:]:
            yield Text(f"  {_outcome(each)}", "" if each["failing"] else "dim")
    for each in sweep["not_tried"][:LISTED_AT_MOST]:
        yield Text(f"  not tried: {each['regime']}: {each['why']}", "yellow")
    for each in sweep["source_inconsistent"]:
        where = f"{each['regime']['mode']} at sequence length {each['regime']['length']}"
        yield Text(
            f"  the source itself, in {where}, is {number(each['error'])} from its own prefill at once", "yellow"
        )


def _outcome(each: Mapping[str, Any]) -> str:
    verdict = "fails " if each["failing"] else "passes"
    numbers = f": {number(each['error'])} over {number(each['limit'])}" if each["error"] is not None else ""
    at = f" at {each['module']}{numbers}" if each["module"] else f" ({each['why']})" if each["why"] else ""
    return f"{verdict}  {each['says']}  [{each['judge']}]{at}"


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<14}", "bold"), (text, style))
