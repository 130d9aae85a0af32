"""The parts of a whole model's proof: its logits in a prefill, decode steps, chunks, left-padded, and after images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from porter.models.cache_argument import cache_keyword
from porter.models.images import image_prompt

TOKENS = 13
DECODED = 3

Part = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def random_tokens(model: nn.Module, batch: int = 2) -> torch.Tensor:
    """Token ids [batch, TOKENS] for a model, the same every time."""
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    return torch.randint(0, vocabulary, (batch, TOKENS), generator=torch.Generator().manual_seed(1))


def _prefill(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits  # type: ignore[no-any-return]


def _left_padded(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return model(ids, attention_mask=mask, use_cache=False).logits[:, 4:]  # type: ignore[no-any-return]


def _decode(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return _fed(model, ids, [TOKENS - DECODED, *[1] * DECODED])


def _chunked(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return _fed(model, ids, [5, TOKENS - 5])


def _prefill_images(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    prompt = image_prompt(model)
    return model(prompt.input_ids, use_cache=False, **prompt.keywords).logits  # type: ignore[no-any-return]


def _left_padded_images(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    prompt = image_prompt(model)
    mask = torch.ones_like(prompt.input_ids)
    mask[0, :4] = 0
    output = model(prompt.input_ids, attention_mask=mask, use_cache=False, **prompt.keywords)
    return output.logits[:, 4:]  # type: ignore[no-any-return]


def _decode_images(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    prompt = image_prompt(model)
    rest = prompt.input_ids.shape[1] - prompt.head
    return _fed(model, prompt.input_ids, [prompt.head, *[1] * rest], prompt.first(prompt.head))


def _chunked_images(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    prompt = image_prompt(model)
    sizes = [prompt.head, prompt.input_ids.shape[1] - prompt.head]
    return _fed(model, prompt.input_ids, sizes, prompt.first(prompt.head))


def _fed(
    model: nn.Module, ids: torch.Tensor, sizes: list[int], images: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> torch.Tensor:
    """Logits of all but the first piece, with `ids` fed in pieces of those sizes through one cache, and `images` with
    the first."""
    keyword = cache_keyword(model)
    if not keyword:
        raise TypeError(f"{type(model).__name__}.forward takes no cache")
    cache, logits = None, []
    for piece in ids.split(sizes, dim=1):
        output = model(piece, use_cache=True, **(images if cache is None else {keyword: cache}))
        cache = getattr(output, keyword)
        logits.append(output.logits)
    return torch.cat(logits[1:], dim=1)


PARTS: Mapping[str, Part] = {
    "prefill": _prefill,
    "decode": _decode,
    "chunked": _chunked,
    "left_padded": _left_padded,
}
IMAGE_PARTS: Mapping[str, Part] = {
    "prefill with images": _prefill_images,
    "decode after images": _decode_images,
    "chunked after images": _chunked_images,
    "left_padded with images": _left_padded_images,
}
