"""Check a directory against everything that is known to go wrong when vllm-ascend loads it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from porter.ascend_v1.check.config import config, index
from porter.ascend_v1.check.directory import AscendDirectory, open_directory
from porter.ascend_v1.check.finding import Finding
from porter.ascend_v1.check.names import missing_entries, prediction_entries, stored_tensors, unconsumed
from porter.ascend_v1.check.types import fused_groups, methods, plain_tensors, stored_floats, tensors
from porter.ascend_v1.check.values import Values
from porter.ascend_v1.original import original_of
from porter.errors import PorterError
from porter.models.own_code import family_of_checkpoint
from porter.models.presets import read_config

CHECKS: tuple[Callable[[AscendDirectory], Iterator[Finding]], ...] = (
    config,
    index,
    missing_entries,
    prediction_entries,
    stored_tensors,
    methods,
    fused_groups,
    tensors,
    stored_floats,
    plain_tensors,
    unconsumed,
)
"""Those that read headers alone; `Values` reads the scales, and the codes of static and int4 linears."""


@dataclass(frozen=True)
class Checked:
    """What was found in `directory`: faults, which make it unsound, and notes."""

    directory: AscendDirectory
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are no notes."""
        return tuple(f for f in self.findings if f.level == "fault")

    def to_json(self) -> dict[str, Any]:
        """Everything for programs."""
        return {
            "schema": "porter.ascend_check/1",
            "directory": str(self.directory.path),
            "model_type": self.directory.model_type,
            "types": dict(Counter(self.directory.described.values())),
            "faults": len(self.faults),
            "notes": len(self.findings) - len(self.faults),
            "findings": [finding.to_json() for finding in self.findings],
        }


def check_directory(
    path: Path, *, trust_remote_code: bool = False, progress: Callable[[int, int], None] | None = None
) -> Checked:
    """All findings, in the order of the checks. Raises PorterError for what is no AscendV1 directory, or unreadable."""
    directory = _with_original(open_directory(path), trust_remote_code)
    found = [finding for check in CHECKS for finding in check(directory)]
    found += Values(directory, progress).findings()
    return Checked(directory, tuple(found))


def _with_original(directory: AscendDirectory, trust_remote_code: bool) -> AscendDirectory:
    """`directory` with the names that its config calls for, where porter can tell them."""
    at = f"{directory.path}/config.json"
    stored = {name: directory.weights.info(name).shape for name in directory.weights.names}
    try:
        model_config = read_config(directory.path, trust_remote_code)
    except PorterError as error:
        known = directory.config.get("model_type") in [*CONFIG_MAPPING]
        return dataclasses.replace(directory, unknown=str(error), unbuildable=known)
    try:
        family = family_of_checkpoint(model_config, directory.path, f"{at}: model_type", trust_remote_code)
        return dataclasses.replace(directory, original=original_of(model_config, family, stored))
    except PorterError as error:
        return dataclasses.replace(directory, unknown=str(error))
