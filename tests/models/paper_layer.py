"""A prediction layer of DeepSeek-V3 in float64, written from its papers' equations and the names in a checkpoint.

Nothing of porter or transformers: MLA from arXiv 2405.04434 equations 37 to 47, YaRN from arXiv 2309.00071, routing
from arXiv 2412.19437 equations 12 to 16, the prediction layer from its equations 21 to 23.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class PaperLayer:
    """Layer `number` of the checkpoint in `directory`; one sequence at a time, no cache."""

    def __init__(self, directory: Path, number: int) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.tensors = {n: t.double() for n, t in load_file(directory / "model.safetensors").items()}
        self.prefix = f"model.layers.{number}."

    def weight(self, name: str) -> torch.Tensor:
        return self.tensors[f"{self.prefix}{name}.weight"]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()

    def logits(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] of tokens 0.., `following` [S] the tokens after them -> logits [S, V] of those after these."""
        embedded = self.tensors["model.embed_tokens.weight"][following]
        # Equation 21; the columns of eh_proj that multiply the embedding come first in released weights.
        normed = self.norm(embedded, self.weight("enorm")), self.norm(hidden, self.weight("hnorm"))
        x = torch.cat(normed, dim=-1) @ self.weight("eh_proj").T
        x = x + self.attention(self.norm(x, self.weight("input_layernorm")))
        x = x + self.experts(self.norm(x, self.weight("post_attention_layernorm")))
        return self.norm(x, self.weight("shared_head.norm")) @ self.weight("shared_head.head").T

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """YaRN's angle per position of each pair, and the length of the rotated vectors."""
        rope, width = self.config["rope_parameters"], self.config["qk_rope_head_dim"]
        theta, factor, original = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]
        plain = theta ** (-torch.arange(0, width, 2).double() / width)

        def pair(turns: float) -> float:
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(pair(rope["beta_fast"])), 0), min(math.ceil(pair(rope["beta_slow"])), width - 1)
        ramp = ((torch.arange(width // 2).double() - low) / max(high - low, 1e-3)).clamp(0, 1)
        length = self.mscale(rope["mscale"]) / self.mscale(rope["mscale_all_dim"])
        return plain / factor * ramp + plain * (1 - ramp), length

    def mscale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.config["rope_parameters"]["factor"]) + 1.0

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x [heads, S, R], neighbours as complex numbers turned by their positions."""
        per_position, length = self.frequencies()
        angles = torch.arange(x.shape[1]).double()[:, None] * per_position
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * torch.polar(
            torch.full_like(angles, length), angles
        )
        return torch.view_as_real(turned).flatten(-2)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        c, steps = self.config, x.shape[0]
        heads, rank = c["num_attention_heads"], c["kv_lora_rank"]
        nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        query = self.norm(x @ self.weight("self_attn.q_a_proj").T, self.weight("self_attn.q_a_layernorm"))
        query = (query @ self.weight("self_attn.q_b_proj").T).view(steps, heads, nope + rope).transpose(0, 1)
        joint = x @ self.weight("self_attn.kv_a_proj_with_mqa").T
        latent = self.norm(joint[:, :rank], self.weight("self_attn.kv_a_layernorm"))
        expanded = (latent @ self.weight("self_attn.kv_b_proj").T).view(steps, heads, -1).transpose(0, 1)
        scores = query[..., :nope] @ expanded[..., :nope].transpose(1, 2)
        scores = scores + self.rotate(query[..., nope:]) @ self.rotate(joint[None, :, rank:]).transpose(1, 2)
        scale = (nope + rope) ** -0.5 * self.mscale(c["rope_parameters"]["mscale_all_dim"]) ** 2
        later = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        attended = torch.softmax((scores * scale).masked_fill(later, -math.inf), dim=-1) @ expanded[..., nope:]
        return attended.transpose(0, 1).reshape(steps, -1) @ self.weight("self_attn.o_proj").T

    def experts(self, x: torch.Tensor) -> torch.Tensor:
        result = self.gated(x, "mlp.shared_experts")
        affinities = torch.sigmoid(x @ self.weight("mlp.gate").T)
        biased = affinities + self.tensors[f"{self.prefix}mlp.gate.e_score_correction_bias"]
        for token in range(x.shape[0]):
            chosen = self.chosen(biased[token])
            total = sum(float(affinities[token, expert]) for expert in chosen)
            for expert in chosen:
                gate = self.config["routed_scaling_factor"] * affinities[token, expert] / total
                result[token] += gate * self.gated(x[token], f"mlp.experts.{expert}")
        return result

    def chosen(self, scores: torch.Tensor) -> list[int]:
        groups = scores.view(self.config["n_group"], -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.config["topk_group"]).indices.tolist()
        size = groups.shape[1]
        allowed = [g * size + i for g in best for i in range(size)]
        return sorted(allowed, key=lambda e: -float(scores[e]))[: self.config["num_experts_per_tok"]]

    def gated(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = x @ self.weight(f"{name}.gate_proj").T, x @ self.weight(f"{name}.up_proj").T
        return (gate * torch.sigmoid(gate) * up) @ self.weight(f"{name}.down_proj").T
