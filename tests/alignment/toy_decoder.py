"""A decoder of a few lines whose layers can be built to misbehave at their capture points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from porter.golden.recorder import recording
from porter.golden.store import Golden

WIDTH, WORDS = 7, 11


class Layer(nn.Module):
    """Adds a projection of its input to it."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.projection(hidden).tanh()


class TwoStreams(Layer):
    """Takes and gives hidden states and residual apart, as vLLM's layers do."""

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Any:
        residual = hidden if residual is None else hidden + residual
        return self.projection(residual).tanh(), residual


class Reused(Layer):
    """Writes every output to one buffer that all layers share."""

    buffer = torch.zeros(0)

    def forward(self, hidden: Tensor) -> Any:
        result = super().forward(hidden)
        if Reused.buffer.shape != result.shape:
            Reused.buffer = torch.empty_like(result)
        return Reused.buffer.copy_(result)


class Decoder(nn.Module):
    """embed_tokens, layers, norm, lm_head; `between` is what works on the hidden states before each layer."""

    def __init__(self, layer: type[Layer] = Layer, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.between: Any = lambda hidden: hidden
        self.requires_grad_(False)

    def get_input_embeddings(self) -> nn.Module:
        """As transformers' models have it."""
        return self.embed_tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        hidden: Any = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(*hidden) if isinstance(hidden, tuple) else layer(self.between(hidden))
        hidden = sum(hidden) if isinstance(hidden, tuple) else hidden
        return SimpleOutput(logits=self.lm_head(self.norm(hidden)))


class SimpleOutput(dict[str, Tensor]):
    """A mapping with attributes, as transformers' outputs are."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def tokens(rows: int = 2, length: int = 5, seed: int = 0) -> Tensor:
    """Random token ids [rows, length]."""
    return torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def recorded(model: nn.Module, path: Path, *batches: Tensor, detail: str = "full", **more: Any) -> Golden:
    """A golden of one forward per batch."""
    with torch.no_grad(), recording(model.eval(), path, detail=detail):
        for batch in batches or (tokens(),):
            model(batch, **more)
    return Golden.open(path)
