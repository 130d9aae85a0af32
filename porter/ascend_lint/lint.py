"""The lint as a whole: of any model that calls torch_npu, and of a directory that porter wrote for an Ascend chip."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.ascend_lint import arguments, masks, stored, values
from porter.ascend_lint.evidence import Evidence
from porter.ascend_lint.finding import LintedFault
from porter.ascend_lint.trace import traced
from porter.checkpoint.reader import Checkpoint
from porter.chips.catalogue import Chip, load_catalogue
from porter.emulation import has_npu
from porter.errors import PorterError
from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator, active_emulator, emulated_npu
from porter.kernels.dispatch import usage
from porter.runtime import load, read_manifest

LINTS: tuple[Callable[[Evidence], Iterator[LintedFault]], ...] = (
    stored.unread,
    stored.dtypes,
    stored.tables,
    stored.blocked,
    arguments.epsilons,
    arguments.scales,
    arguments.gating,
    arguments.norm_weights,
    masks.polarity,
    masks.missing,
    masks.sparse,
    values.shared,
    values.origin,
)
TOKENS, DECODED = 24, 2
"""Tokens of the sequence that a directory's model runs, and steps after it."""


def lint_model(
    model: nn.Module,
    config: Mapping[str, Any],
    chip: Chip,
    emulator: Emulator,
    run: Callable[[], object],
    stored_dtypes: Mapping[str, str] | None = None,
) -> list[LintedFault]:
    """What is wrong with `model`, whose calls of torch_npu go to `emulator` while `run()` runs it; each thing once.

    `stored_dtypes`: the dtype of each tensor of its checkpoint, as headers write it ("BF16"). A call that the catalogue
    refuses ends the run and is a finding, as is one that an OpCall left to the reference.
    """
    refused: list[LintedFault] = []
    with traced(model, emulator) as trace:
        try:
            with torch.no_grad():
                run()
        except VendorRefusal as refusal:
            refused.append(_refused(trace.running, str(refusal)))
    refused += _fallbacks(model)
    evidence = Evidence(model, config, chip, trace, stored_dtypes or {})
    found = [finding for lint in LINTS for finding in lint(evidence)]
    return list(dict.fromkeys([*refused, *found]))


def lint_directory(directory: Path, trust_remote_code: bool = False) -> list[LintedFault]:
    """The lint of a port to an Ascend chip: its model runs a short sequence under the emulator.

    Raises PorterError for what is no such port, and where the real torch_npu is there, which the emulator replaces.
    """
    chip = load_catalogue().get(str(read_manifest(directory)["chip"]))
    if chip.device != "npu":
        raise PorterError(f"--check {directory}: is a port to {chip.name}; ports to Ascend chips are checked")
    if has_npu():
        raise PorterError(f"--check {directory}: needs a machine without torch_npu, which its emulator replaces")
    checkpoint = Checkpoint.open(directory)
    dtypes = {name: checkpoint.info(name).dtype for name in checkpoint.names}
    with emulated_npu(chip.name) as emulator:
        model = load(directory, trust_remote_code=trust_remote_code)
        config = model.config.to_dict()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, int(config["vocab_size"]), (1, TOKENS), generator=generator)

        def run() -> object:
            return model.generate(ids, max_new_tokens=DECODED + 1, min_new_tokens=DECODED + 1, do_sample=False)

        return lint_model(model, config, chip, emulator, run, dtypes)


def lint_loaded(model: nn.Module, directory: Path, ids: torch.Tensor) -> list[LintedFault]:
    """The lint of a port that is loaded already, on token `ids`, under the emulator that is active; empty without."""
    emulator, config = active_emulator(), getattr(model, "config", None)
    if emulator is None or config is None:
        return []
    checkpoint = Checkpoint.open(directory)
    dtypes = {name: checkpoint.info(name).dtype for name in checkpoint.names}
    chip = load_catalogue().get(emulator.chip)
    return lint_model(model, config.to_dict(), chip, emulator, lambda: model(ids), dtypes)


def _refused(name: str, words: str) -> LintedFault:
    remedy = "change the call to one that the vendor documents"
    return LintedFault("refused", name, "a call of torch_npu", "documented", f"not: {words}", remedy)


def _fallbacks(model: nn.Module) -> list[LintedFault]:
    """A finding for each call that the catalogue refused an OpCall, which the reference served."""
    return [
        _refused(str(row["site"]), str(fallback["reason"])) for row in usage(model) for fallback in row["fallbacks"]
    ]
