"""An exported Ascend model at work: its own code, loaded by transformers alone, over whichever torch_npu is there."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from porter.kernels.ascend.emulator.stand_in import Emulator, Observer

NEW_TOKENS = 12
LENGTHS = (1, 7, 19)
"""Prompt lengths; the two longest also make one left-padded batch."""


def chip_of(directory: Path) -> str:
    """The chip that an exported directory was written for."""
    chip: str = json.loads((directory / "port.json").read_text(encoding="utf-8"))["chip"]
    return chip


def generated(
    directory: Path, emulation: AbstractContextManager[Emulator], observers: tuple[Observer, ...] = ()
) -> dict[str, Any]:
    """What the model of `directory` generates greedily inside `emulation`.

    "tokens": one list for each prompt; "logits": a digest of the bits of the first step's logits for each; "calls": how
    often each operator of torch_npu was called.
    """
    from transformers import AutoModelForCausalLM

    calls: Counter[str] = Counter()
    with emulation as emulator, torch.no_grad():
        emulator.observers += [*observers, lambda call, result: calls.update([call.op.name])]
        model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()
        tokens, logits = [], []
        for ids, mask in prompts(model.config.vocab_size):
            logits.append(digest(model(input_ids=ids, attention_mask=mask).logits))
            text = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
            )
            tokens += text.tolist()
    return {"tokens": tokens, "logits": logits, "calls": dict(sorted(calls.items()))}


def prompts(vocabulary: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, attention_mask) of each batch."""
    rows = [torch.arange(3, 3 + 11 * length, 11) % vocabulary for length in LENGTHS]
    batches = [(row[None], torch.ones_like(row)[None]) for row in rows]
    short, long = rows[-2:]
    padding = len(long) - len(short)
    mask = torch.ones(2, len(long), dtype=torch.long)
    mask[0, :padding] = 0
    return [*batches, (torch.stack([torch.cat([short.new_zeros(padding), short]), long]), mask)]


def digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's bits."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
