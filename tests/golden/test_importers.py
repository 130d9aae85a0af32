"""`porter golden import`: dumps that the tools really wrote, what they lack by name, and hostile files."""

from __future__ import annotations

import json
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import porter
from porter.cli.app import run
from porter.errors import PorterError
from porter.golden.importers.files import NotTensors, load_saved, load_tensor
from porter.golden.importers.importing import import_dump
from porter.golden.store import Golden

TOKENS = [[3, 7, 1, 9, 30]]
NORM = "model.layers.0.self_attn.k_norm"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dumps, and the checkpoint that they were made of, from the weights that msprobe dumped along."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("dumps")
    with tarfile.open(Path(__file__).parent / "dumps" / "dumps.tar.xz") as archive:
        # Ours, so it needs no filter; Pythons before 3.10.12 and 3.11.4 do not know the argument.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    config = Qwen3Config(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    files = folder / "msprobe/tensor/step0/proc1/dump_tensor_data"
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        file = next(files.glob(f"Module.{module}.*.forward.0.parameters.{leaf}.pt"))
        parameter.data.copy_(load_saved(file))
    model.save_pretrained(folder / "checkpoint")
    return folder


@pytest.fixture
def copied(dumps: Path, tmp_path: Path) -> Path:
    """The msprobe dump, to be damaged."""
    shutil.copytree(dumps / "msprobe/tensor", tmp_path / "dump")
    return tmp_path / "dump/step0/proc1"


def _model(dumps: Path, broken: bool = False) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dumps / "checkpoint", attn_implementation="eager").eval()
    if broken:
        model.get_submodule(NORM).variance_epsilon = 0.3
    return model


def _imported(dumps: Path, name: str, tool: str, output: Path, model: bool = True) -> Golden:
    return import_dump(dumps / name, tool, output, str(dumps / "checkpoint") if model else None)


def _missing(golden: Golden) -> dict[str, str]:
    return {entry["what"]: entry["why"] for entry in golden.manifest["imported"]["missing"]}


