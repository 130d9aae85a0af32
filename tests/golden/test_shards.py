"""Goldens of parallel ranks put together: equal to the whole model's, and what a wrong reduction looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_layers import differences, fused_ranks
from parallel_ranks import record_ranks

import porter
from porter.cli.app import run
from porter.errors import PorterError
from porter.golden.shards import gather
from porter.golden.store import Golden

TOKENS = torch.tensor([[5, 11, 2, 40, 7, 23, 1], [8, 3, 3, 60, 12, 0, 9]])


def _inside(name: str) -> int:
    """Row-parallel layers that sum over the ranks themselves, and experts that do."""
    return int(name.endswith(("o_proj", "down_proj", ".experts")))


def _around(name: str) -> int:
    """Sums taken by the module around: the layers put out partial sums."""
    return int(name.endswith(("self_attn", "mlp")))


def _but(name: str, times: int, sums: Callable[[str], int]) -> Callable[[str], int]:
    return lambda module: times if module == name else sums(module)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoints")
    qwen3 = Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2,
    )  # fmt: skip
    deepseek = DeepseekV3Config(
        vocab_size=67, hidden_size=32, intermediate_size=40, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(qwen3).save_pretrained(folder / "qwen3")
    DeepseekV3ForCausalLM(deepseek).save_pretrained(folder / "deepseek")
    return {name: folder / name for name in ("qwen3", "deepseek")}


def _model(checkpoint: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    model.config._experts_implementation = "eager"
    return model


@pytest.fixture(scope="module")
def wholes(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    folder = tmp_path_factory.mktemp("wholes")
    return {
        name: porter.capture(_model(path), TOKENS, folder / name, new_tokens=2) for name, path in checkpoints.items()
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sums", [_inside, _around])
@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_gathered_is_the_whole(
    checkpoints: dict[str, Path], wholes: dict[str, Golden], tmp_path: Path, family: str, sums: Any, world: int
) -> None:
    ranks = record_ranks(_model(checkpoints[family]), world, tmp_path, TOKENS, sums)
    gathered = gather(ranks, tmp_path / "gathered")
    assert gathered.manifest["gathered"]["unequal"] == []
    assert gathered.generated == wholes[family].generated and gathered.manifest["tokens"] == TOKENS.tolist()
    worst = differences(gathered, wholes[family])
    # The order of summation differs; a lost part or a permuted head is an error of the order of one.
    assert max(worst.values()) < 1e-4, max(worst, key=lambda name: worst[name])


FAULTS = [
    ("qwen3", 2, _but("model.layers.1.mlp", 0, _around), "mlp.down_proj", "reduction-missing"),
    ("qwen3", 4, _but("model.layers.1.self_attn.o_proj", 0, _inside), "self_attn.o_proj", "reduction-missing"),
    ("qwen3", 2, _but("model.layers.1.self_attn", 2, _around), "self_attn", "reduction-doubled"),
    ("qwen3", 4, _but("model.layers.1.mlp.down_proj", 2, _inside), "mlp.down_proj", "reduction-doubled"),
    ("deepseek", 2, _but("model.layers.1.mlp.experts", 0, _inside), "mlp.experts", "reduction-missing"),
    ("deepseek", 2, _but("model.layers.1.mlp.experts", 2, _inside), "mlp.experts", "reduction-doubled"),
]


@pytest.mark.parametrize(("family", "world", "sums", "module", "kind"), FAULTS)
def test_wrong_reductions_are_named(
    checkpoints: dict[str, Path],
    wholes: dict[str, Golden],
    tmp_path: Path,
    family: str,
    world: int,
    sums: Any,
    module: str,
    kind: str,
) -> None:
    ranks = record_ranks(_model(checkpoints[family]), world, tmp_path, TOKENS, sums)
    gathered = gather(ranks, tmp_path / "gathered")
    report = porter.align(wholes[family], gathered)
    assert report.verdict == "drift" and report.first_drift is not None
    assert report.first_drift.module == f"model.layers.1.{module}"
    assert report.causes[0].kind == kind and f"of {world} ranks" in report.causes[0].says.replace("each of", "of")
    told = [check for check in report.sanity if check.check == "ranks"]
    assert bool(told) == (kind == "reduction-missing")
    if told and family == "qwen3":
        assert told[0].module == "model.layers.1." + module.partition(".")[0] and "rank 1" in told[0].says


def test_gathered_as_the_golden(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from porter.golden.importers.reference import reference_of

    ranks = record_ranks(_model(checkpoints["qwen3"]), 2, tmp_path, TOKENS, _inside)
    described = reference_of(str(checkpoints["qwen3"])).described
    gathered = gather(ranks, tmp_path / "gathered", model=described)
    assert porter.align(gathered, _model(checkpoints["qwen3"])).verdict == "aligned"
    wrong = _model(checkpoints["qwen3"])
    wrong.model.layers[1].self_attn.k_norm.variance_epsilon = 0.5
    first = porter.align(gathered, wrong).first_drift
    assert first is not None and first.module == "model.layers.1.self_attn.k_norm"


def test_a_rank_with_other_weights_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def spoil(rank: int, part: Any) -> None:
        if rank == 2:
            part.model.layers[0].post_attention_layernorm.weight.data[3] += 0.5

    ranks = record_ranks(_model(checkpoints["qwen3"]), 4, tmp_path, TOKENS, _inside, spoil)
    unequal = gather(ranks, tmp_path / "gathered").manifest["gathered"]["unequal"]
    assert unequal[0]["module"] == "model.layers.0.post_attention_layernorm" and unequal[0]["rank"] == 2
    assert {entry["rank"] for entry in unequal} == {2}


def test_a_wrong_copy_of_a_head_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def spoil(rank: int, part: Any) -> None:
        if rank == 1:  # which holds the same key-value head as rank 0
            part.model.layers[0].self_attn.k_proj.weight.data[0] += 1.0

    ranks = record_ranks(_model(checkpoints["qwen3"]), 4, tmp_path, TOKENS, _inside, spoil)
    gathered = gather(ranks, tmp_path / "gathered")
    first = gathered.manifest["gathered"]["unequal"][0]
    assert first["module"] == "model.layers.0.self_attn.k_proj" and first["rank"] == 1
    record = next(record for record in gathered.records if record.module.endswith("k_proj"))
    assert record.outputs["shape"][-1] == 16


def test_ranks_that_do_not_belong_together(wholes: dict[str, Golden], tmp_path: Path) -> None:
    weight = torch.randn(32, 7)
    first, second = fused_ranks([weight, weight[:5]], tmp_path)
    with pytest.raises(PorterError, match="two ranks or more"):
        gather([first], tmp_path / "g")
    with pytest.raises(PorterError, match=r"qkv_proj: output tensors are \[2, 3, 32\], \[2, 3, 5\] on the ranks"):
        gather([first, second], tmp_path / "g")
    with pytest.raises(PorterError, match="recorded on other tokens"):
        gather([first, wholes["qwen3"]], tmp_path / "h")
    manifest = json.loads((first.path / "manifest.json").read_text()) | {"rank": 1, "world_size": 2}
    (first.path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PorterError, match="recorded by rank 1, given as rank 0"):
        gather([first.path, second.path], tmp_path / "i")


def test_a_recording_knows_its_rank(tmp_path: Path) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        golden = fused_ranks([torch.ones(4, 2)], tmp_path)[0]
    finally:
        distributed.destroy_process_group()
    assert (golden.manifest["rank"], golden.manifest["world_size"]) == (0, 1)
    with pytest.raises(PorterError, match="recorded by one of 1 ranks"):
        gather([golden, golden], tmp_path / "g")


def test_command(checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = record_ranks(_model(checkpoints["qwen3"]), 2, tmp_path, TOKENS, _but("model.layers.0.mlp", 0, _around))
    command = ["golden", "gather", *(str(rank.path) for rank in ranks), "--output", str(tmp_path / "g")]
    assert run([*command, "--model", str(checkpoints["qwen3"]), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gathered"]["unequal"][0]["module"] == "model.layers.0.mlp"
    assert run(["golden", "show", str(tmp_path / "g")]) == 0
    assert "rank 1 differs: model.layers.0.mlp output at step 0" in capsys.readouterr().out
    assert run([*command[:3], "--output", str(tmp_path / "h")]) == 2
