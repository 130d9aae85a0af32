"""Candidates on parallel ranks: put together they are the whole model, and a wrong shard is named with its rank."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import porter
from porter.alignment.candidate import load_candidate
from porter.alignment.rank_layout import spread_of
from porter.alignment.streaming import Tensors, stream_of
from porter.cli.app import run
from porter.errors import PorterError
from porter.golden.capture import capture
from porter.golden.shard_layout import rules_of
from porter.golden.store import Golden

TOKENS = torch.tensor([[5, 11, 2, 40, 7, 23, 1]])
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    qwen3 = Qwen3Config(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, initializer_range=0.2,
    )  # fmt: skip
    deepseek = DeepseekV3Config(
        vocab_size=60, hidden_size=32, intermediate_size=40, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, initializer_range=0.2,
    )  # fmt: skip
    return {"qwen3": Qwen3ForCausalLM(qwen3).eval(), "deepseek": DeepseekV3ForCausalLM(deepseek).eval()}


@pytest.fixture(scope="module")
def goldens(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Golden]:
    folder = tmp_path_factory.mktemp("goldens")
    return {name: capture(model, TOKENS, folder / name, store_weights=True) for name, model in models.items()}


def stored(model: Any, folder: Path) -> State:
    """The state as a checkpoint has it: experts one by one."""
    from safetensors.torch import load_file

    copy.deepcopy(model).save_pretrained(folder / "whole")
    found: State = load_file(folder / "whole" / "model.safetensors")
    return found


def dealt(state: State, world: int, heads: int, expert_parallel: bool = True) -> list[State]:
    """Every rank's share; key and value heads are repeated where there are fewer than ranks."""
    ranks: list[State] = [{} for _ in range(world)]
    for name, tensor in state.items():
        leaf = name.split(".")[-2]
        for rank in range(world):
            if ".experts." in name and expert_parallel:
                count = sum(each.startswith(name.partition(".experts.")[0]) for each in state)
                assert count
                if int(name.split(".experts.")[1].split(".")[0]) * world // 8 == rank:
                    ranks[rank][name] = tensor
            elif leaf in ("k_proj", "v_proj") and heads < world:
                ranks[rank][name] = tensor.chunk(heads)[rank * heads // world].clone()
            elif leaf in ROWS:
                ranks[rank][name] = tensor.chunk(world)[rank].clone()
            elif leaf in COLUMNS:
                ranks[rank][name] = tensor.chunk(world, dim=1)[rank].contiguous()
            else:
                ranks[rank][name] = tensor
    return ranks


def fused(ranks: list[State]) -> list[State]:
    """With the names of engines: qkv_proj and gate_up_proj on every rank."""
    parts = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    found = []
    for state in ranks:
        own = dict(state)
        for target, sources in parts.items():
            owner, _, _ = target.partition(".")
            for name in [name for name in state if name.endswith(f"{owner}.{sources[0]}.weight")]:
                prefix = name.removesuffix(f"{owner}.{sources[0]}.weight")
                own[f"{prefix}{target}.weight"] = torch.cat(
                    [own.pop(f"{prefix}{owner}.{source}.weight") for source in sources]
                )
        found.append(own)
    return found


def written(model: Any, ranks: list[State], folder: Path, name: str = "model-rank-{:02}.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    for rank, state in enumerate(ranks):
        path = folder / name.format(rank)
        path.parent.mkdir(exist_ok=True)
        save_file({key: tensor.contiguous().clone() for key, tensor in state.items()}, path)
    return folder


NAMES = (
    "model-rank-{:02}.safetensors",
    "model-rank-{}-part-0.safetensors",
    "rank{}/model.safetensors",
    "tp_rank_{:02}/model-00001-of-00001.safetensors",
)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_are_the_whole_model(models: dict[str, Any], tmp_path: Path, world: int, fuse: bool) -> None:
    model = models["qwen3"]
    ranks = dealt(stored(model, tmp_path), world, 2)
    for name in NAMES:
        folder = written(model, fused(ranks) if fuse else ranks, tmp_path / name.partition("/")[0], name)
        candidate = load_candidate(folder)
        assert candidate.model is not None and stream_of(candidate.model) is not None
        assert candidate.environment["ranks"] == world
        mine, theirs = Tensors(candidate.model), Tensors(model)
        assert set(mine) == set(theirs)
        for each in theirs:
            assert torch.equal(mine[each], theirs[each]), each


def test_deepseek_files_of_ranks(models: dict[str, Any], tmp_path: Path) -> None:
    folder = written(
        models["qwen3"], dealt(stored(models["qwen3"], tmp_path), 2, 2), tmp_path / "of", "model{}-mp2.safetensors"
    )
    assert load_candidate(folder).environment["ranks"] == 2
    (folder / "model1-mp2.safetensors").unlink()
    with pytest.raises(PorterError, match="rank 1 is missing of 2"):
        load_candidate(folder)


@pytest.mark.parametrize("expert_parallel", [True, False])
def test_experts_on_ranks(
    models: dict[str, Any], goldens: dict[str, Golden], tmp_path: Path, expert_parallel: bool
) -> None:
    ranks = dealt(stored(models["deepseek"], tmp_path), 2, 4, expert_parallel)
    report = porter.align(goldens["deepseek"], written(models["deepseek"], ranks, tmp_path / "ranks"))
    assert report.verdict == "aligned" and report.coverage.parameters == 1.0
    assert all(row.error == 0.0 for row in report.weights)


def test_local_experts_and_stacked_ones(models: dict[str, Any], tmp_path: Path) -> None:
    model = models["deepseek"]
    ranks = dealt(stored(model, tmp_path), 2, 4)
    for state in ranks[1:]:
        for name in sorted(name for name in state if ".experts." in name):
            number = int(name.split(".experts.")[1].split(".")[0])
            state[name.replace(f".experts.{number}.", f".experts.{number - 4}.")] = state.pop(name)
    folder = written(model, ranks, tmp_path / "local")
    found = load_candidate(folder, layout=[{"module": "experts", "experts": "local"}]).model
    assert found is not None
    for name, tensor in Tensors(model).items():
        assert torch.equal(Tensors(found)[name], tensor), name
    with pytest.raises(PorterError, match="do not hold"):
        load_candidate(folder)
    stacked = [{k: v for k, v in state.items() if ".experts." not in k} for state in ranks]
    prefix = "model.layers.1.mlp.experts."
    for rank, state in enumerate(stacked):
        for leaf in ("gate_up_proj", "down_proj"):
            state[prefix + leaf] = model.state_dict()[prefix + leaf].chunk(2)[rank].clone()
    found = load_candidate(written(model, stacked, tmp_path / "stacked")).model
    assert found is not None
    for name, tensor in Tensors(model).items():
        assert torch.equal(Tensors(found)[name], tensor), name
    for rank, state in enumerate(stacked):  # cut within every expert: half of the gate rows, half of the up rows
        gate, up = model.state_dict()[prefix + "gate_up_proj"].chunk(2, dim=1)
        state[prefix + "gate_up_proj"] = torch.cat([gate.chunk(2, dim=1)[rank], up.chunk(2, dim=1)[rank]], dim=1)
        state[prefix + "down_proj"] = model.state_dict()[prefix + "down_proj"].chunk(2, dim=2)[rank].clone()
    found = load_candidate(written(model, stacked, tmp_path / "cut")).model
    assert found is not None
    for name, tensor in Tensors(model).items():
        assert torch.equal(Tensors(found)[name], tensor), name


O_PROJ, QKV = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


def swapped(ranks: list[State]) -> None:
    ranks[0][DOWN], ranks[1][DOWN] = ranks[1][DOWN], ranks[0][DOWN]


def duplicated(ranks: list[State]) -> None:
    ranks[1][O_PROJ] = ranks[0][O_PROJ]


def alternating(ranks: list[State]) -> None:
    """Queries, keys and values of every group of heads after one another, as Megatron writes them."""
    for state in ranks:
        q, k, v = state[QKV].split([16, 8, 8])
        groups = [torch.cat(parts) for parts in zip(q.chunk(8), k.chunk(8), v.chunk(8), strict=True)]
        state[QKV] = torch.cat(groups)


def gate_rows_in_turn(ranks: list[State]) -> None:
    name = "model.layers.0.mlp.gate_up_proj.weight"
    for state in ranks:
        state[name] = torch.stack(state[name].chunk(2), dim=1).flatten(0, 1)


def other_norm(ranks: list[State]) -> None:
    ranks[1][NORM] = ranks[1][NORM] * 1.5


def spoiled(ranks: list[State]) -> None:
    ranks[1][DOWN] = ranks[1][DOWN] * 0.9


FAULTS = [
    (swapped, "mlp.down_proj", "weight-permuted", "rank 0 holds the part of rank 1, rank 1 holds the part of rank 0"),
    (duplicated, "self_attn.o_proj", "weight-permuted", "rank 1 holds the part of rank 0; nobody holds that of rank 1"),
    (alternating, "self_attn", "head-permutation", "the parts (16, 8, 8 rows) alternate in"),
    (gate_rows_in_turn, "mlp", "head-permutation", "the parts (24, 24 rows) alternate in rows"),
    (other_norm, "input_layernorm", "weight-stale", "rank 1 holds something else than the other ranks"),
    (spoiled, "mlp.down_proj", "weight-stale", "only rank 1 is wrong"),
]


@pytest.mark.parametrize(("spoil", "module", "kind", "says"), FAULTS)
def test_wrong_shards_are_named(
    models: dict[str, Any],
    goldens: dict[str, Golden],
    tmp_path: Path,
    spoil: Callable[[list[State]], None],
    module: str,
    kind: str,
    says: str,
) -> None:
    ranks = fused(dealt(stored(models["qwen3"], tmp_path), 2, 2))
    spoil(ranks)
    folder = written(models["qwen3"], ranks, tmp_path / "ranks")
    report = porter.align(goldens["qwen3"], folder, passes="weights")
    assert report.verdict == "drift" and report.first_drift is not None
    assert module in report.first_drift.module
    named = [cause for cause in report.causes if says in cause.says]
    assert named and named[0].kind == kind and module in named[0].module, [cause.says for cause in report.causes]
    assert named[0].confidence < 0.9 or report.causes[0] == named[0]


def test_misplaced_experts_are_named(models: dict[str, Any], goldens: dict[str, Golden], tmp_path: Path) -> None:
    ranks = dealt(stored(models["deepseek"], tmp_path), 2, 4)
    for name in [name for name in ranks[0] if ".experts." in name]:
        number = int(name.split(".experts.")[1].split(".")[0])
        other = name.replace(f".experts.{number}.", f".experts.{number + 4}.")
        ranks[0][name], ranks[1][other] = ranks[1][other], ranks[0][name]
    report = porter.align(goldens["deepseek"], written(models["deepseek"], ranks, tmp_path / "r"), passes="weights")
    assert report.causes[0].kind == "expert-permutation"
    assert "rank 0 holds the experts of rank 1, rank 1 holds the experts of rank 0" in report.causes[0].says


def test_wrong_layouts_and_missing_shards(
    models: dict[str, Any], goldens: dict[str, Golden], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = models["qwen3"]
    ranks = dealt(stored(model, tmp_path), 2, 2)
    folder = written(model, ranks, tmp_path / "ranks")
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps([{"module": "q_proj$", "weight": {"concat": 1}}]))
    assert run(["align", str(goldens["qwen3"].path), str(folder), "--layout", str(layout)]) == 2
    assert "q_proj.weight: the ranks hold [16, 32], [16, 32] of the whole [32, 32]" in capsys.readouterr().err
    assert run(["align", str(goldens["qwen3"].path), str(tmp_path / "whole"), "--layout", str(layout)]) == 2
    assert "is no directory of the shards of ranks" in capsys.readouterr().err
    for name, change in (("down_proj", lambda s: s.pop(DOWN)), ("embed", lambda s: s.pop("model.embed_tokens.weight"))):
        spoiled_ranks = [dict(state) for state in ranks]
        change(spoiled_ranks[1])
        with pytest.raises(PorterError, match=f"{name}.*the ranks hold"):
            load_candidate(written(model, spoiled_ranks, tmp_path / name))
    (tmp_path / "ranks" / "rank0").mkdir()
    save_file(ranks[0], tmp_path / "ranks" / "rank0" / "model.safetensors")
    with pytest.raises(PorterError, match="files of ranks and folders of ranks"):
        load_candidate(folder)


def test_padded_vocabulary(models: dict[str, Any], tmp_path: Path) -> None:
    ranks = dealt(stored(models["qwen3"], tmp_path), 2, 2)
    for state in ranks:
        state.pop("lm_head.weight")
    head = torch.nn.functional.pad(models["qwen3"].lm_head.weight.detach(), (0, 0, 0, 4))
    for rank, state in enumerate(ranks):
        state["lm_head.weight"] = head.chunk(2)[rank].clone()
    found = load_candidate(written(models["qwen3"], ranks, tmp_path / "ranks")).model
    assert found is not None and torch.equal(Tensors(found)["lm_head.weight"], models["qwen3"].lm_head.weight)


@pytest.mark.parametrize(
    ("name", "held", "whole", "world", "layout", "sizes"),
    [
        ("q_proj.weight", (6, 5), (12, 5), 2, None, ()),
        ("o_proj.weight", (5, 1), (5, 3), 3, None, ()),
        ("k_proj.weight", (4, 5), (8, 5), 4, None, ()),
        ("q_proj.bias", (3,), (6,), 2, None, ()),
        ("qkv_proj.weight", (4, 7), (8, 7), 2, None, (4, 2, 2)),
        ("qkv_proj.weight", (6, 7), (16, 7), 4, None, (8, 4, 4)),
        ("norm.weight", (9,), (9,), 2, None, ()),
        ("any.weight", (6, 5), (12, 5), 2, [{"module": "any", "weight": {"interleave": 3}}], ()),
        ("any.weight", (6, 5), (12, 5), 2, [{"module": "any", "output": {"parts": [2, 1]}}], ()),
    ],
)
def test_dealing_is_the_inverse_of_joining(
    name: str, held: tuple[int, ...], whole: tuple[int, ...], world: int, layout: Any, sizes: tuple[int, ...]
) -> None:
    spread = spread_of(name, dict.fromkeys(range(world), held), whole, rules_of(layout), sizes)
    tensor = torch.arange(torch.Size(whole).numel(), dtype=torch.float64).view(whole)
    pieces = spread.deal(tensor)
    assert [tuple(piece.shape) for piece in pieces] == [held] * world
    assert torch.equal(spread.join(pieces), tensor)
    assert all(torch.equal(a[1], b[1]) for group in spread.replicas(pieces) for a, b in pairwise(group))