@pytest.mark.parametrize(("name", "tool"), [("msprobe/tensor", "msprobe"), ("sglang", "sglang")])
def test_outputs_are_those_of_the_model(dumps: Path, tmp_path: Path, name: str, tool: str) -> None:
    golden = _imported(dumps, name, tool, tmp_path / "golden")
    own = porter.capture(_model(dumps), torch.tensor(TOKENS), tmp_path / "own", new_tokens=2)
    assert golden.detail == "full" and golden.manifest["tokens"] == TOKENS and golden.generated == own.generated
    assert [batch.steps for batch in golden.batches] == [2]
    mine = {(record.module, record.step): record for record in own.records}
    compared = set()
    for record in golden.records:
        # SGLang's act_fn multiplies as well, its head sees the last token, and q and k norms see heads as rows.
        if record.module and record.module.rpartition(".")[2] not in ("lm_head", "act_fn", "q_norm", "k_norm"):
            given, expected = golden.value(record.outputs), own.value(mine[record.module, record.step].outputs)
            first, second = (each[0] if isinstance(each, tuple) else each for each in (given, expected))
            if isinstance(first, torch.Tensor):
                torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
                inputs = golden.value(record.inputs)["args"], own.value(mine[record.module, record.step].inputs)["args"]
                torch.testing.assert_close(*inputs, rtol=1e-4, atol=1e-5)
                assert record.kind == mine[record.module, record.step].kind
                compared.add(record.module)
    assert {f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"} | {"model.layers.0.mlp"} <= compared


@pytest.mark.parametrize(("name", "tool"), [("msprobe/tensor", "msprobe"), ("sglang", "sglang")])
def test_aligned_and_drifting(dumps: Path, tmp_path: Path, name: str, tool: str) -> None:
    golden = _imported(dumps, name, tool, tmp_path / "golden")
    assert porter.align(golden, _model(dumps)).verdict == "aligned"
    report = porter.align(golden, _model(dumps, broken=True))
    assert report.verdict == "drift" and report.first_drift is not None and report.first_drift.module == NORM
    assert [cause.kind for cause in report.causes] == ["norm-eps"]


def test_msprobe_statistics_are_incomparable(dumps: Path, tmp_path: Path) -> None:
    golden = _imported(dumps, "msprobe/statistics", "msprobe", tmp_path / "golden")
    full = _imported(dumps, "msprobe/tensor", "msprobe", tmp_path / "full")
    assert golden.detail == "stats" and golden.steps == 2
    assert any("calls of functions" in what for what in _missing(golden))
    stats = {(record.module, record.step): record.outputs for record in full.records}
    for record in golden.records:
        if "tensor" in record.outputs:
            mine, theirs = record.outputs["stats"], stats[record.module, record.step]["stats"]
            assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert porter.align(golden, _model(dumps)).verdict == "incomparable"


def test_without_the_checkpoint_what_is_there_is_used(dumps: Path, tmp_path: Path) -> None:
    golden = _imported(dumps, "msprobe/tensor", "msprobe", tmp_path / "golden", model=False)
    assert "--model" in _missing(golden)["config and weights of the model"]
    assert porter.align(golden, _model(dumps)).verdict == "incomparable"
    report = porter.align(golden, _model(dumps, broken=True))
    assert report.verdict == "drift" and report.first_drift is not None and report.first_drift.module == NORM
    told = [check for check in report.sanity if check.check == "imported"]
    assert any("config and weights" in check.says for check in told)


def test_another_checkpoint_is_refused(dumps: Path, tmp_path: Path) -> None:
    model = _model(dumps)
    model.model.layers[0].mlp.up_proj.weight.data[1, 2] += 1e-3
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(PorterError, match=r"up_proj.weight is not the weight that the dump was made with"):
        import_dump(dumps / "msprobe/tensor", "msprobe", tmp_path / "golden", str(tmp_path / "other"))


def _debugged(model: nn.Module, folder: Path, **options: bool) -> Path:
    from transformers.model_debugging_utils import model_addition_debugger_context

    before = torch._tensor_str.PRINT_OPTS
    kept = (before.precision, before.threshold, before.edgeitems, before.linewidth, before.sci_mode)
    try:
        with model_addition_debugger_context(model, debug_path=str(folder), **options), torch.no_grad():
            model(input_ids=torch.tensor(TOKENS))
    finally:
        names = ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
        torch.set_printoptions(**dict(zip(names, kept, strict=True)))  # the debugger leaves its own behind
    return folder


def test_hugging_face_debugger(dumps: Path, tmp_path: Path) -> None:
    dump = _debugged(_model(dumps), tmp_path / "dump", do_prune_layers=False, use_repr=False)
    golden = import_dump(dump, "hf", tmp_path / "golden", str(dumps / "checkpoint"))
    own = porter.capture(_model(dumps), torch.tensor(TOKENS), tmp_path / "own")
    mine = {record.module: record for record in own.records}
    assert golden.manifest["tokens"] == TOKENS and golden.generated == own.generated
    for record in golden.records:
        if record.module:
            torch.testing.assert_close(golden.value(record.outputs), own.value(mine[record.module].outputs))
    missed = {entry["module"]: entry["why"] for entry in golden.manifest["missed"]}
    assert set(missed) == {record.module for record in own.records} - {record.module for record in golden.records}
    assert "outputs of modules that have children" in missed["model.layers.0.self_attn"]
    assert porter.align(golden, _model(dumps)).verdict == "aligned"
    report = porter.align(golden, _model(dumps, broken=True))
    assert report.first_drift is not None and report.first_drift.module == NORM


def test_hugging_face_debugger_as_it_is_by_default(dumps: Path, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{**_model(dumps).config.to_dict(), "num_hidden_layers": 5, "layer_types": None})
    golden = import_dump(_debugged(Qwen3ForCausalLM(config).eval(), tmp_path / "dump"), "hf", tmp_path / "golden")
    assert golden.detail == "stats" and golden.manifest["tokens"] == TOKENS
    expected = {"elements of tensors", "model.layers.1 to model.layers.3", "class names of modules"}
    assert expected <= set(_missing(golden))
    norm = next(record for record in golden.records if record.module == "model.layers.0.self_attn.q_norm")
    stats = norm.outputs["stats"]
    # Unit weights: the mean square over a head is 1, and the norm follows from it. Four digits are printed.
    assert stats["l2"] == pytest.approx((5 * config.num_attention_heads * config.head_dim) ** 0.5, rel=2e-2)


class _Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (Path("executed"),)


def test_pickled_code_is_not_run(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = next(copied.glob("dump_tensor_data/*up_proj*output.0.pt"))
    torch.save(_Evil(), file)
    with pytest.raises(NotTensors, match=r"up_proj"):
        import_dump(tmp_path / "dump", "msprobe", tmp_path / "golden")
    file.write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(PorterError, match=r"not a file of torch.save"):
        import_dump(copied, "msprobe", tmp_path / "again")
    assert not (tmp_path / "executed").exists()


def test_packed_files_are_not_unfolded(tmp_path: Path) -> None:
    torch.save(torch.zeros(1000, 1000), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "packed.pt", "w") as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry), zipfile.ZIP_DEFLATED)
    assert load_tensor(tmp_path / "plain.pt", torch.float32, (1000, 1000)).shape == (1000, 1000)
    with pytest.raises(PorterError, match=r"packed.pt: claims to hold more than"):
        load_saved(tmp_path / "packed.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.update(shape=[1, 5, 9]), "was described as"),
        (lambda entry: entry.update(dtype="torch.bfloat16"), "was described as"),
        (lambda entry: entry.update(dtype="os.system"), "dtype is 'os.system'"),
        (lambda entry: entry.update(data_name="../../../secret.pt"), "no name of a file"),
        (lambda entry: entry.update(data_name="gone.pt"), "gone.pt: is missing"),
        (lambda entry: entry.update(shape="all"), "shape is 'all'"),
    ],
)
def test_descriptions_are_checked(
    copied: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    described = json.loads((copied / "dump.json").read_text())
    change(described["data"]["Module.model.embed_tokens.Embedding.forward.0"]["output"][0])
    (copied / "dump.json").write_text(json.dumps(described))
    with pytest.raises(PorterError, match=message):
        import_dump(copied, "msprobe", tmp_path / "golden")


def test_ranks_are_named(copied: Path, dumps: Path, tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(copied, copied.parent / f"rank{rank}")
    shutil.rmtree(copied)
    with pytest.raises(PorterError, match=r"holds 2 ranks \(rank0, rank1\); import each with --rank"):
        import_dump(tmp_path / "dump", "msprobe", tmp_path / "golden")
    assert import_dump(tmp_path / "dump", "msprobe", tmp_path / "golden", rank=1).manifest["rank"] == 1
    with pytest.raises(PorterError, match=r"--rank 3: .* holds ranks 0"):
        import_dump(dumps / "sglang", "sglang", tmp_path / "other", rank=3)


def test_command(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["golden", "import", str(dumps / "msprobe"), "--from", "msprobe", "--output", str(tmp_path / "golden")]
    assert run(command) == 2 and "no dump.json" in capsys.readouterr().err
    command[2] += "/tensor"
    assert run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["imported"]["from"] == "msprobe"
    assert run(["golden", "show", str(tmp_path / "golden")]) == 0
    assert "not in the dump: config and weights of the model" in capsys.readouterr().out
    assert run([*command[:4], "aquila", *command[5:]]) == 2
    assert "choose one of msprobe, sglang, hf" in capsys.readouterr().err
