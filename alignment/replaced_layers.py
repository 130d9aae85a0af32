"""Layers whose weights are another's as a whole: the layer is what to name, not the first of its modules."""

from __future__ import annotations

import re
from collections.abc import Sequence

from porter.alignment.pairing import Pairing
from porter.alignment.report import FirstDrift
from porter.alignment.verdict import Drifted
from porter.alignment.weight import JudgedWeight

LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.)")
"""A module's name up to its first index."""
MOST = 0.6
"""Of a layer's weights; the rest may be equal in every layer, as norms that were not trained."""


def replaced_layers(weights: Sequence[JudgedWeight], pairing: Pairing) -> list[Drifted]:
    """One drift for each layer most of whose weights are wrong, before those of its modules.

    None where this holds for half of the layers or more: what is wrong everywhere is wrong with a kind of weight.
    """
    wrong: dict[str, list[bool]] = {}
    for judged in weights:
        found = LAYER.match(judged.weight.name)
        if found is not None and judged.row.status != "skipped" and judged.weight.is_parameter:
            wrong.setdefault(found.group(), []).append(judged.row.status == "drift")
    replaced = [layer for layer, faults in wrong.items() if sum(faults) > MOST * len(faults) and sum(faults) > 2]
    if 2 * len(replaced) >= len(wrong):
        return []
    drifts = []
    for layer in replaced:
        inside = [pair for pair in pairing.pairs if pair.module == layer or pair.module.startswith(f"{layer}.")]
        whole = pairing.by_module.get(layer)
        if inside and whole is not None:
            start = min(pair.position for pair in inside)
            drifts.append(Drifted((0, start), FirstDrift(layer, whole.source, 0, "parameters")))
    return drifts
