"""The model can be rebuilt from the golden alone, or from the checkpoint that it names, and from nothing else."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from porter.errors import PorterError
from porter.golden.capture import capture
from porter.golden.store import Golden

Build = Callable[..., nn.Module]


def _rebuilt(golden: Golden) -> nn.Module:
    module, _, name = golden.manifest["model"]["class"].rpartition(".")
    kind: Any = getattr(importlib.import_module(module), name)
    model: nn.Module = kind(kind.config_class.from_dict(golden.manifest["model"]["config"])).eval()
    model.load_state_dict(dict(golden.weights()))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_weights_rebuild_the_model(dtype: torch.dtype, tied: bool, qwen3: Build, tmp_path: Path) -> None:
    model = qwen3(tie_word_embeddings=tied).to(dtype)
    golden = capture(model, [[1, 2]], tmp_path / "golden")
    described = golden.manifest["model"]
    assert described["weights"] and described["checkpoint"] is None
    assert described["tied"] == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    (file,) = golden.path.glob("weights-*.safetensors")
    with safe_open(file, framework="pt") as opened:
        assert ("lm_head.weight" in opened.keys()) is not tied
    stored = dict(golden.weights())
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())
    assert golden.manifest["dtype"] == str(dtype).removeprefix("torch.")
    with torch.no_grad():
        logits = _rebuilt(golden).to(dtype)(torch.tensor([[1, 2]]), use_cache=False).logits
    assert torch.equal(logits, golden.value(golden.records[-1].outputs).logits)


def test_untouched_checkpoint_is_referenced(qwen3: Build, tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    model: Any = qwen3()
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "checkpoint")
    golden = capture(loaded, [[1, 2]], tmp_path / "golden")
    described = golden.manifest["model"]
    assert described["checkpoint"] == str(tmp_path / "checkpoint") and not described["weights"]
    assert described["unverified"] == [] and list(described["digests"]) == ["model.safetensors"]
    assert not list((tmp_path / "golden").glob("weights*"))
    assert torch.equal(dict(golden.weights())["lm_head.weight"], model.lm_head.weight)
    file = tmp_path / "checkpoint" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(PorterError, match="changed since the golden was recorded"):
        list(golden.weights())
    file.unlink()
    with pytest.raises(PorterError, match="weights are gone"):
        list(golden.weights())


def test_changed_parameters_are_stored_instead(qwen3: Build, tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    model: Any = qwen3()
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "checkpoint")
    with torch.no_grad():
        loaded.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] += 1
    golden = capture(loaded, [[1, 2]], tmp_path / "golden")
    assert golden.manifest["model"]["weights"] and golden.manifest["model"]["checkpoint"] is None


def test_weights_of_views_and_buffers(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.arange(12.0)
            self.first, self.second = nn.Parameter(both[:6].view(2, 3)), nn.Parameter(both[4:])
            self.register_buffer("kept", torch.tensor(3))
            self.register_buffer("dropped", torch.tensor(4), persistent=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens

    golden = capture(Views(), [[1]], tmp_path / "golden")
    stored = dict(golden.weights())
    assert stored.keys() == {"first", "second", "kept"} and torch.equal(stored["second"], torch.arange(4.0, 12.0))


def test_without_weights(qwen3: Build, tmp_path: Path) -> None:
    golden = capture(qwen3(), [[1]], tmp_path / "golden", store_weights=False)
    with pytest.raises(PorterError, match="recorded without weights"):
        golden.weights()
