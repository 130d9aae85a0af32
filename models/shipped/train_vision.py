"""Trains the vision-language model that porter ships: `python models/shipped/train_vision.py tiny-qwen3-vl`.

It reads coloured numbers from rendered images (see `rendered_numbers`), and goes on with the novel where it is given
text alone. A run is on one thread, from a fixed seed, and writes the checkpoint, its tokenizer and its model card.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from porter.models.shipped.model_card import vision_card
from porter.models.shipped.recipe import Recipe, byte_tokenizer
from porter.models.shipped.recipes import RECIPES
from porter.models.shipped.rendered_numbers import LONGEST, Picture, picture
from porter.models.shipped.train import HERE, learning_rate, read_text, stored_precision, windows

TEXT_EVERY = 4
"""Every so many steps the batch is text alone."""

IMAGES = 32
GROWING = 0.4
"""The share of the steps in which numbers grow to their full length: the model must tell digits apart before it can
learn which of them to say next."""

HELD_OUT_SEED, HELD_OUT = 999_983, 300
"""Images that accuracy is measured on are drawn from a seed that training does not use."""


def inputs_of(pictures: Sequence[Picture], recipe: Recipe, with_captions: bool) -> dict[str, torch.Tensor]:
    """The arguments of the model for a prompt with each picture, padded on the left: image tokens between the marks,
    then the caption and the end-of-sequence token where they are wanted."""
    config = recipe.config
    end = [int(config.get_text_config().eos_token_id)]
    rows = []
    for shown in pictures:
        row = [config.vision_start_token_id, *[config.image_token_id] * shown.tokens, config.vision_end_token_id]
        rows.append([*row, *shown.caption.encode(), *end] if with_captions else row)
    length = max(map(len, rows))
    pad = int(config.get_text_config().pad_token_id)
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows]),
        "mm_token_type_ids": (ids == config.image_token_id).int(),
        "pixel_values": torch.cat([shown.patches() for shown in pictures]),
        "image_grid_thw": torch.tensor([shown.grid for shown in pictures]),
    }


def caption_loss(model: PreTrainedModel, pictures: Sequence[Picture], recipe: Recipe) -> torch.Tensor:
    """Mean cross-entropy of the captions' bytes and of the end that follows them."""
    inputs = inputs_of(pictures, recipe, with_captions=True)
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    targets = inputs["input_ids"][:, 1:].clone()
    said = (inputs["input_ids"] == recipe.config.vision_end_token_id).cumsum(1)[:, :-1].bool()
    return F.cross_entropy(logits[said], targets[said])


def text_loss(model: PreTrainedModel, text: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Mean cross-entropy of a batch of the novel."""
    rows = windows(text, torch.randint(len(text) - recipe.length, (recipe.batch,)), recipe.length, None)
    # Left over from a batch with images, it would shift the positions of this one.
    model.model.rope_deltas = None
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(recipe: Recipe, steps: int, text: torch.Tensor) -> PreTrainedModel:
    """A float32 model trained for `steps` batches, every `TEXT_EVERY`th of text alone."""
    torch.manual_seed(20260101)
    pictures = torch.Generator().manual_seed(20260101)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(recipe.config, dtype=torch.float32)
    model.train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.peak_learning_rate,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate, steps=steps))
    for step in range(steps):
        if step % TEXT_EVERY == TEXT_EVERY - 1:
            loss = text_loss(model, text, recipe)
        else:
            longest = 1 + int((LONGEST - 1) * min(1.0, step / (GROWING * steps)))
            loss = caption_loss(model, [picture(pictures, longest) for _ in range(IMAGES)], recipe)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 < 2 or step >= steps - 2:
            kind = "text" if step % TEXT_EVERY == TEXT_EVERY - 1 else "images"
            print(f"step {step:5d}  {kind} {loss.item():.3f} nats  {time.process_time():.0f} CPU seconds", flush=True)
    model.train(False)
    return model


@torch.no_grad()
def read(model: Any, pictures: Sequence[Picture], recipe: Recipe) -> list[str]:
    """What the model greedily says of each picture."""
    inputs = inputs_of(pictures, recipe, with_captions=False)
    generated = model.generate(**inputs, max_new_tokens=16, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return [bytes(int(t) for t in row if t < 256).decode(errors="replace") for row in generated]


def accuracy(model: Any, recipe: Recipe, seed: int = HELD_OUT_SEED, count: int = HELD_OUT) -> float:
    """The share of `count` pictures of which colour and number are read without a mistake."""
    generator = torch.Generator().manual_seed(seed)
    shown = [picture(generator) for _ in range(count)]
    said = [text for i in range(0, count, 50) for text in read(model, shown[i : i + 50], recipe)]
    return sum(text == each.caption for text, each in zip(said, shown, strict=True)) / count


def write(name: str, steps: int, directory: Path) -> None:
    """Trains the checkpoint `name` and writes it to `directory`."""
    recipe = RECIPES[name]()
    text, _ = read_text()
    model = stored_precision(train(recipe, steps, text))
    tokenizer: PreTrainedTokenizerFast = byte_tokenizer(recipe)
    config = recipe.config.get_text_config()
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=False
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    stored = AutoModelForImageTextToText.from_pretrained(directory)
    share = accuracy(stored, recipe)
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    shown = [picture(generator) for _ in range(6)]
    said = list(zip([each.caption for each in shown], read(stored, shown, recipe), strict=True))
    card = vision_card(name, recipe, steps, stored, said, share)
    (directory / "README.md").write_text(card, encoding="utf-8")
    print(f"{name}: {share:.3f} of {HELD_OUT} held-out images read without a mistake; written to {directory}")


def main() -> None:
    """Reads the command line and trains one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=["tiny-qwen3-vl"])
    parser.add_argument("--steps", type=int, help="batches to train for; the recipe's own number when left out")
    parser.add_argument("--output", type=Path, help="directory to write; models/shipped/NAME when left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = arguments.steps or RECIPES[arguments.name]().steps
    write(arguments.name, steps, arguments.output or HERE / arguments.name)


if __name__ == "__main__":
    main()
