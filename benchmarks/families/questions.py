"""The questions that every family must answer with yes, each a function of a ported checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import porter
from benchmarks.families.subjects import Subject
from porter.generation import generate
from porter.models.images import ImagePrompt, image_prompt, reads_image_grids
from porter.models.proof import BOUND
from porter.original import original_model

NEW_TOKENS = 64
PADDED = 4
"""Tokens by which the shorter prompt with images is padded."""

LOAD_WITHOUT_PORTER = """
import json, sys
sys.meta_path.insert(0, type("Absent", (), {"find_spec": staticmethod(lambda name, *_: (_ for _ in ()).throw(
    ModuleNotFoundError(name)) if name.split(".")[0] == "porter" else None)})())
import torch
import transformers
model = getattr(transformers, sys.argv[3]).from_pretrained(sys.argv[1], trust_remote_code=True, dtype="auto").eval()
ids = torch.tensor([json.loads(sys.argv[2])])
with torch.no_grad():
    print(json.dumps(model(ids).logits[0, -1].argmax().item()))
"""


@dataclass(frozen=True)
class Answer:
    """Whether the answer is yes, and the figure behind it."""

    yes: bool
    figure: str


@dataclass
class Ported:
    """A subject with its port, both as models in float32."""

    subject: Subject
    port: porter.Port
    folder: Path

    @cached_property
    def original(self) -> Any:
        """The checkpoint under plain transformers."""
        return original_model(self.subject.directory, dtype=torch.float32)

    @cached_property
    def model(self) -> nn.Module:
        """The exported directory, loaded."""
        return porter.load(self.directory)

    @cached_property
    def images(self) -> ImagePrompt | None:
        """A batch of prompts with images of different sizes; None for a model that reads none."""
        return image_prompt(self.original) if reads_image_grids(self.original) else None

    @property
    def directory(self) -> Path:
        """The exported directory."""
        assert self.port.directory is not None
        return self.port.directory

    @cached_property
    def decoded(self) -> Any:
        """The report of aligning a prefill and NEW_TOKENS cached steps: of prompts with images where the model reads
        them, else of one text."""
        if self.images is not None:
            return self.aligned_images(torch.ones_like(self.images.input_ids), NEW_TOKENS)
        return self.aligned([self.subject.rows[0]], NEW_TOKENS)

    def aligned(self, rows: list[list[int]], new_tokens: int) -> Any:
        """The report of aligning the port with the original on `rows`, padded on the left to one length."""
        with tempfile.TemporaryDirectory(dir=self.folder) as golden:
            recorded = porter.capture(self.original, rows, Path(golden) / "golden", new_tokens=new_tokens)
            return porter.align(recorded, self.directory)

    def aligned_images(self, mask: torch.Tensor, new_tokens: int) -> Any:
        """The report of aligning the port with the original on the prompts with images."""
        with tempfile.TemporaryDirectory(dir=self.folder) as golden:
            with porter.recording(self.original, Path(golden) / "golden"):
                self.said(self.original, mask, new_tokens)
            return porter.align(Path(golden) / "golden", self.directory)

    def said(self, model: Any, mask: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """The greedy tokens of `model` after the prompts with images."""
        assert self.images is not None
        inputs = {"input_ids": self.images.input_ids, "attention_mask": mask, **self.images.keywords}
        model.generation_config.eos_token_id = None
        generated = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return generated[:, mask.shape[1] :]  # type: ignore[no-any-return]


def proof(ported: Ported) -> Answer:
    """The largest error of the whole model's float64 proof."""
    error = max(ported.port.source.proof.errors.values())
    return Answer(error <= BOUND, f"{error:.0e}")


def prefill(ported: Ported) -> Answer:
    """Every module of the prefill within its budget."""
    return _within_budget(ported.decoded, lambda step: step == 0)


