"""What a MODEL argument names, and that the presets are the models that were released."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from porter.errors import PorterError
from porter.models.auto_class import auto_class
from porter.models.family import families
from porter.models.presets import preset, preset_names, resolve, shipped_directory, shipped_names
from porter.models.shipped.recipes import RECIPES

# Published beside the checkpoints: the number that each name promises, in billions, to the digits it is given in.
PUBLISHED_BILLIONS = {
    "deepseek-r1": 671,
    "deepseek-v2": 236,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2.5": 236,
    "deepseek-v3": 671,
    "deepseek-v3.2": 671,
    "deepseek-v4-flash": 284,
    "deepseek-v3.2-exp": 671,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.41,
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-7b": 7.61,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "qwen3-coder-480b-a35b": 480,
    "qwen3-next-80b-a3b": 80,
    "qwen3-coder-next": 80,
    "qwen2.5-vl-3b": 3.75,
    "qwen2.5-vl-7b": 8.29,
    "qwen2.5-vl-32b": 33.5,
    "qwen2.5-vl-72b": 73.4,
    "qwen3-vl-2b": 2.13,
    "qwen3-vl-4b": 4.44,
    "qwen3-vl-8b": 8.77,
    "qwen3-vl-32b": 33.4,
    "qwen3-vl-30b-a3b": 31.1,
    "qwen3-vl-235b-a22b": 236,
    "qwen3.5-9b": 9,
    "qwen3.5-27b": 27,
    "qwen3.5-35b-a3b": 35,
}


def checkpoint_elements(name: str) -> int:
    """The elements of a checkpoint of the preset, from a model without storage."""
    config = preset(name).config()
    with torch.device("meta"):
        model = auto_class(config.model_type).from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return sum(tensor.numel() for key, tensor in model.state_dict().items() if key not in tied)


@pytest.mark.parametrize("name", preset_names())
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert checkpoint_elements(name) == preset(name).published_parameters


@pytest.mark.parametrize("name", preset_names())
def test_published_number_is_the_one_the_model_card_gives(name: str) -> None:
    billions = PUBLISHED_BILLIONS[name]
    # Qwen2.5-32B's card says 32.5B for 32.76e9: the cards round loosely, never by more than 1.5 %.
    assert preset(name).published_parameters / 1e9 == pytest.approx(billions, rel=0.015)


def test_deepseek_v3_is_671_026_419_200_elements_without_the_prediction_layer() -> None:
    # 671,026,404,352 weights and 58 layers of 256 expert biases, which a checkpoint stores and no optimizer sees.
    assert preset("deepseek-v3").published_parameters == 671_026_404_352 + 58 * 256


def test_deepseek_v3_scales_rope_by_yarn_and_routes_by_groups() -> None:
    config = resolve("deepseek-v3").config
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 40, 4096)
    assert (config.n_group, config.topk_group, config.num_experts_per_tok) == (8, 4, 8)
    assert config.quantization_config["weight_block_size"] == [128, 128]


def test_resolving_a_preset_twice_gives_equal_configurations_that_do_not_share_state() -> None:
    first, second = resolve("deepseek-v3"), resolve("deepseek-v3")
    first.config.rope_parameters["factor"] = 1
    assert second.config.rope_parameters["factor"] == 40
    assert resolve("deepseek-v3").config.to_dict() == second.config.to_dict()
    assert first.kind == "preset"
    assert first.directory is None


def test_preset_names_are_grouped_by_family() -> None:
    assert preset_names("deepseek_v3") == ["deepseek-r1", "deepseek-v3"]
    assert preset_names("qwen2_moe") == ["qwen1.5-moe-a2.7b", "qwen2-57b-a14b"]
    assert {name for model_type in families() for name in preset_names(model_type)} == set(preset_names())
    assert preset_names("no-such-family") == []


@pytest.mark.parametrize("name", ["tiny-deepseek-v3", "tiny-qwen3"])
def test_shipped_checkpoint_resolves_to_its_directory(name: str) -> None:
    reference = resolve(name)
    assert reference.kind == "shipped"
    assert reference.directory == shipped_directory(name)
    assert reference.directory is not None
    assert (reference.directory / "model.safetensors").is_file()


def test_only_checkpoints_are_shipped() -> None:
    assert set(shipped_names()) == {*RECIPES, "tiny-deepseek-v3-mtp"}
    assert shipped_directory("text") is None
    assert shipped_directory("../shipped/tiny-qwen3") is None


def test_directory_resolves_and_is_kept_apart_from_a_preset_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path / "qwen3-8b", {"model_type": "qwen3", "hidden_size": 64})
    monkeypatch.chdir(tmp_path)
    assert resolve("qwen3-8b").kind == "preset"
    reference = resolve("./qwen3-8b")
    assert (reference.kind, reference.config.hidden_size) == ("directory", 64)
    assert reference.directory == Path("qwen3-8b")


def test_downloaded_hub_id_resolves_to_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "models--someone--small"
    write_config(cached / "snapshots" / "abc", {"model_type": "qwen3", "hidden_size": 32})
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    reference = resolve("someone/small")
    assert reference.kind == "directory"
    assert reference.directory == cached / "snapshots" / "abc"
    assert reference.config.hidden_size == 32


def test_hub_id_that_is_not_downloaded_says_how_to_download_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PorterError, match="hf download Qwen/Qwen3-8B` first; the preset qwen3-8b"):
        resolve("Qwen/Qwen3-8B")
    with pytest.raises(PorterError, match=r"hf download a/b` first$"):
        resolve("a/b")


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("qwen3-9b", "did you mean .*qwen3-8b"),
        ("Qwen3-8B", "did you mean qwen3-8b"),
        ("deepseekv3", "did you mean deepseek-v3"),
        ("tiny-qwen", "did you mean tiny-qwen3"),
        ("zzzz", "directory; porter models lists the names$"),
        ("", "directory; porter models lists the names$"),
        ("./nowhere", "no such directory"),
        ("/nowhere/at/all", "no such directory"),
    ],
)
def test_unknown_name_says_what_is_near(model: str, says: str) -> None:
    with pytest.raises(PorterError, match=says) as raised:
        resolve(model)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 160


def test_unknown_preset_says_what_is_near_and_where_the_others_are() -> None:
    with pytest.raises(PorterError, match=r"not a preset; did you mean qwen3-8b .*\(porter models lists all\)$"):
        preset("qwen3-8")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no config.json"),
        ("{", "config.json: not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"hidden_size": 8}', "no `model_type`"),
        ('{"model_type": "novel_model"}', "`model_type` is 'novel_model'"),
        ('{"model_type": "qwen3", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_bad_config_is_named_in_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(PorterError, match=says) as raised:
        resolve(str(tmp_path))
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_file_is_refused(tmp_path: Path) -> None:
    directory = shipped_directory("tiny-qwen3")
    assert directory is not None
    shutil.copy(directory / "model.safetensors", tmp_path / "weights.safetensors")
    with pytest.raises(PorterError, match="a file; MODEL is the directory"):
        resolve(str(tmp_path / "weights.safetensors"))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    fields: dict[str, object] = {"model_type": "qwen3", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    write_config(tmp_path, fields)
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('this was run')\n")
    assert type(resolve(str(tmp_path)).config).__name__ == "Qwen3Config"


def write_config(directory: Path, fields: dict[str, object]) -> None:
    """A checkpoint directory that has a configuration and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
