"""Trains the language models that porter ships: `python models/shipped/train.py tiny-qwen3`.

They are byte-level language models of released architectures at toy width, trained on the novel in `text/`, so that
an alignment, an evaluation or a first try has weights that mean something without a download. A run is on one thread,
from a fixed seed, and writes the checkpoint, its tokenizer and its model card to `models/shipped/NAME/`.
"""

import argparse
import math
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from porter.models.reduce import fill_hash_tables
from porter.models.shipped.compressed_indexer import CompressedIndexerAlignment
from porter.models.shipped.indexer_alignment import IndexerAlignment
from porter.models.shipped.model_card import card
from porter.models.shipped.recipe import BYTES, Recipe, byte_tokenizer
from porter.models.shipped.recipes import RECIPES
from porter.models.shipped.routing_balance import RoutingBalance

HERE = Path(__file__).resolve().parent
TEXT = HERE / "text" / "persuasion.txt"
HELD_OUT_FROM = "\nChapter 23\n"
SAMPLE_PROMPTS = ("Anne could not ", "Captain Wentworth was ")


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the novel as int64: training text, and the chapters that are held out."""
    text = TEXT.read_bytes()
    split = text.index(HELD_OUT_FROM.encode()) + 1
    return torch.tensor(list(text[:split])), torch.tensor(list(text[split:]))


def windows(text: torch.Tensor, starts: torch.Tensor, length: int, bos: int | None) -> torch.Tensor:
    """Rows of `length + 1` ids from each start; the first is BOS where the family has one."""
    body = length + 1 if bos is None else length
    rows = text[starts[:, None] + torch.arange(body)]
    return rows if bos is None else torch.cat([torch.full((len(starts), 1), bos), rows], dim=1)


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, text: torch.Tensor, recipe: Recipe) -> float:
    """Mean cross-entropy in bits over every byte of `text`, cut into windows that do not overlap."""
    batch, length = recipe.shape(1.0)
    rows = windows(text, torch.arange(0, len(text) - length, length), length, recipe.config.bos_token_id)
    losses = [
        F.cross_entropy(model(input_ids=chunk[:, :-1]).logits.float().transpose(1, 2), chunk[:, 1:], reduction="none")
        for chunk in torch.split(rows, batch)
    ]
    return float(torch.cat(losses).mean()) / math.log(2)


def unigram_entropy(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Bits per byte of `held_out` under the byte frequencies of `train` (one added to every count)."""
    counts = torch.bincount(train, minlength=BYTES).double() + 1
    return float(-(counts / counts.sum()).log2()[held_out].mean())


class ExpertBalance:
    """DeepSeek-V3's balancing without an auxiliary loss (arXiv 2412.19437, section 2.1.2).

    After each step every router's `e_score_correction_bias` moves by `rate` towards the experts that got less than the
    mean number of tokens.
    """

    def __init__(self, model: PreTrainedModel, rate: float = 1e-3) -> None:
        self.rate = rate
        routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
        self.biases = [router.get_buffer("e_score_correction_bias") for router in routers]
        self.loads = [torch.zeros_like(bias) for bias in self.biases]
        for router, load in zip(routers, self.loads, strict=True):
            router.register_forward_hook(partial(self._count, load))

    @staticmethod
    def _count(load: torch.Tensor, router: nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        load += torch.bincount(outputs[2].flatten(), minlength=len(load))

    @torch.no_grad()
    def step(self) -> None:
        """Moves the biases by the loads counted since the last step, and starts counting anew."""
        for bias, load in zip(self.biases, self.loads, strict=True):
            bias += self.rate * torch.sign(load.mean() - load)
            load.zero_()


def learning_rate(step: int, steps: int, warmup: int = 50) -> float:
    """Linear warm-up, then a cosine to a twentieth of the peak; relative to the peak."""
    progress = max(0, step - warmup) / max(1, steps - warmup)
    return min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train(recipe: Recipe, steps: int, text: torch.Tensor) -> PreTrainedModel:
    """A float32 model trained for `steps` batches of the recipe's shape."""
    torch.manual_seed(20260101)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(recipe.config, dtype=torch.float32)
    fill_hash_tables(model, torch.Generator().manual_seed(20260101))
    model.train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.peak_learning_rate,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate, steps=steps))
    balance = ExpertBalance(model)
    # Softmax routers are balanced by upstream's own auxiliary loss.
    balanced = {"output_router_logits": True} if hasattr(recipe.config, "router_aux_loss_coef") else {}
    began = time.monotonic()
    aligned = IndexerAlignment(model), CompressedIndexerAlignment(model)
    with aligned[0] as indexers, aligned[1] as compressed, RoutingBalance(model) as routing:
        for step in range(steps):
            batch, length = recipe.shape(step / steps)
            rows = windows(text, torch.randint(len(text) - length, (batch,)), length, recipe.config.bos_token_id)
            indexers.begin(step / steps)
            compressed.begin(step / steps)
            output = model(input_ids=rows[:, :-1], use_cache=False, **balanced)
            loss = F.cross_entropy(output.logits.flatten(0, 1), rows[:, 1:].flatten())
            beside = indexers.loss() + compressed.loss() + routing.loss()
            if balanced:
                beside = beside + recipe.config.router_aux_loss_coef * output.aux_loss
            torch.autograd.backward(loss + beside)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            balance.step()
            if step % 50 == 0 or step == steps - 1:
                print(
                    f"step {step:5d}  {loss.item() / math.log(2):.3f} bits/byte  beside {beside.item():.3f}  "
                    f"{time.monotonic() - began:.0f} s",
                    flush=True,
                )
    model.train(False)
    return model


def stored_precision(model: PreTrainedModel) -> PreTrainedModel:
    """The model in bfloat16, but for what upstream keeps in float32 (the router's weight and bias)."""
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not any(part in name for part in kept) and "inv_freq" not in name:
            tensor.data = tensor.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    return model


def sample(model: GenerationMixin, tokenizer: PreTrainedTokenizerFast, prompt: str, new_tokens: int = 160) -> str:
    """`prompt` and its greedy continuation."""
    tokens = tokenizer(prompt, return_tensors="pt")
    generated = model.generate(**tokens, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(generated[0], skip_special_tokens=True))


def write(name: str, steps: int, directory: Path) -> None:
    """Trains the checkpoint `name` and writes it to `directory`."""
    recipe = RECIPES[name]()
    text, held_out = read_text()
    model = stored_precision(train(recipe, steps, text))
    tokenizer = byte_tokenizer(recipe)
    model.generation_config = GenerationConfig(
        bos_token_id=recipe.config.bos_token_id,
        eos_token_id=recipe.config.eos_token_id,
        pad_token_id=recipe.config.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    stored = AutoModelForCausalLM.from_pretrained(directory)
    losses = [bits_per_byte(stored, held_out, recipe), unigram_entropy(text, held_out)]
    samples = [sample(stored, tokenizer, prompt) for prompt in SAMPLE_PROMPTS]
    (directory / "README.md").write_text(card(name, recipe, steps, stored, samples, losses), encoding="utf-8")
    print(f"{name}: {losses[0]:.3f} bits/byte held out; written to {directory}")


def main() -> None:
    """Reads the command line and trains one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--steps", type=int, help="batches to train for; the recipe's own number when left out")
    parser.add_argument("--output", type=Path, help="directory to write; models/shipped/NAME when left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = arguments.steps or RECIPES[arguments.name]().steps
    write(arguments.name, steps, arguments.output or HERE / arguments.name)


if __name__ == "__main__":
    main()
