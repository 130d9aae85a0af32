"""bf16 weights under float32 activations: `--scheme bf16 --dtype fp32`, from the kernels to the aligner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import porter
from porter.alignment.align import align
from porter.checkpoint.reader import Checkpoint
from porter.generation import generate
from porter.golden.capture import capture
from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.dispatch import usage
from porter.models.proof import relative_error

Make = Callable[..., Path]
IDS = torch.arange(1, 20)[None]
FAULTS = {"scaled weight": "mlp.down_proj", "other eps": "input_layernorm", "rounded activations": "self_attn.o_proj"}
FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "deepseek_v3")


def adapted(original: Path, **options: Any) -> porter.Port:
    return porter.adapt(str(original), "cpu", scheme="bf16", dtype="fp32", output=original.parent / "port", **options)


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_computes_what_float32_computes(model_type: str, random_checkpoint: Make) -> None:
    """A bf16 checkpoint loses nothing: what is left is float32's own rounding."""
    original = random_checkpoint(model_type, dtype=torch.bfloat16)
    adapted(original)
    model = porter.load(original.parent / "port", strict=True)
    plain = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    ours = logits(model)
    assert ours.dtype == torch.float32
    # A few thousand roundings of 2^-24 each; one activation rounded to bfloat16 would cost 1e-3.
    assert relative_error(ours, logits(plain)) < 1e-5
    served = {row["provider"] for row in usage(model) if row["op"] in ("linear", "experts") and row["calls"]}
    assert served == {"cpu"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_weights_stay_bfloat16_and_are_counted_so(model_type: str, random_checkpoint: Make) -> None:
    original = random_checkpoint(model_type)
    port = adapted(original)
    model = porter.load(original.parent / "port")
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {kinds["model.layers.1.self_attn.o_proj.weight"], kinds["lm_head.weight"]} == {torch.bfloat16}
    assert kinds["model.embed_tokens.weight"] == torch.bfloat16
    assert kinds["model.norm.weight"] == torch.float32 == model.config.dtype
    if "moe" in model_type:
        assert kinds["model.layers.1.mlp.experts.gate_up_proj"] == torch.bfloat16
        assert kinds["model.layers.1.mlp.gate.weight"] == torch.float32
    sizes = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    assert port.plan.weight_bytes == sizes
    stored = Checkpoint.open(original.parent / "port")
    assert {name: stored.info(name).torch_dtype for name in stored.names} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }


def test_the_cache_is_counted_in_float32(random_checkpoint: Make) -> None:
    original = str(random_checkpoint("qwen3"))
    wide, narrow = (
        porter.adapt(original, "cpu", scheme="bf16", dtype=dtype, plan=True).plan.kv_bytes_per_token
        for dtype in ("fp32", "bf16")
    )
    assert wide == 2 * narrow > 0


def test_float32_checkpoints_are_rounded_once(random_checkpoint: Make) -> None:
    """Against upstream in float32 with the same parameters rounded; biases and norms stay as they were."""
    original = random_checkpoint("qwen2")
    port = adapted(original)
    model = porter.load(original.parent / "port")
    plain = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    exact = logits(plain)
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16())
    assert relative_error(logits(model), logits(plain)) < 1e-5
    assert relative_error(logits(plain), exact) > 1e-4
    assert port.config.porter["quantized"]["lm_head"] == "bf16"


def test_tied_embeddings_stay_one_tensor(random_checkpoint: Make) -> None:
    original = random_checkpoint("qwen3", dtype=torch.bfloat16, tie_word_embeddings=True)
    port = adapted(original)
    model = porter.load(original.parent / "port")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert port.plan.weight_bytes == sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3"])
