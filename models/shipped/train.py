"""Trains the two checkpoints that porter ships: `python models/shipped/train.py tiny-qwen3`.

They are byte-level language models of released architectures at toy width, trained on the novel in `text/`, so that
an alignment, an evaluation or a first try has weights that mean something without a download. A run is on one thread,
from a fixed seed, and writes the checkpoint, its tokenizer and its model card to `models/shipped/NAME/`.
"""

import argparse
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

HERE = Path(__file__).resolve().parent
TEXT = HERE / "text" / "persuasion.txt"
HELD_OUT_FROM = "\nChapter 23\n"
BYTES = 256
VOCABULARY = 264
SAMPLE_PROMPTS = ("Anne could not ", "Captain Wentworth was ")


@dataclass(frozen=True)
class Recipe:
    """What one checkpoint is made of: its configuration, its special tokens (from id 256 on) and its training."""

    config: PreTrainedConfig
    special_tokens: tuple[str, ...]
    bos_token: str | None
    eos_token: str
    pad_token: str
    steps: int
    peak_learning_rate: float
    batch: int = 16
    length: int = 256


def tiny_deepseek_v3() -> Recipe:
    """DeepSeek-V3 at toy width: MLA, one dense layer, 16 experts in 4 groups, a shared expert, YaRN."""
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=16,
        routed_scaling_factor=2.5,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.05,
        rope_interleave=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        num_mtp_layers=0,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    # DeepSeek's own names for these, with the bars and blanks that its tokenizer spells them with.
    tokens = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")  # noqa: RUF001
    return Recipe(config, tokens, tokens[0], tokens[1], tokens[2], steps=1000, peak_learning_rate=4e-3)


def tiny_qwen3() -> Recipe:
    """Qwen3 at toy width: grouped-query attention with query and key norms, tied embeddings."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
    )
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return Recipe(config, tokens, None, tokens[2], tokens[0], steps=2000, peak_learning_rate=4e-3)


RECIPES = {"tiny-deepseek-v3": tiny_deepseek_v3, "tiny-qwen3": tiny_qwen3}


def byte_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0..255 are the bytes of the UTF-8 text: no merges, no normalisation, nothing unknown."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(BYTES, 2 * BYTES))
    # GPT-2's byte alphabet: a printable byte stands for itself, the others are shifted past 255 in order.
    vocabulary = {chr(byte if byte in printable else next(shifted)): byte for byte in range(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in recipe.special_tokens])
    if recipe.bos_token is not None:
        bos = (recipe.bos_token, tokenizer.token_to_id(recipe.bos_token))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]}:0 $A:0", pair=f"{bos[0]}:0 $A:0 $B:1", special_tokens=[bos]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=recipe.bos_token,
        eos_token=recipe.eos_token,
        pad_token=recipe.pad_token,
        model_max_length=recipe.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


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
    body = recipe.length
    rows = windows(text, torch.arange(0, len(text) - body, body), recipe.length, recipe.config.bos_token_id)
    losses = [
        F.cross_entropy(model(input_ids=chunk[:, :-1]).logits.float().transpose(1, 2), chunk[:, 1:], reduction="none")
        for chunk in rows.split(recipe.batch)
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
        self.routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
        self.loads = [torch.zeros_like(router.e_score_correction_bias) for router in self.routers]
        for router, load in zip(self.routers, self.loads, strict=True):
            router.register_forward_hook(partial(self._count, load))

    @staticmethod
    def _count(load: torch.Tensor, router: nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        load += torch.bincount(outputs[2].flatten(), minlength=len(load))

    @torch.no_grad()
    def step(self) -> None:
        """Moves the biases by the loads counted since the last step, and starts counting anew."""
        for router, load in zip(self.routers, self.loads, strict=True):
            router.e_score_correction_bias += self.rate * torch.sign(load.mean() - load)
            load.zero_()


def learning_rate(step: int, steps: int, warmup: int = 50) -> float:
    """Linear warm-up, then a cosine to a twentieth of the peak; relative to the peak."""
    progress = max(0, step - warmup) / max(1, steps - warmup)
    return min(1.0, (step + 1) / warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def train(recipe: Recipe, steps: int, text: torch.Tensor) -> PreTrainedModel:
    """A float32 model trained for `steps` batches of `batch * length` bytes."""
    torch.manual_seed(20260101)
    model = AutoModelForCausalLM.from_config(recipe.config, dtype=torch.float32)
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
    began = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(text) - recipe.length, (recipe.batch,))
        rows = windows(text, starts, recipe.length, recipe.config.bos_token_id)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        balance.step()
        if step % 50 == 0 or step == steps - 1:
            print(
                f"step {step:5d}  {loss.item() / math.log(2):.3f} bits/byte  {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return model.eval()


def stored_precision(model: PreTrainedModel) -> PreTrainedModel:
    """The model in bfloat16, but for what upstream keeps in float32 (the router's weight and bias)."""
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not any(part in name for part in kept) and "inv_freq" not in name:
            tensor.data = tensor.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    return model


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, new_tokens: int = 160) -> str:
    """`prompt` and its greedy continuation."""
    tokens = tokenizer(prompt, return_tensors="pt")
    generated = model.generate(**tokens, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(generated[0], skip_special_tokens=True))


CARD = """# {name}

A byte-level {model_type} language model of {parameters:,} parameters, trained so that porter has real weights at hand.
It knows one novel and nothing else; it is for checking ports, not for use.

| | |
|---|---|
| architecture | `{architecture}` of transformers, {layers} layers, hidden size {hidden} |
| vocabulary | {vocabulary}: ids 0-255 are bytes, 256-258 special tokens, the rest unused |
| data | Jane Austen, *Persuasion* (1818, public domain), without chapters 23 and 24 |
| training | {steps} steps of {batch} x {length} bytes, AdamW, cosine, float32, one CPU thread |
| held-out loss | {loss:.3f} bits/byte on chapters 23 and 24, as stored (byte frequencies alone: {unigram:.3f}) |
| stored as | {stored} |
| licence | Apache-2.0, as the rest of porter; the text is in the public domain |
| made by | `{command}` |

Greedy samples, as stored:

{samples}
"""


def card(name: str, recipe: Recipe, steps: int, model: PreTrainedModel, samples: list[str], losses: list[float]) -> str:
    """The model card: what it is, what it was trained on, what it reaches."""
    routed = getattr(recipe.config, "n_routed_experts", None)
    return CARD.format(
        name=name,
        model_type=recipe.config.model_type,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        architecture=type(model).__name__,
        layers=recipe.config.num_hidden_layers,
        hidden=recipe.config.hidden_size,
        vocabulary=VOCABULARY,
        steps=steps,
        batch=recipe.batch,
        length=recipe.length,
        loss=losses[0],
        unigram=losses[1],
        stored="bfloat16; router weights and biases float32" if routed else "bfloat16",
        command=f"python models/shipped/train.py {name} --steps {steps}",
        samples="\n".join("> " + " ".join(text.split()) + "\n" for text in samples).rstrip(),
    )


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
    stored = AutoModelForCausalLM.from_pretrained(directory).eval()
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
