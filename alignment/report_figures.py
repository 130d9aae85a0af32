"""Figures and names as every report writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]
ERRORS = {"introduced": "introduced", "budget": "budget", "inherited": "inherited", "end_to_end": "end to end"}
INFINITE = 1e308
"""What a report has in place of infinity, which JSON does not know."""


def ratio(row: Row) -> float | None:
    """`introduced / budget` of a module row, or None."""
    introduced, budget = row.get("introduced"), row.get("budget")
    if introduced is None or not budget:
        return None
    return float(introduced) / float(budget)


def number(value: Any) -> str:
    """A measured figure as a person writes it, in at most eight characters: 0, 0.0312, 27.5, 80,000, 1.5e-7, 4e9; a
    dash where nothing was measured."""
    if value is None:
        return "-"
    value = float(value)
    if abs(value) >= INFINITE:
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if value == 0 or (value.is_integer() and size < 10_000):
        return f"{value:.0f}"
    if 0.00095 <= size < 1000:
        return f"{value:.{3 if size >= 0.01 else 2}g}"
    if 1000 <= size < 999_500:
        return f"{float(f'{value:.3g}'):,.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def times(value: float | None) -> str:
    """A ratio as a reader says it, such as `28x`."""
    return "-" if value is None else f"{number(value)}x"


def before_and_after(cause: Row) -> str:
    """The error that a cause explains, and what is left of it once it is undone, where that could be tried."""
    after = cause["after"]
    return f"error {number(cause['before'])}" + ("" if after is None else f" before, {number(after)} after")


def allowed(weight: Row) -> str:
    """What a parameter may differ by, after how it does; empty where nobody knows."""
    return "" if weight["expected"] is None else f", expected {number(weight['expected'])}"


def measured(row: Row) -> list[tuple[str, str]]:
    """The errors of a module row that were measured, as (what, figure)."""
    figures = [(label, row.get(name)) for name, label in ERRORS.items()]
    over = ratio(row)
    beside = {"budget": "" if over is None else f" ({times(over)})"}
    return [(label, number(value) + beside.get(label, "")) for label, value in figures if value is not None]


def named(module: Any) -> str:
    """A module's name; the whole model has none of its own."""
    return str(module) or "(model)"


def percent(value: Any) -> str:
    """A fraction as a percentage that never rounds up to 100 %."""
    if value is None:
        return "-"
    shown = f"{100 * float(value):.4g}"
    return f"{'>99.99' if shown == '100' and float(value) < 1 else shown} %"


def cosine(value: Any) -> str:
    """A cosine to six digits, never rounded up: 1.000000 means that no digit differs."""
    return "-" if value is None else f"{math.floor(float(value) * 1e6) / 1e6:.6f}"


def differs(weight: Row) -> str:
    """How a parameter differs; where no number says it, why."""
    error = weight["error"]
    if error is None or float(error) >= INFINITE:
        return str(weight.get("why") or "holds values that are not finite")
    return f"differs by {number(error)}"
