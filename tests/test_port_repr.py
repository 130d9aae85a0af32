"""A port in a notebook is one line, not a model's config."""

from __future__ import annotations

import porter


def test_the_repr_of_a_port_is_one_short_line() -> None:
    shown = repr(porter.adapt("tiny-qwen3", target="cpu", plan=True))
    assert shown.startswith("Port('tiny-qwen3' for cpu") and shown.endswith("classes ported, planned)")
    assert len(shown) < 100
