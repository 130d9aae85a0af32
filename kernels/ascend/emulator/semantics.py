"""What each operator of the catalogue computes, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.norm import SEMANTICS as NORM

Semantics = Callable[[Call], Any]

SEMANTICS: Mapping[str, Semantics] = {**NORM}
"""The CPU computation of each operator, given a call that the catalogue has checked."""
