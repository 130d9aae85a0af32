"""Models read from disk layer by layer are the models that would have been loaded, and are judged the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import FAULTS, bfloat16, deepseek_v3, golden_of, qwen2
from torch import nn

import porter
from porter.alignment.align import align
from porter.alignment.candidate import load_candidate
from porter.alignment.precision_swap import exact
from porter.alignment.rounded_source import round_to
from porter.alignment.source import open_source, rebuild_source
from porter.alignment.stream import part_of
from porter.alignment.streaming import Tensors, kept, present, reach, release, stream_of
from porter.golden.capture import capture
from porter.models.presets import shipped_directory

CPU = torch.device("cpu")
TOKENS = torch.arange(12).view(1, 12)


def tied(dtype: torch.dtype) -> Any:
    """A Qwen2 with tied embeddings, built with other names' values than a fresh one."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype).eval()


MODELS = {
    "qwen2": lambda: qwen2(),
    "tied float16": lambda: tied(torch.float16),
    "deepseek bfloat16": lambda: deepseek_v3().to(torch.bfloat16),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    model = MODELS[request.param]()
    folder = tmp_path_factory.mktemp("saved")
    copy.deepcopy(model).save_pretrained(folder, max_shard_size="40KB")
    return model, folder


def on_disk(model: nn.Module) -> list[str]:
    return [name for name, tensor in Tensors(model).shapes.items() if tensor.is_meta]


def loaded(folder: Path, dtype: Any = "auto") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_streamed_checkpoint_is_the_loaded_one(saved: tuple[Any, Path], dtype: torch.dtype | None) -> None:
    _, folder = saved
    whole, model = loaded(folder, dtype or "auto"), load_candidate(folder, dtype=dtype).model
    assert model is not None and stream_of(model) is not None
    assert len(on_disk(model)) == len(whole.state_dict())
    mine, theirs = Tensors(model), Tensors(whole)
    assert set(mine) == set(theirs)
    for name in theirs:
        assert mine[name].dtype == mine.shapes[name].dtype == theirs[name].dtype, name
        assert torch.equal(mine[name], theirs[name]), name
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
        with exact(model), exact(whole):
            assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
    assert len(on_disk(model)) == len(whole.state_dict()), "what a call brought in is still there"


@pytest.mark.parametrize("stored", [True, False])
def test_streamed_source_is_the_rebuilt_one(saved: tuple[Any, Path], tmp_path: Path, stored: bool) -> None:
    _, folder = saved
    golden = capture(loaded(folder), TOKENS, tmp_path / "golden", store_weights=stored)
    assert golden.manifest["model"]["weights"] is stored or stored is False
    whole, model = rebuild_source(golden), open_source(golden, CPU)
    assert stream_of(model) is not None
    mine, theirs = Tensors(model), Tensors(whole)
    for name in theirs:
        assert torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype, name


def test_one_layer_at_a_time(saved: tuple[Any, Path]) -> None:
    _, folder = saved
    model = load_candidate(folder).model
    assert model is not None
    everything = set(on_disk(model))
    reach(model, "model.layers.1.mlp")
    inside = everything - set(on_disk(model))
    assert inside == {name for name in everything if name.startswith("model.layers.1.")}
    reach(model, "model.layers.1")
    assert everything - set(on_disk(model)) == inside
    reach(model, "model.norm")
    assert everything - set(on_disk(model)) == {"model.norm.weight"}
    reach(model, "model")
    assert set(on_disk(model)) == everything, "a module that holds the layers comes without them"
    release(model)
    with present(model.get_submodule("model.layers.0")):
        assert len(on_disk(model)) < len(everything)
    with kept(model, 1 << 30), torch.no_grad():
        model(TOKENS)
        assert not on_disk(model)
    with kept(model, 1), torch.no_grad():
        model(TOKENS)
        assert set(on_disk(model)) == everything
    assert set(on_disk(model)) == everything


def test_parts() -> None:
    model = qwen2()
    found = {name: part_of(model, name) for name, _ in model.named_modules()}
    assert found[""] == ("", False) and found["model"] == ("model", False)
    assert found["lm_head"] == ("lm_head", True) and found["model.norm"] == ("model.norm", True)
    assert found["model.layers.2.self_attn.q_proj"] == found["model.layers.2"] == ("model.layers.2", True)


def other_layer(model: Any) -> str:
    """A whole layer holds the weights of the next."""
    model.model.layers[1].load_state_dict(model.model.layers[2].state_dict())
    return "model.layers.1"


def larger_eps(model: Any) -> str:
    """Every norm's eps a thousand times too large."""
    model.config.rms_norm_eps *= 1000
    return "model.layers.0.input_layernorm"


@pytest.mark.parametrize("fault", [FAULTS["halve_key_bias"], larger_eps, other_layer])
def test_streamed_and_loaded_are_judged_alike(tmp_path: Path, fault: Any) -> None:
    model = qwen2()
    golden = golden_of(model, tmp_path / "golden")
    candidate = bfloat16(model)
    with torch.no_grad():
        module = fault(candidate)
    candidate.save_pretrained(tmp_path / "candidate")
    streamed = align(golden, tmp_path / "candidate", dtype="bfloat16")
    whole = align(golden, loaded(tmp_path / "candidate", torch.bfloat16), source=rebuild_source(golden))
    for report in (streamed, whole):
        assert report.verdict == "drift"
        assert report.first_drift is not None and report.first_drift.module.startswith(module)
    assert streamed.environment["candidate"]["weights"] == "read layer by layer"
    assert [(w.parameter, w.status, w.error) for w in streamed.weights] == [
        (w.parameter, w.status, w.error) for w in whole.weights
    ]
    assert [(m.module, m.step, m.status) for m in streamed.modules] == [
        (m.module, m.step, m.status) for m in whole.modules
    ]
    assert [m.introduced for m in streamed.modules] == [m.introduced for m in whole.modules]
    assert {c.kind for c in streamed.causes} == {c.kind for c in whole.causes}


@pytest.mark.parametrize("scheme", ["fp32", "w8a16"])
def test_streamed_port_is_aligned(tmp_path: Path, scheme: str) -> None:
    porter.adapt("tiny-deepseek-v3", target="cpu", scheme=scheme, output=tmp_path / "port")
    from porter.original import original_directory

    golden = capture(loaded(original_directory("tiny-deepseek-v3")), TOKENS, tmp_path / "golden", new_tokens=2)
    report = align(golden, tmp_path / "port")
    assert report.environment["candidate"]["weights"] == "read layer by layer"
    assert report.verdict == "aligned", report.first_drift
    assert report.coverage.parameters == 1.0 and not report.coverage.skipped


def test_a_streamed_source_is_rounded_alike(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = saved
    golden = capture(loaded(folder), TOKENS, tmp_path / "golden", store_weights=True)
    whole, model = rebuild_source(golden), open_source(golden, CPU)
    layer = "model.layers.1"
    parts = whole.get_submodule(layer), model.get_submodule(layer)
    stored = {name: parameter.dtype for name, parameter in parts[0].named_parameters()}
    of_whole, of_model = round_to(whole, torch.bfloat16), round_to(model, torch.bfloat16)
    reach(model, layer)

    def same(dtypes: dict[str, torch.dtype]) -> None:
        theirs = dict(parts[0].named_parameters())
        for name, parameter in parts[1].named_parameters():
            assert parameter.dtype == theirs[name].dtype == dtypes[name], name
            assert torch.equal(parameter, theirs[name]), name

    same(dict.fromkeys(stored, torch.bfloat16))
    with of_whole.unrounded(parts[0]), of_model.unrounded(parts[1]):
        same(stored)
    same(dict.fromkeys(stored, torch.bfloat16))
    with torch.no_grad(), exact(whole), exact(model):
        assert torch.equal(whole(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("fault", [None, FAULTS["halve_key_bias"]])
def test_recordings_are_judged_alike(tmp_path: Path, fault: Any) -> None:
    model = qwen2()
    golden = golden_of(model, tmp_path / "golden")
    candidate = bfloat16(model)
    # Kept wide, as a port may: only that reading of the recording is in order.
    norm = candidate.model.layers[1].input_layernorm.float()
    norm.register_forward_hook(lambda module, args, output: output.to(torch.bfloat16))
    with torch.no_grad():
        module = None if fault is None else fault(candidate)
    recorded = golden_of(candidate, tmp_path / "candidate")
    streamed, whole = align(golden, recorded), align(golden, recorded, source=rebuild_source(golden))
    assert streamed.verdict == ("aligned" if fault is None else "drift")
    assert streamed.first_drift == whole.first_drift
    assert streamed.first_drift is None or streamed.first_drift.module == module
    assert [(m.module, m.status, m.introduced, m.budget, m.why) for m in streamed.modules] == [
        (m.module, m.status, m.introduced, m.budget, m.why) for m in whole.modules
    ]


def test_a_checkpoint_under_other_names_is_streamed() -> None:
    """DeepSeek-V4's files name nearly every tensor otherwise than transformers' class does."""
    folder = shipped_directory("tiny-deepseek-v4")
    assert folder is not None
    whole, model = loaded(folder), load_candidate(folder).model
    assert model is not None and stream_of(model) is not None
    mine, theirs = Tensors(model), Tensors(whole)
    assert set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, whole(TOKENS).logits)
