"""The tokenizer of a checkpoint directory; no code from the directory runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from porter.errors import PorterError
from porter.models.auto_class import model_type_of, text_config


def tokenizer_of(directory: str | Path) -> Any:
    """The directory's tokenizer. Raises PorterError where there is none."""
    from transformers import AutoTokenizer

    if not any((Path(directory) / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise PorterError(
            f"{directory}: no tokenizer.json, tokenizer.model or vocab.json; copy the model's tokenizer there"
        )
    try:
        return AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, **_without_own_code(Path(directory))
        )
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot parse
        reason = " ".join(str(error).split())[:300]
        raise PorterError(
            f"{directory}: tokenizer.json or tokenizer_config.json is unusable ({reason}); copy the model's own there"
        ) from error


def _without_own_code(directory: Path) -> dict[str, Any]:
    """For a checkpoint whose type transformers does not know: an empty config in place of its own, which is code."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if not (directory / "config.json").is_file():
        return {}
    known = model_type_of(directory) in CONFIG_MAPPING
    return {} if known else {"config": PreTrainedConfig(), "trust_remote_code": False}


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    """Token ids [1, length] of `text`. Raises PorterError for a text without tokens, and a tokenizer that fails."""
    try:
        ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    except Exception as error:  # as above: some faults of the files show only here
        raise PorterError(
            f"{tokenizer.name_or_path}: its tokenizer files fail on this text ({type(error).__name__}: {error}); copy "
            "the model's own there"
        ) from error
    if ids.numel() == 0:
        raise PorterError("the prompt has no tokens; give some text")
    return ids.long()  # type: ignore[no-any-return]


def check_vocabulary(token_ids: torch.Tensor, config: Any) -> None:
    """Raise PorterError for a token id that the model of `config` has no embedding for."""
    size = text_config(config).vocab_size
    outside = token_ids[(token_ids < 0) | (token_ids >= size)]
    if outside.numel():
        raise PorterError(
            f"token id {int(outside[0])} of the text is outside the model's vocabulary of {size}; use the "
            "tokenizer files that belong to the model"
        )
