"""Multi-token prediction layers: right by the paper's equations, by transformers' own, and to the bit in an export."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from paper_layer import PaperLayer
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV3Config, DeepseekV32Config, Qwen3NextConfig
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

import porter
from porter.errors import PorterError, Refusal
from porter.kernels.dispatch import using_reference
from porter.models import prediction_proof
from porter.models.family import families, family_of
from porter.models.prediction import DEEPSEEK, QWEN, extended_config, layer_text, prediction_of
from porter.models.presets import preset, shipped_directory
from porter.precision import float64_mode
from porter.prediction_layer import load_prediction_layer

NAME = "tiny-deepseek-v3-mtp"
PREFIX = "model.layers.4."


def source_directory() -> Path:
    found = shipped_directory(NAME)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("mtp") / "port"
    porter.adapt(NAME, scheme="fp32", output=directory)
    return directory


def released_config(**changes: Any) -> DeepseekV3Config:
    return DeepseekV3Config(**{"num_nextn_predict_layers": 1, **changes})


def test_layer_is_proven_against_that_of_transformers() -> None:
    source = families()["deepseek_v3"].port(released_config())
    assert source.prediction_error is not None and source.prediction_error < 1e-12
    assert families()["deepseek_v3"].port(released_config(num_nextn_predict_layers=0)).prediction_error is None


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v32", "glm4_moe"])
def test_every_familys_layer_passes_the_same_proof(model_type: str) -> None:
    """Nothing in the layer is DeepSeek-V3's alone: gated and sparse attention and GLM's fit it too."""
    family = family_of(model_type)
    family = dataclasses.replace(family, prediction=family.prediction or DEEPSEEK)
    config = CONFIG_MAPPING[model_type]()
    if family.prediction is DEEPSEEK:
        config.num_nextn_predict_layers = 1
    source = family.port(config)
    names = ["mtp.fc.weight"] if family.prediction is QWEN else []
    layer = family.predicting(config, source, names)
    assert source.prediction_error is not None and source.prediction_error < 1e-12
    assert layer is not None and layer.layers == (config.num_hidden_layers,)


SWAPPED = "(self.hnorm(hidden_states), self.enorm(embedded))"


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(self.enorm(embedded), self.hnorm(hidden_states))", SWAPPED),
        ("self.hnorm(hidden_states)", "hidden_states"),
        ('self.shared_head["norm"](super()', "(super()"),
        ("**kwargs))", '**{**kwargs, "cache": None}))'),
    ],
)
def test_a_wrong_layer_is_refused(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str) -> None:
    def planted(*classes: str) -> str:
        assert right in layer_text(*classes)
        return layer_text(*classes).replace(right, wrong)

    config = released_config()
    source = families()["deepseek_v3"].port(config)
    plain = dataclasses.replace(source, text=source.text.partition("\n\nclass PredictionLayer")[0])
    monkeypatch.setattr(prediction_proof, "layer_text", planted)
    with pytest.raises(Refusal, match="the prediction layer differs from upstream's"):
        prediction_proof.with_prediction_layer(plain, config)


def test_logits_are_those_of_the_papers_equations(exported: Path) -> None:
    model = porter.load(exported).double()
    layer: Any = load_prediction_layer(exported, model).double()
    tokens = torch.tensor([[256, *b"she had been too young, and he had been too confident of all "]])
    with torch.no_grad(), float64_mode(), using_reference(model), using_reference(layer):
        hidden = model.base_model(tokens, use_cache=False).last_hidden_state[:, :-1]
        following = tokens[:, 1:]
        embedded = model.get_input_embeddings()(following)
        positions = torch.arange(1, tokens.shape[1])[None]
        angles = model.base_model.rotary_emb(embedded, positions)
        logits = model.lm_head(layer(embedded, hidden, position_embeddings=angles, attention_mask=None, cache=None))
    expected = PaperLayer(source_directory(), 4).logits(hidden[0], following[0])
    assert (logits[0] - expected).norm() / expected.norm() < 1e-10
    # The layer is trained: it says what comes after the next byte much better than chance.
    assert (logits[0, :-1].argmax(-1) == tokens[0, 2:]).double().mean() > 0.3


def test_model_is_tiny_deepseek_v3_to_the_bit() -> None:
    base = shipped_directory("tiny-deepseek-v3")
    assert base is not None
    theirs, ours = load_file(base / "model.safetensors"), load_file(source_directory() / "model.safetensors")
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert all(name.startswith(PREFIX) for name in ours.keys() - theirs.keys())


def test_every_tensor_of_the_layer_is_exported_to_the_bit(exported: Path) -> None:
    stored, written = (load_file(d / "model.safetensors") for d in (source_directory(), exported))
    port = porter.adaptation.plan_port(NAME, "cpu", scheme="fp32")
    assert port.prediction is not None
    layer = {n: t for n, t in written.items() if n.startswith(PREFIX)}
    assert layer.keys() == port.prediction_state().keys()
    back = port.prediction.layout.invert(port.prediction.correspondence.invert(layer))
    copies = set(port.prediction.copies)
    assert back.keys() == {n for n in stored if n.startswith(PREFIX)} - copies
    assert all(torch.equal(back[n], stored[n].float()) for n in back)


def changed_checkpoint(folder: Path, drop: str = "", **changed: torch.Tensor) -> Path:
    shutil.copytree(source_directory(), folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {n: changed.get(n, t) for n, t in tensors.items() if not (drop and n.startswith(drop))}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    name = f"{PREFIX}shared_head.head.weight"
    other = torch.zeros_like(load_file(source_directory() / "model.safetensors")[name])
    with pytest.raises(PorterError, match=rf"ties {name} to lm_head.weight"):
        porter.adapt(changed_checkpoint(tmp_path / "other", **{name: other}), output=tmp_path / "port")


def test_a_checkpoint_that_leaves_the_layer_out_is_ported_without(tmp_path: Path) -> None:
    porter.adapt(changed_checkpoint(tmp_path / "none", drop=PREFIX), output=tmp_path / "port")
    model = porter.load(tmp_path / "port")
    with pytest.raises(PorterError, match="holds no prediction layer"):
        load_prediction_layer(tmp_path / "port", model)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    incomplete = changed_checkpoint(tmp_path / "part", drop=f"{PREFIX}hnorm")
    with pytest.raises(PorterError, match=rf"1 missing \({PREFIX}hnorm.weight\)"):
        porter.adapt(incomplete, output=tmp_path / "port")


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_int8_schemes_quantize_the_layer(tmp_path: Path, scheme: str) -> None:
    porter.adapt(NAME, scheme=scheme, output=tmp_path / "port")
    layer: Any = load_prediction_layer(tmp_path / "port", porter.load(tmp_path / "port"))
    assert layer.eh_proj.weight.dtype == layer.mlp.experts.gate_up_proj.dtype == torch.int8
    assert layer.eh_proj.scheme == scheme and layer.mlp.gate.weight.dtype == torch.float32
    config = json.loads((tmp_path / "port" / "config.json").read_text())
    assert config["porter"]["prediction_layers"] == [4]


def test_transformers_drafts_with_the_exported_layer(exported: Path) -> None:
    """transformers' own speculative decoding takes the ported decoder layer and the exported names."""
    model: Any = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    prompt = torch.tensor([[256, *b"Captain Wentworth was "]])
    plain, drafted = (model.generate(prompt, max_new_tokens=24, do_sample=False, use_mtp=m) for m in (None, True))
    assert torch.equal(plain, drafted)


