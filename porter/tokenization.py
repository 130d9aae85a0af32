"""The tokenizer of a checkpoint directory; no code from the directory runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from porter.errors import PorterError


def tokenizer_of(directory: str | Path) -> Any:
    """The directory's tokenizer. Raises PorterError where there is none."""
    from transformers import AutoTokenizer

    if not any((Path(directory) / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise PorterError(
            f"{directory}: no tokenizer.json, tokenizer.model or vocab.json; copy the model's tokenizer there"
        )
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise PorterError(
            f"{directory}: the tokenizer cannot be read ({error}); copy the model's own files there"
        ) from error


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    """Token ids [1, length] of `text`. Raises PorterError for a text without tokens."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    if ids.numel() == 0:
        raise PorterError("the prompt has no tokens; give some text")
    return ids.long()  # type: ignore[no-any-return]
