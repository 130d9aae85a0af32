"""Where bfloat16 loses top-1 agreement: parts of a checkpoint's activations kept in float32, against all of float32.

    python benchmarks/bf16_accuracy.py CHECKPOINT [--text benchmarks/evaluation_text.txt] [--tokens 2001] [--window 512]

Weights are rounded to bfloat16 in every variant. The first two are transformers' own bfloat16; the others run in
float32 and round to bfloat16 what is named: ``residual`` the sums after attention and MLP; ``inputs`` and ``outputs``
those of linear layers, so what norms and attention give too; ``logits`` those of the head. Prints top-1 agreement and
the mean KL divergence against float32 with the checkpoint's own weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from porter.original import original_directory, original_model
from porter.tokenization import encode, tokenizer_of

VARIANTS: dict[str, frozenset[str]] = {
    "all four": frozenset({"residual", "inputs", "outputs", "logits"}),
    "logits in float32": frozenset({"residual", "inputs", "outputs"}),
    "logits and residual in float32": frozenset({"inputs", "outputs"}),
    "only inputs of linear layers in bfloat16": frozenset({"inputs"}),
    "only the residual in bfloat16": frozenset({"residual"}),
    "only logits in bfloat16": frozenset({"logits"}),
    "nothing: weights alone": frozenset(),
}


def rounded(values: Tensor) -> Tensor:
    """To bfloat16 and back."""
    return values.to(torch.bfloat16).to(values.dtype)


def round_activations(model: nn.Module, parts: frozenset[str]) -> None:
    """Hook the float32 model so that the named parts pass rounded to bfloat16."""

    def inputs(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return rounded(args[0]), *args[1:]

    def outputs(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return rounded(output)

    def in_place(module: nn.Module, args: tuple[Any, ...]) -> None:
        args[0].copy_(rounded(args[0]))

    for name, module in model.named_modules():
        head = name == "lm_head"
        if isinstance(module, nn.Linear):
            if "inputs" in parts:
                module.register_forward_pre_hook(inputs)
            if ("logits" if head else "outputs") in parts:
                module.register_forward_hook(outputs)
        # The sum that a norm reads is the object that the next sum is added to.
        elif name.endswith("layernorm") or name == "model.norm":
            if "residual" in parts:
                module.register_forward_pre_hook(in_place)


def logits_of(model: nn.Module, ids: Tensor, window: int) -> Tensor:
    """float32 [tokens predicted, vocabulary], each window from an empty context."""
    parts = [model(input_ids=part[None], use_cache=False).logits[0, :-1].float() for part in ids.split(window)]
    return torch.cat(parts)


def report(name: str, logits: Tensor, reference: Tensor) -> None:
    """Print one variant's line."""
    agreement = float((logits.argmax(-1) == reference.argmax(-1)).double().mean())
    log, against = logits.log_softmax(-1), reference.log_softmax(-1)
    divergence = float((against.exp() * (against - log)).sum(-1).mean())
    print(f"{name:42} {agreement:8.2%}  KL {divergence:.1e}", flush=True)


def main() -> None:
    """Run every variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--text", type=Path, default=Path(__file__).with_name("evaluation_text.txt"))
    parser.add_argument("--tokens", type=int, default=2001)
    parser.add_argument("--window", type=int, default=512)
    asked = parser.parse_args()
    source = original_directory(asked.checkpoint)
    ids = encode(tokenizer_of(source), asked.text.read_text(encoding="utf-8"))[0, : asked.tokens]
    with torch.no_grad():
        reference = logits_of(original_model(source, torch.float32), ids, asked.window)
        plain = original_model(source, torch.bfloat16)
        report("bfloat16", logits_of(plain, ids, asked.window), reference)
        plain.lm_head.weight = nn.Parameter(plain.lm_head.weight.float())
        plain.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        report("bfloat16 to the head, logits in float32", logits_of(plain, ids, asked.window), reference)
        for name, parts in VARIANTS.items():
            model = original_model(source, torch.bfloat16).float()
            round_activations(model, parts)
            report(name, logits_of(model, ids, asked.window), reference)


if __name__ == "__main__":
    main()