def test_a_released_layer_has_the_published_size() -> None:
    # DeepSeek-V3's README_WEIGHTS: 11.5B unique parameters; 685B with the copies of embedding and head (0.9B each).
    config = preset("deepseek-v3").config()
    source = families()["deepseek_v3"].port(config)
    layer = families()["deepseek_v3"].predicting(config, source)
    assert layer is not None and layer.layers == (61,)
    unique = sum(torch.Size(shape).numel() for shape in layer.expected.values())
    assert unique / 1e9 == pytest.approx(11.5, rel=0.015)
    copies = 2 * config.vocab_size * config.hidden_size
    assert (preset("deepseek-v3").published_parameters + unique + copies) / 1e9 == pytest.approx(685, abs=1)


def test_the_layer_of_deepseek_v32_makes_up_the_published_size() -> None:
    """The 163 files of DeepSeek-V3.2 hold 685,396,921,376 elements, the scales of its FP8 blocks among them."""
    config = preset("deepseek-v3.2").config()
    family = families()["deepseek_v32"]
    layer = family.predicting(config, family.port(config))
    assert layer is not None and layer.layers == (61,)
    assert layer.expected["model.layers.61.self_attn.indexer.wq_b.weight"] == (8192, 1536)
    unique = sum(torch.Size(shape).numel() for shape in layer.expected.values())
    copies = 2 * config.vocab_size * config.hidden_size
    block = 128
    attention = [(128, 7168), (8192, 1536), (576, 7168), (32768, 512), (7168, 16384), (1536, 7168), (24576, 1536)]
    blocks = [62 * [shape] for shape in attention] + [3 * 3 * [(18432, 7168)], 59 * 257 * 3 * [(2048, 7168)]]
    scales = sum(-(-rows // block) * (-(-columns // block)) for shapes in blocks for rows, columns in shapes)
    assert preset("deepseek-v3.2").published_parameters + unique + copies + scales == 685_396_921_376


def test_qwens_released_layer_makes_up_the_published_size() -> None:
    # The index of Qwen3-Next-80B-A3B's files gives a total_size of 162,649,725,440 bytes, in bfloat16.
    config = preset("qwen3-next-80b-a3b").config()
    family = families()["qwen3_next"]
    source = family.port(config)
    assert family.predicting(config, source) is None, "its config.json does not speak of the layer"
    layer = family.predicting(config, source, ["mtp.fc.weight"])
    assert layer is not None and layer.layers == (48,) and all(name.startswith("mtp.") for name in layer.expected)
    parameters = sum(torch.Size(shape).numel() for shape in layer.expected.values())
    assert preset("qwen3-next-80b-a3b").published_parameters + parameters == 162_649_725_440 // 2


def test_a_checkpoint_of_qwen_without_the_layer_is_ported_without(tmp_path: Path) -> None:
    source = shipped_directory("tiny-qwen3-next")
    assert source is not None
    shutil.copytree(source, tmp_path / "none")
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "none" / "model.safetensors", metadata={"format": "pt"})
    assert porter.adaptation.plan_port(str(tmp_path / "none"), "cpu").prediction is None
    port = porter.adaptation.plan_port("tiny-qwen3-next", "cpu")
    assert port.prediction is not None and port.prediction.layers == (4,)


def tensors_of_qwen(layer: Any, stored: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """The file's tensors for transformers' MtpLayer, by the names that vLLM's qwen3_next_mtp reads."""
    beside = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    stacked = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    state = {}
    for name in layer.state_dict():
        there = name.replace("mtp_block.", "mtp.layers.0.")
        leaf = name.rpartition(".")[2]
        if name.split(".")[0] in beside:
            state[name] = stored[f"mtp.{beside[name.split('.')[0]]}.weight"]
        elif leaf in stacked:
            rows = [[there.replace(leaf, f"{e}.{part}.weight") for part in stacked[leaf]] for e in range(experts)]
            state[name] = torch.stack([torch.cat([stored[each] for each in row]) for row in rows])
        else:
            state[name] = stored[there]
    return state


def test_qwens_layer_is_transformers_own_over_the_tensors_of_the_file(tmp_path: Path) -> None:
    directory = shipped_directory("tiny-qwen3-next")
    assert directory is not None
    config = Qwen3NextConfig.from_pretrained(directory)
    theirs: Any = MtpLayer(extended_config(config, 1), Qwen3NextDecoderLayer, Qwen3NextRMSNorm, 4).eval()
    stored = load_file(directory / "model.safetensors")
    theirs.load_state_dict(tensors_of_qwen(theirs, stored, config.num_experts))
    theirs.double()
    porter.adapt("tiny-qwen3-next", scheme="fp32", output=tmp_path / "port")
    model = porter.load(tmp_path / "port").double()
    ours: Any = load_prediction_layer(tmp_path / "port", model).double()
    tokens = torch.tensor([[*b"she had been too young, and he had been too confident of all "]])
    with torch.no_grad(), float64_mode(), using_reference(model), using_reference(ours):
        hidden = model.base_model(tokens, use_cache=False).last_hidden_state[:, :-1]
        embedded = model.get_input_embeddings()(tokens[:, 1:])
        positions = torch.arange(1, tokens.shape[1])[None]
        angles = model.base_model.rotary_emb(embedded, positions)
        mask = torch.full((tokens.shape[1] - 1,) * 2, -torch.inf, dtype=torch.float64).triu(1)[None, None]
        keywords = {"position_embeddings": angles, "attention_mask": mask, "position_ids": positions, "cache": None}
        found, wanted = ours(embedded, hidden, **keywords), theirs(embedded, hidden, **keywords)
        logits = model.lm_head(found)
    assert (found - wanted).norm() / wanted.norm() < 1e-10
    assert (logits[0, :-1].argmax(-1) == tokens[0, 2:]).double().mean() > 0.3


def test_names_of_qwen_checkpoints() -> None:
    config = released_config(num_hidden_layers=3, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2)
    family = families()["deepseek_v3"]
    layer = prediction_of(config, family.module, family.class_name, family.port(config), QWEN, ())
    for ours, theirs in (("enorm", "pre_fc_norm_embedding"), ("eh_proj", "fc"), ("shared_head.norm", "norm")):
        assert layer.layout.source_of(f"model.layers.3.{ours}.weight") == (f"mtp.{theirs}.weight",)
    assert layer.layout.source_of("model.layers.3.self_attn.o_proj.weight") == ("mtp.layers.0.self_attn.o_proj.weight",)
    experts = layer.layout.source_of("model.layers.3.mlp.experts.down_proj")
    assert experts == tuple(f"mtp.layers.0.mlp.experts.{i}.down_proj.weight" for i in range(4))
    assert all(name.startswith("mtp.") for name in layer.expected) and not layer.copies
    assert layer.stored(["mtp.fc.weight"]) and not layer.stored(["model.norm.weight"])
    assert DEEPSEEK.block.format(layer=3) == "model.layers.3."


def test_lists_by_layer_are_continued_by_their_last_entry() -> None:
    extended = extended_config(Qwen3NextConfig(num_hidden_layers=4), 1)
    assert extended.num_hidden_layers == 5 and extended.layer_types[-1] == "full_attention"
    # A model that is cut short may end with a recurrent state; its prediction layer attends all the same.
    cut = Qwen3NextConfig(num_hidden_layers=2)
    assert cut.layer_types[-1] == "linear_attention" and extended_config(cut, 1).layer_types[-1] == "full_attention"
    whole, short = DeepseekV32Config(), DeepseekV32Config(num_hidden_layers=2)
    assert whole.mlp_layer_types[-1] == "sparse" != short.mlp_layer_types[-1]
    assert extended_config(short, 1, like=whole).mlp_layer_types == ["dense", "dense", "sparse"]
