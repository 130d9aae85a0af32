"""Trains the prediction layers that are shipped: `python models/shipped/train_prediction.py NAME`.

A multi-token prediction layer (DeepSeek-V3, arXiv 2412.19437, section 2.2) is trained on top of a checkpoint. DeepSeek
trains both together; here the model is frozen, so that what is known of it stays true, and only the layer learns: from
the hidden state of a byte and the next byte, the one after. tiny-deepseek-v3-mtp is tiny-deepseek-v3, bit for bit, and
its layer; tiny-qwen3-next gets its layer into its own file, as Qwen releases them, and its card is continued.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from porter.models.prediction import DEEPSEEK, QWEN, PredictionNames, disk_names
from porter.models.prediction_proof import in_checkpoint
from porter.models.shipped.train import HERE, ExpertBalance, learning_rate, read_text, windows

STEPS, BATCH, LENGTH, PEAK = 400, 8, 256, 3e-3
CARRIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Base:
    """The checkpoint below a layer, how the layer is stored, and its card.

    `fields` are added to config.json: what makes transformers count on a layer. `training` are set for the training
    alone, where a released config says nothing.
    """

    directory: str
    names: PredictionNames
    card: str
    fields: dict[str, Any]
    training: dict[str, Any]


DEEPSEEK_CARD = """# tiny-deepseek-v3-mtp

[tiny-deepseek-v3](../tiny-deepseek-v3), bit for bit, with a multi-token prediction layer of {parameters:,} parameters:
from the hidden state of a byte and the embedding of the next byte, it predicts the byte after that. For checking
speculative decoding, not for use.

| | |
|---|---|
| the layer | `model.layers.{layers}`, as DeepSeek-V3 stores it: enorm, hnorm, eh_proj, a decoder layer, \
shared_head; with copies of embedding and head |
| training | {steps} steps of {batch} x {length} bytes of the same text, the model frozen; AdamW, float32 |
| held out | {loss:.3f} bits/byte on chapters 23 and 24, two bytes ahead; its first choice is the model's own in \
{agreement:.1f} % of the places |
| stored as | bfloat16; router weights and biases float32 |
| made by | `python models/shipped/train_prediction.py tiny-deepseek-v3-mtp --steps {steps}` |

transformers loads the model and lists the layer as unexpected: its class leaves out layer 61 alone.
"""
HEADING = "\n## The prediction layer\n"
QWEN_CARD = (
    HEADING
    + """
A multi-token prediction layer of {parameters:,} parameters, for speculative decoding: from the hidden state of a byte
and the embedding of the next byte, it predicts the byte after that. transformers loads the model without it.

| | |
|---|---|
| the layer | `mtp.*`, as Qwen3-Next stores it: two norms, fc, a decoder layer of gated attention, a norm |
| training | {steps} steps of {batch} x {length} bytes of the same text, the model frozen; AdamW, float32 |
| held out | {loss:.3f} bits/byte on the held-out text, two bytes ahead; its first choice is the model's own in \
{agreement:.1f} % of the places |
| made by | `python models/shipped/train_prediction.py tiny-qwen3-next --steps {steps}` |
"""
)
BASES = {
    "tiny-deepseek-v3-mtp": Base(
        "tiny-deepseek-v3", DEEPSEEK, DEEPSEEK_CARD, {"num_nextn_predict_layers": 1}, {"num_mtp_layers": 1}
    ),
    "tiny-qwen3-next": Base(
        "tiny-qwen3-next", QWEN, QWEN_CARD, {}, {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}
    ),
}


def layer_loss(model: PreTrainedModel, mtp: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy in nats, share of places where the layer's first choice is the model's) for ids `rows` [B, L + 1].

    At place i the layer is given the model's hidden state of byte i and the embedding of byte i + 1, as equation 21 has
    it, and predicts byte i + 2; the model itself would be given byte i + 1.
    """
    decoder: Any = model.get_decoder()
    with torch.no_grad():
        hidden = decoder(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
        chosen = mtp.shared_head(hidden[:, 1:]).argmax(dim=-1)
    inputs = rows[:, 1:-1]
    positions = torch.arange(1, inputs.shape[1] + 1)[None]
    logits = mtp.shared_head(mtp.forward_layer(0, hidden[:, :-1], positions, None, input_ids=inputs))
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 2:].flatten())
    return loss, (logits.argmax(dim=-1) == chosen).float().mean()


