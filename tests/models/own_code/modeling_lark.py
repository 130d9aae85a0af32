"""A hand-written causal language model: no names in common with transformers' models, and its own cache code."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_lark import LarkConfig


class Scale(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.tiny = eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.tiny)).to(x.dtype) * self.scale


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def turn(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class Attention(nn.Module):
    def __init__(self, config, layer_id):
        super().__init__()
        self.layer_id = layer_id
        self.n_heads = config.n_heads
        self.n_kv_heads = config.n_kv_heads
        self.head_size = config.head_size
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_size, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_size, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_size, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_size, config.dim, bias=False)

    def forward(self, x, cos, sin, mask, past_key_values=None):
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, self.head_size).transpose(1, 2)
        k = self.wk(x).view(batch, length, -1, self.head_size).transpose(1, 2)
        v = self.wv(x).view(batch, length, -1, self.head_size).transpose(1, 2)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_id)
        groups = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_size) + mask
        weights = F.softmax(scores.float(), dim=-1).to(x.dtype)
        return self.wo((weights @ v).transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, config, layer_id):
        super().__init__()
        self.norm1 = Scale(config.dim, config.eps)
        self.attn = Attention(config, layer_id)
        self.norm2 = Scale(config.dim, config.eps)
        self.ffn = FeedForward(config)

    def forward(self, x, cos, sin, mask, past_key_values=None):
        x = x + self.attn(self.norm1(x), cos, sin, mask, past_key_values)
        return x + self.ffn(self.norm2(x))


class LarkPreTrainedModel(PreTrainedModel):
    config_class = LarkConfig
    base_model_prefix = "model"
    _no_split_modules = ["Block"]


class LarkModel(LarkPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList([Block(config, i) for i in range(config.n_layers)])
        self.norm = Scale(config.dim, config.eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.tokens

    def set_input_embeddings(self, value):
        self.tokens = value

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None):
        x = self.tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        total = seen + input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(input_ids.shape[0], total, dtype=torch.long, device=x.device)
        positions = (attention_mask.cumsum(-1) - 1).clamp_min(0)[:, seen:]
        frequencies = self.config.theta ** (
            -torch.arange(0, self.config.head_size, 2, device=x.device).float() / self.config.head_size
        )
        angles = (positions[..., None].float() * frequencies).repeat(1, 1, 2)
        keys = torch.arange(total, device=x.device)
        visible = (keys <= keys[seen:, None]) & (attention_mask[:, None, None] > 0)
        mask = torch.zeros(visible.shape, dtype=x.dtype, device=x.device).masked_fill(
            ~visible, torch.finfo(x.dtype).min
        )
        for block in self.blocks:
            x = block(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), mask, past_key_values)
        return self.norm(x), past_key_values


class LarkForCausalLM(LarkPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"head.weight": "model.tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = LarkModel(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, attention_mask=None, cache=None, use_cache=None, **kwargs):
        x, cache = self.model(input_ids, attention_mask, cache, use_cache)
        return CausalLMOutputWithPast(logits=self.head(x), cache=cache)