def decode(ported: Ported) -> Answer:
    """Every module of the cached steps within its budget, and the free run's tokens the golden's."""
    answer = _within_budget(ported.decoded, lambda step: step > 0)
    return Answer(answer.yes and ported.decoded.verdict == "aligned", answer.figure)


def left_padded(ported: Ported) -> Answer:
    """Two prompts of different lengths in one batch, aligned."""
    if ported.images is None:
        report = ported.aligned(list(ported.subject.rows), 4)
    else:
        mask = torch.ones_like(ported.images.input_ids)
        mask[0, :PADDED] = 0
        report = ported.aligned_images(mask, 4)
    answer = _within_budget(report, lambda step: True)
    return Answer(answer.yes and report.verdict == "aligned", answer.figure)


def generation(ported: Ported) -> Answer:
    """Greedy tokens of porter's own generation and of transformers', in float32; after images, where the model reads
    them, of the ported model's `generate`."""
    if ported.images is not None:
        mask = torch.ones_like(ported.images.input_ids)
        same = (ported.said(ported.model, mask, NEW_TOKENS) == ported.said(ported.original, mask, NEW_TOKENS)).all(0)
        if not bool(same.all()):
            return Answer(False, f"{int(same.long().cumprod(0).sum())}/{NEW_TOKENS} after images")
    ids = torch.tensor([ported.subject.rows[0]])
    ported.original.generation_config.eos_token_id = None
    theirs = ported.original.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )[0, ids.shape[1] :].tolist()
    ours = [int(step.tokens[0]) for step in generate(ported.model, ids, NEW_TOKENS)]
    equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), NEW_TOKENS)
    return Answer(equal == NEW_TOKENS, f"{equal}/{NEW_TOKENS}")


def round_trip(ported: Ported) -> Answer:
    """The checkpoint's own tensors from those of the export, bit for bit, prediction layers among them."""
    port = ported.port
    state = {**ported.model.state_dict(), **_tensors(ported.directory)}
    if port.prediction is not None:
        state = port.prediction.correspondence.invert(state)
    back = port.layout.invert(port.correspondence.invert(state))
    if port.prediction is not None:
        back = port.prediction.layout.invert(back)
        back |= {name: back[of] for name, of in port.prediction.copies.items()}
    disk = _tensors(ported.subject.directory)
    same = sum(name in back and torch.equal(tensor.float(), back[name].float()) for name, tensor in disk.items())
    return Answer(same == len(disk), f"{same}/{len(disk)}")


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    """What the directory's weight files hold."""
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


def without_porter(ported: Ported) -> Answer:
    """The directory loads, and predicts the original's token, in a process that cannot import porter."""
    row, family = ported.subject.rows[0], ported.subject.family
    with torch.no_grad():
        wanted = int(ported.original(torch.tensor([row])).logits[0, -1].argmax())
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_PORTER, str(ported.directory), json.dumps(row), family.auto_class],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(ported.folder / "hf")},
        cwd=ported.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return Answer(False, done.stderr.strip().splitlines()[-1][:80])
    token = int(done.stdout.splitlines()[-1])
    return Answer(token == wanted, "same token" if token == wanted else f"token {token}, not {wanted}")


def _within_budget(report: Any, chosen: Callable[[int], bool]) -> Answer:
    """Rows of the chosen steps: compared, none in drift; the figure is the largest share of a budget used."""
    rows = [row for row in report.modules if chosen(row.step) and row.status != "skipped"]
    shares = [row.introduced / row.budget for row in rows if row.introduced is not None and row.budget]
    return Answer(bool(rows) and all(row.status != "drift" for row in rows), f"{max(shares, default=0):.2f} of budget")


QUESTIONS: Mapping[str, Callable[[Ported], Answer]] = {
    "float64 proof": proof,
    "prefill": prefill,
    f"decode, {NEW_TOKENS} steps": decode,
    "left-padded": left_padded,
    f"{NEW_TOKENS} greedy tokens": generation,
    "round trip": round_trip,
    "without porter": without_porter,
}
