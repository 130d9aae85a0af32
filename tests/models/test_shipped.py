"""The shipped checkpoints are what their cards say, and their training does what it says."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from porter.models.presets import shipped_directory
from porter.models.shipped import recipes, train
from porter.models.shipped.recipe import byte_tokenizer

NAMES = [
    "tiny-deepseek-v2", "tiny-deepseek-v3", "tiny-deepseek-v32",
    "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3-next",
]  # fmt: skip
OWN_TOKENIZERS = [name for name in NAMES if name != "tiny-qwen2"]
"""For model type qwen2 transformers makes its own around the stored vocabulary, which normalises text to NFC."""
BOS = {name: [256] if "deepseek" in name else [] for name in NAMES}
REPOSITORY = Path(train.__file__).resolve().parents[2]


def directory(name: str) -> Path:
    found: Path | None = shipped_directory(name)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=NAMES)
def shipped(request: pytest.FixtureRequest) -> tuple[str, PreTrainedModel]:
    return request.param, AutoModelForCausalLM.from_pretrained(directory(request.param))


def test_every_weight_is_in_the_file_and_under_upstreams_name(shipped: tuple[str, PreTrainedModel]) -> None:
    name, _ = shipped
    report = AutoModelForCausalLM.from_pretrained(directory(name), output_loading_info=True)[1]  # type: ignore[index]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_only_a_router_that_upstream_keeps_so_is_stored_in_float32(shipped: tuple[str, PreTrainedModel]) -> None:
    _, model = shipped
    for key, tensor in model.state_dict().items():
        kept = bool(model._keep_in_fp32_modules_strict)
        router = kept and key.endswith(("mlp.gate.weight", "e_score_correction_bias"))
        assert tensor.dtype == (torch.float32 if router else torch.bfloat16), key


def test_weights_are_small_enough_to_ship(shipped: tuple[str, PreTrainedModel]) -> None:
    name, _ = shipped
    assert sum(file.stat().st_size for file in directory(name).iterdir()) < 6_000_000


def test_configuration_is_the_recipes(shipped: tuple[str, PreTrainedModel]) -> None:
    name, _ = shipped
    stored, recipe = AutoConfig.from_pretrained(directory(name)).to_dict(), recipes.RECIPES[name]().config.to_dict()
    for fields in (stored, recipe):
        for written_on_saving in ("architectures", "dtype", "transformers_version", "_name_or_path"):
            fields.pop(written_on_saving, None)
    assert stored == recipe


def test_deepseek_exercises_what_sets_the_family_apart() -> None:
    config = AutoConfig.from_pretrained(directory("tiny-deepseek-v3"))
    assert config.q_lora_rank
    assert config.first_k_dense_replace == 1 < config.num_hidden_layers
    assert config.topk_group < config.n_group
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["mscale"] != config.rope_parameters["mscale_all_dim"]
    assert config.rope_interleave
    assert config.num_mtp_layers == 0


def test_no_expert_of_qwen3_moe_is_idle() -> None:
    model = AutoModelForCausalLM.from_pretrained(directory("tiny-qwen3-moe"))
    _, held_out = train.read_text()
    chosen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[2]))
    with torch.no_grad():
        model(held_out[None, :512])
    shares = [torch.bincount(c.flatten(), minlength=16) / c.numel() for c in chosen]
    assert len(shares) == 3 and all(bool((share > 0).all()) for share in shares)


def test_balancing_has_moved_every_routers_bias() -> None:
    model = AutoModelForCausalLM.from_pretrained(directory("tiny-deepseek-v3"))
    biases = [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    assert all(bias.abs().max() > 0.01 for bias in biases)


@pytest.mark.parametrize("name", NAMES)
def test_card_gives_the_loss_and_it_is_far_below_that_of_byte_frequencies(name: str) -> None:
    claimed = float(re.findall(r"([\d.]+) bits/byte on chapters", (directory(name) / "README.md").read_text())[0])
    text, held_out = train.read_text()
    model = AutoModelForCausalLM.from_pretrained(directory(name), dtype=torch.float32)
    # The card's figure is of bfloat16 arithmetic, which rounds each logit by up to 2^-9: at most 0.02 on the mean.
    assert train.bits_per_byte(model, held_out, recipes.RECIPES[name]()) == pytest.approx(claimed, abs=0.02)
    assert claimed < 0.6 * train.unigram_entropy(text, held_out)


def test_samples_are_made_of_the_novels_words(shipped: tuple[str, PreTrainedModel]) -> None:
    name, model = shipped
    tokenizer = AutoTokenizer.from_pretrained(directory(name))
    words = set(re.findall(r"[a-z]+", train.TEXT.read_text().lower()))
    written = re.findall(r"[a-z]+", train.sample(model, tokenizer, "She had been ", 120).lower())[3:-1]
    assert len(written) >= 12
    assert sum(word in words for word in written) >= 0.8 * len(written)


@pytest.mark.parametrize("name", OWN_TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_tokenizer_gives_back_any_text_and_its_ids_are_the_bytes(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    try:
        expected = list(text.encode("utf-8"))
    except UnicodeEncodeError:
        return
    ids = tokenizer(text).input_ids
    assert ids == BOS[name] + expected
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("name", OWN_TOKENIZERS)
def test_stored_tokenizer_is_the_recipes(name: str) -> None:
    recipe = byte_tokenizer(recipes.RECIPES[name]())
    assert TOKENIZERS[name].backend_tokenizer.to_str() == recipe.backend_tokenizer.to_str()


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_one_id_each(name: str) -> None:
    recipe = recipes.RECIPES[name]()
    for offset, token in enumerate(recipe.special_tokens):
        assert TOKENIZERS[name](token, add_special_tokens=False).input_ids == [256 + offset]
    assert TOKENIZERS[name].eos_token_id == recipe.config.eos_token_id
    assert TOKENIZERS[name].pad_token_id == recipe.config.pad_token_id


TOKENIZERS = {name: AutoTokenizer.from_pretrained(directory(name)) for name in NAMES}


def test_evaluation_text_is_what_was_held_out() -> None:
    text, held_out = train.read_text()
    assert bytes(held_out.tolist()) == (REPOSITORY / "benchmarks" / "evaluation_text.txt").read_bytes()
    assert b"Chapter 23" not in bytes(text.tolist())
    assert len(held_out) > 10 * 2000


def test_windows_overlap_in_nothing_that_is_predicted() -> None:
    text = torch.arange(100, 120)
    rows = train.windows(text, torch.tensor([0, 5]), 5, None)
    assert rows.tolist() == [list(range(100, 106)), list(range(105, 111))]
    rows = train.windows(text, torch.tensor([0, 5]), 5, 256)
    assert rows.tolist() == [[256, *range(100, 105)], [256, *range(105, 110)]]


def test_bits_per_byte_is_the_mean_over_predicted_bytes() -> None:
    recipe = recipes.RECIPES["tiny-qwen3"]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(recipe.config, dtype=torch.float64).requires_grad_(False)
    text = torch.randint(256, (1025,))
    length = recipe.shape(1.0)[1]
    losses = []
    for start in (0, length):
        row = text[start : start + length + 1]
        log_probabilities = F.log_softmax(model(input_ids=row[None, :-1]).logits[0], dim=-1)
        losses += [-float(log_probabilities[i, row[i + 1]]) for i in range(length)]
    expected = math.fsum(losses) / len(losses) / math.log(2)
    # bits_per_byte takes the logits in float32, whose unit roundoff is 6e-8.
    assert train.bits_per_byte(model, text, recipe) == pytest.approx(expected, rel=1e-6)


def test_unigram_entropy_is_the_entropy_when_both_texts_agree() -> None:
    text = torch.tensor([65, 66] * 50_000)
    assert train.unigram_entropy(text, text) == pytest.approx(1.0, abs=5e-3)


def test_balance_moves_towards_the_experts_that_got_less() -> None:
    recipe = recipes.RECIPES["tiny-deepseek-v3"]()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(recipe.config, dtype=torch.float32)
    balance = train.ExpertBalance(model, rate=0.25)
    router = model.model.layers[1].mlp.gate
    _, _, chosen = router(torch.randn(37, recipe.config.hidden_size))
    load = torch.bincount(chosen.flatten(), minlength=16).float()
    balance.step()
    expected = 0.25 * torch.sign(37 * 4 / 16 - load)
    assert torch.equal(router.e_score_correction_bias, expected)
    assert set(expected.tolist()) == {-0.25, 0.25}
    balance.step()
    assert torch.equal(router.e_score_correction_bias, expected), "a step without tokens moves nothing"


def test_learning_rate_warms_up_to_the_peak_and_falls_to_a_twentieth() -> None:
    rates = [train.learning_rate(step, 1000) for step in range(1001)]
    assert max(rates) == rates[50] == pytest.approx(1.0)
    assert rates[0] == pytest.approx(1 / 50)
    assert rates[1000] == pytest.approx(0.05)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[50:]))
