"""Inputs with images for models that take patches and grids, as Qwen's vision-language models do.

Such a model reads `pixel_values` [patches, values of a patch], `image_grid_thw` [images, 3] (frames, rows and
columns of patches), and prompts in which each image stands as one image token for every merged square of patches.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from porter.models.reduce_vision import SPECIAL

GRIDS = (((1, 4, 6),), ((1, 4, 4), (1, 2, 4)))
"""Rows of a batch with the grids of their images: one image, and two of other sizes."""
PATCH_FIELDS = ("in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size")
TEXT_BEFORE, TEXT_BETWEEN, LENGTH = 5, 1, 19


@dataclass(frozen=True)
class ImagePrompt:
    """Token ids [batch, length], the model's other inputs with the images, and how many tokens hold all images."""

    input_ids: torch.Tensor
    keywords: dict[str, torch.Tensor]
    head: int

    def first(self, tokens: int) -> dict[str, torch.Tensor]:
        """The other inputs of a step on the first `tokens` of each row; `head` at least."""
        return {n: v[:, :tokens] if v.shape == self.input_ids.shape else v for n, v in self.keywords.items()}


def reads_image_grids(model: nn.Module) -> bool:
    """Whether the model's forward takes images as patches and grids, of sizes that its config states as Qwen's do."""
    vision = getattr(model.config, "vision_config", None)
    stated = all(isinstance(getattr(vision, name, None), int) for name in PATCH_FIELDS)
    return stated and "image_grid_thw" in inspect.signature(model.forward).parameters


def forget_positions(model: nn.Module) -> None:
    """Drop what a vision-language model keeps of its last prompt with images: how far their positions run ahead.

    transformers uses it in the next steps of whatever prompt the model is given.
    """
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None  # type: ignore[assignment]


def image_prompt(model: Any) -> ImagePrompt:
    """A batch of two prompts, the first with one image, the second with two of other sizes; the same every time."""
    config, generator = model.config, torch.Generator().manual_seed(2)
    vision, merged = config.vision_config, config.vision_config.spatial_merge_size**2
    special = {getattr(config, name, None) for name in SPECIAL}
    text = torch.tensor([i for i in range(config.get_text_config().vocab_size) if i not in special])
    ids = text[torch.randint(len(text), (len(GRIDS), LENGTH), generator=generator)]
    head = 0
    for row, grids in zip(ids, GRIDS, strict=True):
        place = TEXT_BEFORE
        for frames, rows, columns in grids:
            tokens = frames * rows * columns // merged
            row[place : place + tokens] = config.image_token_id
            head, place = max(head, place + tokens), place + tokens + TEXT_BETWEEN
    grid = torch.tensor([each for grids in GRIDS for each in grids])
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    keywords = {
        "pixel_values": torch.randn(int(grid.prod(-1).sum()), values, generator=generator),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }
    accepted = inspect.signature(model.forward).parameters
    return ImagePrompt(ids, {name: value for name, value in keywords.items() if name in accepted}, head)