def train(model: PreTrainedModel, steps: int, text: torch.Tensor) -> Any:
    """transformers' MtpModel over `model`, its one layer trained for `steps` batches."""
    torch.manual_seed(20260102)
    mtp: Any = MtpModel(model, 1)
    parameters = list(mtp.layers.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate, steps=steps))
    balance = ExpertBalance(mtp)
    began = time.monotonic()
    for step in range(steps):
        rows = windows(text, torch.randint(len(text) - LENGTH, (BATCH,)), LENGTH, model.config.bos_token_id)
        loss, agreement = layer_loss(model, mtp, rows)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        balance.step()
        if step % 50 == 0 or step == steps - 1:
            said = f"step {step:4d}  {loss.item() / math.log(2):.3f} bits/byte  agreement {agreement:.3f}"
            print(f"{said}  {time.monotonic() - began:.0f} s", flush=True)
    return mtp


def layer_state(mtp: Any, disk: dict[str, str], exact: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The layer's tensors under their names on disk, its experts one by one; in bfloat16 but for what is `exact`."""
    state: dict[str, torch.Tensor] = {}
    prefix = list(disk)[-1]
    for own, tensor in mtp.layers[0].state_dict().items():
        name = prefix + in_checkpoint(own)
        here = next(each for each in disk if name.startswith(each))
        name = disk[here] + name[len(here) :]
        tensor = tensor.detach() if any(part in name for part in exact) else tensor.detach().to(torch.bfloat16)
        if tensor.dim() < 3:
            state[name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        experts = name.rpartition(".")[0]
        for index, expert in enumerate(tensor):
            for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                state[f"{experts}.{index}.{kind}.weight"] = part
    return {name: tensor.contiguous() for name, tensor in state.items()}


def measured(model: PreTrainedModel, mtp: Any, held_out: torch.Tensor, exact: tuple[str, ...]) -> tuple[float, float]:
    """(bits per byte of `held_out` two bytes ahead, share of places with the model's own choice), as stored."""
    for name, parameter in mtp.layers.named_parameters():
        if not any(part in name for part in exact):
            parameter.data = parameter.data.to(torch.bfloat16).float()
    rows = windows(held_out, torch.arange(0, len(held_out) - LENGTH, LENGTH), LENGTH, model.config.bos_token_id)
    with torch.no_grad():
        found = [layer_loss(model, mtp, chunk) for chunk in rows.split(BATCH)[:-1]]
    loss, agreement = (float(torch.stack(values).mean()) for values in zip(*found, strict=True))
    return loss / math.log(2), agreement


def write(name: str, steps: int, directory: Path) -> None:
    """Trains the layer and writes the checkpoint."""
    base = BASES[name]
    source = HERE / base.directory
    text, held_out = read_text()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).requires_grad_(False)
    for field, value in base.training.items():
        setattr(model.config, field, value)
    mtp = train(model, steps, text)
    layers = int(model.config.num_hidden_layers)
    exact = tuple(model._keep_in_fp32_modules_strict or ())
    layer = layer_state(mtp, disk_names(base.names, layers, 0), exact)
    stored = load_file(source / "model.safetensors")
    copies = {there.format(layer=layers, index=0): stored[of].clone() for there, of in base.names.copies}
    loss, agreement = measured(model, mtp, held_out, exact)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({**stored, **layer, **copies}, directory / "model.safetensors", metadata={"format": "pt"})
    numbers = {"parameters": sum(t.numel() for t in layer.values()), "layers": layers, "steps": steps, "batch": BATCH}
    card = base.card.format(**numbers, length=LENGTH, loss=loss, agreement=100 * agreement)
    fields = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, **base.fields}, indent=2) + "\n")
    if card.startswith(HEADING):
        card = (source / "README.md").read_text(encoding="utf-8").partition(HEADING)[0] + card
    for file in CARRIED if directory != source else ():
        shutil.copyfile(source / file, directory / file)
    (directory / "README.md").write_text(card, encoding="utf-8")
    print(f"{name}: {loss:.3f} bits/byte, agreement {agreement:.3f}; written to {directory}")


def main() -> None:
    """Reads the command line and trains a layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(BASES))
    parser.add_argument("--steps", type=int, default=STEPS, help="batches to train for")
    parser.add_argument("--output", type=Path, help="directory to write; models/shipped/NAME when left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write(arguments.name, arguments.steps, arguments.output or HERE / arguments.name)


if __name__ == "__main__":
    main()
