"""Builds what cases need, once each: checkpoints, goldens, healthy candidates; and fresh candidates to plant in."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import porter
from benchmarks.drift.case import Case
from benchmarks.drift.families import Family, checkpoint, read_text
from benchmarks.drift.quantized import Stored, quantize
from porter.golden.store import Golden
from porter.models.family import family_of

PROMPT, LONG, NEW_TOKENS = 24, 96, 4


@dataclass(frozen=True)
class Prepared:
    """A golden, its source model, and the tokens [rows, length] that it ran, with the mask of real ones."""

    golden: Golden
    source: Any
    tokens: Tensor
    mask: Tensor


class Workshop:
    """Everything is kept in `folder` (files) and in memory (models), by what it depends on."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self._kept: dict[tuple[Any, ...], Any] = {}

    def _once(self, key: tuple[Any, ...], build: Any) -> Any:
        if key not in self._kept:
            self._kept[key] = build()
        return self._kept[key]

    def prepared(self, case: Case) -> Prepared:
        """The case's golden and source."""
        key = ("golden", case.family.name, case.golden, case.golden_dtype)
        found: Prepared = self._once(key, lambda: self._prepare(case))
        return found

    def stored(self, case: Case) -> Stored:
        """Codes and scales of the quantized checkpoint that the golden came from; empty where there is none."""
        found: Stored = self._checkpoint(case.family, case.golden)[1]
        return found

    def healthy(self, case: Case) -> Any:
        """The candidate without a fault. Not to be changed."""
        form = case.form or ("port" if case.family.ported else "upstream")
        key = ("candidate", case.family.name, case.golden, form, case.pair, case.attention, case.experts)
        return self._once(key, lambda: self._candidate(case, form))

    def candidate(self, case: Case) -> Any:
        """A fresh candidate without a fault."""
        return copy.deepcopy(self.healthy(case))

    def _checkpoint(self, family: Family, golden: str) -> tuple[Path, Stored]:
        if golden not in ("blocks", "int4"):
            return checkpoint(family), {}
        found: tuple[Path, Stored] = self._once(
            ("checkpoint", family.name, golden), lambda: self._quantize(family, golden)
        )
        return found

    def _quantize(self, family: Family, golden: str) -> tuple[Path, Stored]:
        model = self._load(checkpoint(family), torch.float32, "eager")
        stored = quantize(model, golden)
        path = self.folder / f"{family.name}-{golden}"
        model.save_pretrained(path)
        return path, stored

    def _load(self, path: Path, dtype: torch.dtype, attention: str) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()

    def _prepare(self, case: Case) -> Prepared:
        source = self._load(self._checkpoint(case.family, case.golden)[0], case.golden_dtype, "eager")
        tokens, mask = self.prompts(case.golden)
        return Prepared(self.capture(case, source, "golden"), source, tokens, mask)

    def capture(self, case: Case, model: Any, name: str, **more: Any) -> Golden:
        """A recording of the case's prompts and the steps after them."""
        tokens, mask = self.prompts(case.golden)
        own = "-".join((case.family.name, case.golden, case.pair, name)).replace("/", "-")
        return porter.capture(model, tokens, self.folder / own, new_tokens=NEW_TOKENS, attention_mask=mask, **more)

    def prompts(self, golden: str) -> tuple[Tensor, Tensor]:
        """Two windows of the text, drawn by the seed; the second is shorter where rows are padded."""
        text = read_text()
        length = LONG if golden == "long" else PROMPT
        starts = torch.randint(len(text) - length, (2,), generator=torch.Generator().manual_seed(self.seed))
        tokens = text[starts[:, None] + torch.arange(length)]
        mask = torch.ones_like(tokens)
        if golden == "padded":
            mask[1, : length // 2] = 0
        return tokens, mask

    def _candidate(self, case: Case, form: str) -> Any:
        path = self._checkpoint(case.family, case.golden)[0]
        if form in ("w8a16", "w8a8"):
            output = self.folder / f"{case.family.name}-{case.golden}-{form}"
            if not output.exists():
                porter.adapt(str(path), target="cpu", scheme=form, dtype=case.pair.split("-")[1], output=str(output))
            return porter.load(str(output)).eval()
        stored = case.golden_dtype if case.pair == "bf16-fp32" else case.candidate_dtype
        source = self._load(path, stored, case.attention if form == "upstream" else "eager")
        if stored != case.candidate_dtype:
            source = source.to(case.candidate_dtype)
        if case.experts:
            source.set_experts_implementation(case.experts)
        return source if form == "upstream" else ported(source)


def ported(source: Any) -> Any:
    """porter's port of an upstream model, with its weights."""
    config = type(source.config).from_dict(source.config.to_dict())
    family = family_of(config.model_type)
    generated = family.port(config)
    model: Any = generated.model_class()(config)
    model.load_state_dict(family.correspondence(config, generated).convert(source.state_dict()), assign=True)
    if config.tie_word_embeddings:
        model.tie_weights()
    model.config.dtype = next(source.parameters()).dtype
    return model.eval()
