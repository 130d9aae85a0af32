"""Trains the prediction layer of tiny-deepseek-v3-mtp: `python models/shipped/train_prediction.py`.

The checkpoint is tiny-deepseek-v3, bit for bit, and a multi-token prediction layer (DeepSeek-V3, arXiv 2412.19437,
section 2.2) that is trained on top of it. DeepSeek trains both together; here the model is frozen, so that what is
known of it stays true, and only the layer learns: from the hidden state of a byte and the next byte, the one after.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from porter.models.prediction_proof import in_checkpoint
from porter.models.shipped.train import HERE, ExpertBalance, learning_rate, read_text, windows

BASE, NAME = "tiny-deepseek-v3", "tiny-deepseek-v3-mtp"
STEPS, BATCH, LENGTH, PEAK = 400, 8, 256, 3e-3
CARRIED = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")

CARD = """# {name}

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
| made by | `python models/shipped/train_prediction.py --steps {steps}` |

transformers loads the model and lists the layer as unexpected: its class leaves out layer 61 alone.
"""


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


def layer_state(mtp: Any, prefix: str) -> dict[str, torch.Tensor]:
    """The layer's tensors under the names and in the dtypes of DeepSeek's checkpoints, and its experts one by one."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in mtp.layers[0].state_dict().items():
        name = in_checkpoint(name)
        exact = name.startswith("mlp.gate.")
        tensor = tensor.detach() if exact else tensor.detach().to(torch.bfloat16)
        if tensor.dim() < 3:
            state[prefix + name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for index, expert in enumerate(tensor):
            for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                state[f"{prefix}mlp.experts.{index}.{kind}.weight"] = part
    return {name: tensor.contiguous() for name, tensor in state.items()}


def write(steps: int, directory: Path) -> None:
    """Trains the layer and writes the checkpoint."""
    base = HERE / BASE
    text, held_out = read_text()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).requires_grad_(False)
    model.config.num_mtp_layers = 1
    mtp = train(model, steps, text)
    layers = int(model.config.num_hidden_layers)
    prefix = f"model.layers.{layers}."
    layer = layer_state(mtp, prefix)
    stored = load_file(base / "model.safetensors")
    copies = {
        f"{prefix}embed_tokens.weight": stored["model.embed_tokens.weight"].clone(),
        f"{prefix}shared_head.head.weight": stored["lm_head.weight"].clone(),
    }
    for name, parameter in mtp.layers.named_parameters():
        if "mlp.gate." not in name:
            parameter.data = parameter.data.to(torch.bfloat16).float()
    rows = windows(held_out, torch.arange(0, len(held_out) - LENGTH, LENGTH), LENGTH, model.config.bos_token_id)
    with torch.no_grad():
        measured = [layer_loss(model, mtp, chunk) for chunk in rows.split(BATCH)[:-1]]
    loss, agreement = (float(torch.stack(values).mean()) for values in zip(*measured, strict=True))
    directory.mkdir(parents=True, exist_ok=True)
    save_file({**stored, **layer, **copies}, directory / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((base / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 1}, indent=2) + "\n")
    for name in CARRIED:
        shutil.copyfile(base / name, directory / name)
    numbers = {"parameters": sum(t.numel() for t in layer.values()), "layers": layers, "steps": steps, "batch": BATCH}
    card = CARD.format(name=NAME, **numbers, length=LENGTH, loss=loss / math.log(2), agreement=100 * agreement)
    (directory / "README.md").write_text(card, encoding="utf-8")
    print(f"{NAME}: {loss / math.log(2):.3f} bits/byte, agreement {agreement:.3f}; written to {directory}")


def main() -> None:
    """Reads the command line and trains the layer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="batches to train for")
    parser.add_argument("--output", type=Path, default=HERE / NAME, help="directory to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    write(arguments.steps, arguments.output)


if __name__ == "__main__":
    main()