def test_the_original_comes_back_bit_for_bit(model_type: str, random_checkpoint: Make) -> None:
    from safetensors.torch import load_file

    original = random_checkpoint(model_type, dtype=torch.bfloat16)
    port = adapted(original)
    state = porter.load(original.parent / "port").state_dict()
    back = port.layout.invert(port.correspondence.invert(state))
    for name, tensor in load_file(original / "model.safetensors").items():
        assert torch.equal(back[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_casts_to_other_dtypes(dtype: torch.dtype, random_checkpoint: Make) -> None:
    original = random_checkpoint("qwen3", dtype=torch.bfloat16)
    adapted(original)
    model = porter.load(original.parent / "port")
    before = logits(model).double()
    assert logits(model.to(dtype)).dtype == dtype
    # 2^-8 for each of a few layers' activations, or float32's 2^-24.
    assert relative_error(logits(model), before) < (0.1 if dtype == torch.bfloat16 else 1e-5)


def test_replays_steps(random_checkpoint: Make) -> None:
    original = random_checkpoint("qwen3", dtype=torch.bfloat16)
    adapted(original)
    model = porter.load(original.parent / "port")
    steps = list(generate(model, IDS[:, :5], 20))
    plain = model.generate(IDS[:, :5], max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0)
    assert steps[-1].way == "replayed"
    assert [int(step.tokens[0]) for step in steps] == plain[0, 5:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_is_aligned_with_a_float32_golden(model_type: str, dtype: torch.dtype, random_checkpoint: Make) -> None:
    """Rounding weights is what the scheme declares."""
    original = random_checkpoint(model_type, dtype=dtype)
    adapted(original)
    plain = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    golden = capture(plain, IDS, original.parent / "golden", new_tokens=3, store_weights=True)
    report = align(golden, original.parent / "port")
    assert report.verdict == "aligned", (report.first_drift, [w for w in report.weights if w.status != "ok"])
    assert report.coverage.parameters == 1.0
    rounded = [row for row in report.weights if row.parameter.endswith("o_proj.weight")]
    assert {row.expected for row in rounded} == {2.0**-8}
    assert all((row.error == 0) == (dtype == torch.bfloat16) for row in rounded)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_below_bfloat16_are_found(fault: str, random_checkpoint: Make) -> None:
    """The budget of a product is float32's: 2^-8 of the weights is forgiven where they are compared, and only there."""
    original = random_checkpoint("qwen3", dtype=torch.float32)
    adapted(original)
    plain = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    golden = capture(plain, IDS, original.parent / "golden", new_tokens=3)
    model = porter.load(original.parent / "port")
    layer = model.model.layers[1]
    with torch.no_grad():
        if fault == "scaled weight":
            layer.mlp.down_proj.weight.mul_(1.02)
        elif fault == "other eps":
            layer.input_layernorm.variance_epsilon *= 30
        else:
            layer.self_attn.o_proj.register_forward_hook(lambda module, inputs, output: output.bfloat16().float())
    report = align(golden, model)
    assert report.verdict == "drift"
    assert report.first_drift is not None and report.first_drift.module == f"model.layers.1.{FAULTS[fault]}"


def test_kernels_refuse_other_mixtures() -> None:
    """Only float32 activations over bfloat16 weights: the reference takes the rest."""
    provider = CpuProvider()
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    index, routed = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    gate_up, down = torch.ones(1, 6, 8), torch.ones(1, 8, 3)
    mixtures = ((x, weight.bfloat16(), None), (x, weight.bfloat16(), torch.ones(4)), (x.bfloat16(), weight, None))
    mixtures += ((x, weight.half(), None), (x, weight.bfloat16(), torch.ones(4).bfloat16()))
    linear, experts = (provider.implementation(name, "standard") for name in ("linear", "experts"))
    assert linear is not None and experts is not None
    assert [linear.accepts(*each) is None for each in mixtures] == [True, True, False, False, False]
    narrow = gate_up.bfloat16(), down.bfloat16()
    assert experts.accepts(x, index, routed, *narrow) is None
    assert experts.accepts(x, index, routed, narrow[0], down)
    assert experts.accepts(x.bfloat16(), index, routed, gate_up, down)
