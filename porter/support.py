"""Which chips a family runs on, how much of it natively, and how that is known."""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch

from porter.chips.catalogue import Chip
from porter.kernels.contract import Rung
from porter.kernels.registry import REFERENCE
from porter.models.family import Family
from porter.models.presets import preset_names, resolve
from porter.plan import OpPlan, op_plans

RUNGS: tuple[str, ...] = get_args(Rung)


@dataclass(frozen=True)
class Support:
    """One family on one chip.

    `native` of the family's `ops` Ops have a kernel there; the others, `reference`, run as plain torch. `rungs` counts
    the native ones by their evidence, strongest first; `evidence` is the lowest of them, "none" without any.
    """

    chip: str
    native: int
    ops: int
    evidence: str
    rungs: dict[str, int]
    reference: tuple[str, ...]


def family_config(family: Family) -> Any:
    """The config that stands for a family: its first preset's, else transformers' default."""
    presets = preset_names(family.model_type)
    config = copy.deepcopy(resolve(presets[0]).config) if presets else _upstream(family).config_class()
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def _upstream(family: Family) -> Any:
    return getattr(importlib.import_module(family.module), family.class_name)


def support(family: Family, chips: Iterable[Chip]) -> list[Support]:
    """The family's Ops, as its proven port of `family_config` calls them, on each chip."""
    config = family_config(family)
    source = family.port(config)
    config.porter = {}
    with torch.device("meta"):
        model = source.model_class()(config)
    return [_on_chip(chip.name, op_plans(model, chip, _computes_in(chip))) for chip in chips]


def _computes_in(chip: Chip) -> torch.dtype:
    """The dtype of a port there: bf16, or fp32 on chips without it."""
    return torch.bfloat16 if "bfloat16" in chip.dtypes else torch.float32


def _on_chip(chip: str, plans: tuple[OpPlan, ...]) -> Support:
    native = [plan for plan in plans if plan.provider != REFERENCE]
    counts = Counter(plan.evidence for plan in native)
    rungs = {rung: counts[rung] for rung in reversed(RUNGS) if rung in counts}
    missing = tuple(f"{plan.op}/{plan.variant}" for plan in plans if plan.provider == REFERENCE)
    return Support(chip, len(native), len(plans), next(reversed(rungs), "none"), rungs, missing)
