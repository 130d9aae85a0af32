"""The contract lint: every contract that is broken is named, legitimate ports are left alone, nothing is run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_sides import Sides, found, kept_wide
from planted import bfloat16, deepseek_v3, golden_of, qwen2
from safetensors.torch import save_file
from torch import nn

import porter
from porter.alignment.candidate import load_candidate
from porter.alignment.contract_lint.kinds import KINDS, kind_of
from porter.alignment.contract_lint.lint import certain_drifts, lint, lint_directory, longest
from porter.alignment.pairing import module_names, pair_modules
from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.golden.capture import capture


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    torch.set_num_threads(1)
    model = qwen2()
    return model, golden_of(model, tmp_path_factory.mktemp("dense") / "golden")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Sides:
    torch.set_num_threads(1)
    model = deepseek_v3()
    return model, golden_of(model, tmp_path_factory.mktemp("sparse") / "golden")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["dense", "sparse"])
def test_a_model_loaded_in_another_precision_keeps_every_contract(
    family: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    model, golden = request.getfixturevalue(family)
    candidate = copy.deepcopy(model) if dtype == torch.float32 else kept_wide(model)
    if dtype == torch.float16:
        for parameter in candidate.parameters():
            parameter.data = parameter.to(dtype) if parameter.dtype == torch.bfloat16 else parameter.data
    assert found(golden, model, candidate) == []


@pytest.mark.parametrize("scheme", ["bf16", "fp32", "int8", "w8a16"])
@pytest.mark.parametrize("family", ["dense", "sparse"])
def test_ports_keep_every_contract(family: str, scheme: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model, golden = request.getfixturevalue(family)
    copy.deepcopy(model).save_pretrained(tmp_path / "checkpoint")
    porter.adapt(str(tmp_path / "checkpoint"), target="cpu", scheme=scheme, output=tmp_path / "port")
    port = load_candidate(tmp_path / "port")
    assert port.model is not None
    pairing = pair_modules(golden, module_names(port.model), port.correspondence)
    assert lint(golden, model, port.model, pairing) == []
    assert lint_directory(golden, tmp_path / "port", port.correspondence) == []


def test_a_plain_cast_narrows_what_the_class_pins_and_the_rotary_frequencies(sparse: Sides) -> None:
    model, golden = sparse
    findings = found(golden, model, bfloat16(model))
    gate = "model.layers.1.mlp.gate"
    assert {(f.kind, f.module, f.what) for f in findings} == {
        ("router-dtype", gate, "weight"),
        ("router-bias-dtype", gate, "e_score_correction_bias"),
        ("rope-dtype", "model.rotary_emb", "inv_freq"),
    }
    assert all((f.golden, f.candidate, f.certain) == ("float32", "bfloat16", False) for f in findings)
    told = {f.kind: f.why for f in findings}
    assert "8 distinct values become" in told["router-bias-dtype"]
    assert "at position 128 the angle is off by up to" in told["rope-dtype"]


def test_narrower_than_a_golden_that_keeps_it_wide_is_certain(sparse: Sides, tmp_path: Path) -> None:
    model, _ = sparse
    source = kept_wide(model)
    golden = golden_of(source, tmp_path / "golden")
    candidate = copy.deepcopy(source)
    gate = candidate.model.layers[1].mlp.gate
    gate._buffers["e_score_correction_bias"] = gate.e_score_correction_bias.to(torch.bfloat16)
    (finding,) = found(golden, source, candidate)
    assert finding.certain and finding.kind == "router-bias-dtype"
    pairing = pair_modules(golden, module_names(candidate), Correspondence())
    (drifted,) = certain_drifts([finding], pairing)
    assert (drifted.drift.module, drifted.drift.tensor) == ("model.layers.1.mlp.gate", "e_score_correction_bias")
    report = porter.align(golden, candidate, passes="weights", source=source)
    assert report.verdict == "drift" and report.first_drift is not None
    assert report.first_drift.module == "model.layers.1.mlp.gate"


def test_narrower_but_exactly_equal_is_no_finding(sparse: Sides, tmp_path: Path) -> None:
    model, _ = sparse
    source = kept_wide(model)
    gate = source.model.layers[1].mlp.gate
    gate.e_score_correction_bias.copy_(gate.e_score_correction_bias.to(torch.bfloat16))
    candidate = copy.deepcopy(source)
    candidate.model.layers[1].mlp.gate.to(torch.bfloat16)
    candidate.model.layers[1].mlp.gate.weight = gate.weight
    golden = golden_of(source, tmp_path / "golden")
    assert found(golden, source, candidate) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.1.self_attn.q_proj.bias", "bias-dtype"),
        ("model.layers.0.input_layernorm.weight", "norm-weight-dtype"),
        ("model.layers.2.mlp.down_proj.weight", "narrower"),
    ],
)
def test_one_tensor_narrower_than_the_rest_is_named(dense: Sides, name: str, kind: str) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    owner, _, leaf = name.rpartition(".")
    module = candidate.get_submodule(owner)
    module._parameters[leaf] = nn.Parameter(module.get_parameter(leaf).to(torch.bfloat16), requires_grad=False)
    (finding,) = found(golden, model, candidate)
    assert (finding.kind, finding.module, finding.what) == (kind, owner, leaf)
    assert (finding.golden, finding.candidate) == ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.mlp.gate.weight", "router-dtype"),
        ("model.layers.3.block.router.weight", "router-dtype"),
        ("model.layers.3.mlp.gate_proj.weight", "narrower"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "router-bias-dtype"),
        ("model.rotary_emb.inv_freq", "rope-dtype"),
        ("model.layers.3.self_attn.rotary_emb.cos_cached", "rope-dtype"),
        ("model.layers.3.linear_attn.A_log", "state-dtype"),
        ("model.layers.3.linear_attn.dt_bias", "state-dtype"),
        ("model.layers.3.self_attn.q_norm.weight", "norm-weight-dtype"),
        ("model.layers.3.self_attn.o_proj.bias", "bias-dtype"),
        ("model.layers.3.self_attn.o_proj.weight", "narrower"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind and kind in KINDS


class Table(nn.Module):
    """A rotary table of a fixed number of rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("cos_cached", torch.ones(rows, 8), persistent=False)


