"""The exports that faults are planted in, each made once, and copies of them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import porter
from benchmarks.ascend_faults.fault import Fault, Place
from porter.original import original_directory
from porter.quantization import scheme_named

CHIP = "ascend-910b"


class Workshop:
    """Exports and goldens below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, tuple[Path, porter.Golden]] = {}

    def port(self, place: Place) -> tuple[Path, porter.Golden]:
        """The export of `place` without faults, and the golden of its original in bfloat16."""
        if place.name not in self.made:
            home = self.folder / place.name
            home.mkdir(parents=True, exist_ok=True)
            original = original_directory(place.model)
            model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16).eval()
            ids = AutoTokenizer.from_pretrained(original)(place.prompt, return_tensors="pt").input_ids
            golden = porter.capture(model, ids, home / "golden", new_tokens=place.tokens)
            samples = home / "prompts.txt"
            samples.write_text(f"{place.prompt} there was a little girl\nThe dog ran home\n")
            given = samples if scheme_named(place.scheme).calibrated else None
            porter.adapt(
                place.model, "ascend", scheme=place.scheme, output=home / "port", strict=True, calibration=given
            )
            self.made[place.name] = home / "port", golden
        return self.made[place.name]

    def faulty(self, fault: Fault) -> Path:
        """A copy of the export with the fault in it; files that the fault does not touch are links."""
        port, _ = self.port(fault.place)
        copy = self.folder / "faulty" / fault.id
        copy.mkdir(parents=True)
        for file in port.iterdir():
            os.link(file, copy / file.name)
        for edit in fault.edits:
            edit.plant(copy)
        return copy