@pytest.mark.parametrize(
    ("rows", "expected"), [(21, (True, "22 positions recorded")), (22, (False, "128 positions")), (128, None)]
)
def test_a_rotary_table_shorter_than_the_positions(dense: Sides, rows: int, expected: Any) -> None:
    model, golden = dense
    assert longest(golden) == 22
    candidate = copy.deepcopy(model)
    candidate.model.table = Table(rows)
    findings = found(golden, model, candidate)
    assert len(findings) == (expected is not None)
    for finding in findings:
        assert (finding.kind, finding.certain) == ("rope-range", expected[0]) and expected[1] in finding.golden


def test_a_certain_finding_makes_the_verdict(dense: Sides) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    candidate.model.layers[1].self_attn.table = Table(21)
    report = porter.align(golden, candidate, passes="weights")
    assert report.verdict == "drift" and report.first_drift is not None
    assert (report.first_drift.module, report.first_drift.tensor) == ("model.layers.1.self_attn.table", "cos_cached")


@pytest.mark.parametrize(
    ("field", "value", "kind", "what"),
    [
        ("rms_norm_eps", 1e-3, "config", "rms_norm_eps"),
        ("max_position_embeddings", 64, "rope-range", "max_position_embeddings"),
        ("kv_cache_dtype", "fp8_e4m3", "kv-cache-dtype", "kv_cache_dtype"),
        ("cache_implementation", "quantized", "kv-cache-dtype", "cache_implementation"),
        ("kv_cache_dtype", "bfloat16", None, ""),
        ("use_cache", False, None, ""),
    ],
)
def test_configs(dense: Sides, field: str, value: Any, kind: str | None, what: str) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    setattr(candidate.config, field, value)
    assert [(f.kind, f.what) for f in found(golden, model, candidate)] == ([(kind, what)] if kind else [])


def test_nested_fields_are_named_one_by_one(dense: Sides) -> None:
    model, golden = dense
    candidate = copy.deepcopy(model)
    candidate.config.rope_parameters = {**candidate.config.rope_parameters, "rope_theta": 5e5}
    (finding,) = found(golden, model, candidate)
    assert (finding.what, finding.golden, finding.candidate) == ("rope_parameters.rope_theta", "10000.0", "500000.0")


def test_declared_states_and_cache_schemes(tmp_path: Path, dense: Sides) -> None:
    model, _ = dense
    source = copy.deepcopy(model)
    source.config.mamba_ssm_dtype = "float32"
    golden = capture(source, torch.ones(1, 4, dtype=torch.int64), tmp_path / "golden")
    candidate = copy.deepcopy(source)
    candidate.config.mamba_ssm_dtype = "float16"
    candidate.config.quantization_config = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    findings = {f.kind: f for f in found(golden, source, candidate)}
    assert (findings["state-dtype"].golden, findings["state-dtype"].candidate) == ("float32", "float16")
    assert findings["kv-cache-dtype"].candidate == "8 bits"


def test_a_directory_is_linted_from_its_headers_alone(sparse: Sides, tmp_path: Path) -> None:
    model, golden = sparse
    state = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(state, tmp_path / "model.safetensors")
    config = {
        **json.loads(model.config.to_json_string(use_diff=False)),
        "dtype": "bfloat16",
        "routed_scaling_factor": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    findings = lint_directory(golden, tmp_path)
    assert {(f.kind, f.what) for f in findings} == {
        ("norm-weight-dtype", "weight"),
        ("config", "routed_scaling_factor"),
    }


@pytest.mark.parametrize("broken", ["empty", "config", "weights"])
def test_unreadable_directories_are_refused_by_name(dense: Sides, tmp_path: Path, broken: str) -> None:
    _, golden = dense
    if broken != "config":
        (tmp_path / "config.json").write_text("{}")
    if broken == "weights":
        (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(PorterError, match=str(tmp_path)):
        lint_directory(golden, tmp_path)
