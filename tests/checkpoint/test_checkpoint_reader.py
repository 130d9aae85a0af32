"""Opening checkpoint directories: the right ones load bit for bit, every wrong one is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from raw_files import entry, raw_file, sharded, single, write_index
from safetensors.torch import save_file

from porter.checkpoint.header import SAFETENSORS_DTYPES
from porter.checkpoint.reader import Checkpoint
from porter.errors import PorterError

INDEX = "model.safetensors.index.json"
TWO = {
    "model-00001-of-00002.safetensors": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7, dtype=torch.int8)},
    "model-00002-of-00002.safetensors": {"c": torch.randn(5, 1).to(torch.bfloat16), "d": torch.zeros(0, 4)},
}


def refusal(directory: Path) -> str:
    with pytest.raises(PorterError) as caught:
        Checkpoint.open(directory)
    text = str(caught.value)
    assert text.isprintable() and str(directory) in text
    return text.replace(str(directory), "DIR")


def test_shards_load_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(sharded(tmp_path, TWO))
    everything = {name: t for shard in TWO.values() for name, t in shard.items()}
    assert set(checkpoint.names) == set(everything) and len(checkpoint) == 4 and "a" in checkpoint
    for name, tensor in everything.items():
        loaded = checkpoint.load(name)
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor)
        info = checkpoint.info(name)
        assert (info.shape, info.nbytes) == (tuple(tensor.shape), tensor.numel() * tensor.element_size())
        assert info.torch_dtype == tensor.dtype and name in TWO[info.shard]
    assert checkpoint.shards == tuple(TWO)
    assert checkpoint.total_bytes == 24 + 1 + 10


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_DTYPES, key=str), ids=str)
def test_every_dtype_keeps_its_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    content = torch.arange(21 * size, dtype=torch.uint8).bitwise_and(1 if dtype == torch.bool else 255)
    tensor = content.view(dtype).reshape(7, 3)
    loaded = Checkpoint.open(single(tmp_path, {"w": tensor})).load("w")
    assert loaded.dtype == dtype and loaded.shape == (7, 3)
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_loaded_tensors_are_fresh(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(single(tmp_path, {"w": torch.ones(3)}))
    checkpoint.load("w").zero_()
    assert torch.equal(checkpoint.load("w"), torch.ones(3))


def test_packed_dtypes_are_described_and_not_loaded(tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", {"w": entry("F4", (2, 4), (0, 4))}, b"1234")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.info("w").shape == (2, 4) and checkpoint.info("w").torch_dtype is None
    with pytest.raises(
        PorterError, match=r"model\.safetensors: tensor w: F4 packs elements below a byte, which porter"
    ):
        checkpoint.load("w")


def test_unknown_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(single(tmp_path, {"w": torch.ones(3)}))
    for ask in (checkpoint.load, checkpoint.info, lambda n: checkpoint.digests([n])):
        with pytest.raises(PorterError, match=r"has no tensor v; it has w$"):
            ask("v")


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(sharded(tmp_path, TWO))
    expected = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in TWO}
    assert checkpoint.digests() == expected
    second = "model-00002-of-00002.safetensors"
    assert checkpoint.digests(["c", "d"]) == {second: expected[second]}


def test_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    prints = []
    for value in (1.0, 2.0):
        single(tmp_path, {"w": torch.full((3,), value)})
        os.utime(tmp_path / "model.safetensors", ns=(0, int(value)))
        prints.append(Checkpoint.open(tmp_path).fingerprint)
    single(tmp_path, {"v": torch.full((3,), 2.0)})
    os.utime(tmp_path / "model.safetensors", ns=(0, 2))
    prints.append(Checkpoint.open(tmp_path).fingerprint)
    assert len(set(prints)) == 3


def test_a_file_cut_after_opening(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(single(tmp_path, {"w": torch.ones(300)}))
    os.truncate(tmp_path / "model.safetensors", 500)
    with pytest.raises(PorterError, match="tensor w: the file became shorter while it was read; download"):
        checkpoint.load("w")


def test_config(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(single(tmp_path, {"w": torch.ones(3)}))
    with pytest.raises(PorterError, match=r"config.json: is missing or not a regular file; copy the model's config"):
        _ = checkpoint.config
    config = tmp_path / "config.json"
    config.write_text('{"a": 1, "a": 2}')
    with pytest.raises(PorterError, match=r"config.json: not valid JSON: key a is given twice"):
        _ = checkpoint.config
    config.write_text('{"a": 1,}')
    with pytest.raises(PorterError, match=r"config.json: not valid JSON: .* at line 1 column"):
        _ = checkpoint.config
    config.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert checkpoint.config == {"time_step_limit": [0.0, float("inf")]}


def test_index_entries_stay_in_the_directory(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "secret.safetensors")
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    save_file({"w": torch.ones(3)}, home / "sub" / "x.safetensors")
    wrong: list[object] = [
        "../secret.safetensors",
        str(tmp_path / "secret.safetensors"),
        "sub/x.safetensors",
        "sub\\x.safetensors",
    ]
    wrong += ["w.bin", "", "..", ".safetensors/..", "a\0.safetensors", "C:x.safetensors", 3, None, ["w.safetensors"]]
    for name in wrong:
        write_index(home, {"w": name})
        text = refusal(home)
        assert text.startswith(f"DIR/{INDEX}: weight_map[w] is ")
        assert "expected a plain *.safetensors file name in the same directory; download" in text


def test_links_out_of_the_directory(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "secret.safetensors")
    home = tmp_path / "home"
    home.mkdir()
    (home / "model.safetensors").symlink_to("../secret.safetensors")
    text = refusal(home)
    assert (
        text == f"DIR/model.safetensors: links to {tmp_path}/secret.safetensors, outside the checkpoint; replace "
        "the link by the file"
    )
    (home / "model.safetensors").unlink()
    (home / "real.safetensors").write_bytes((tmp_path / "secret.safetensors").read_bytes())
    (home / "model.safetensors").symlink_to("real.safetensors")
    assert Checkpoint.open(home).names == ("w",)


def test_the_hubs_cache_links_to_its_blobs(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, repository / "blobs" / "digest")
    (snapshot / "model.safetensors").symlink_to("../../blobs/digest")
    assert torch.equal(Checkpoint.open(snapshot).load("w"), torch.ones(3))
    (repository / "other").mkdir()
    (repository / "blobs" / "digest").rename(repository / "other" / "digest")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../other/digest")
    assert "outside the checkpoint" in refusal(snapshot)


def test_missing_shards_and_loops(tmp_path: Path) -> None:
    sharded(tmp_path, TWO)
    second = tmp_path / "model-00002-of-00002.safetensors"
    second.unlink()
    assert refusal(tmp_path).startswith(f"DIR/{INDEX}: {second.name} is missing in DIR; download")
    second.symlink_to(second)
    assert refusal(tmp_path).startswith(f"DIR/{INDEX}: {second.name} is missing in DIR; download")
    second.unlink()
    os.mkfifo(second)
    assert refusal(tmp_path).startswith(f"DIR/{second.name}: is not a regular file; download")


@pytest.mark.parametrize("weight_map", [{}, [], None, "w"], ids=str)
def test_weight_map_of_another_kind(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    assert refusal(tmp_path).startswith(f"DIR/{INDEX}: weight_map: expected a non-empty object of tensor name to file")


def test_index_against_headers(tmp_path: Path) -> None:
    sharded(tmp_path, TWO)
    first, second = TWO
    right = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    write_index(tmp_path, {**right, "a": second})
    assert refusal(tmp_path).startswith(f"DIR/{INDEX}: weight_map puts a into {second}, but it is in {first}; download")
    write_index(tmp_path, {**right, "x": second, "y": first})
    assert refusal(tmp_path).startswith(
        f"DIR/{INDEX}: weight_map puts x into {second}, but no shard holds it (1 more tensors are not where the index"
    )
    write_index(tmp_path, {name: file for name, file in right.items() if name != "a"})
    assert refusal(tmp_path).startswith(f"DIR/{INDEX}: weight_map leaves out a, which {first} holds; download")
    save_file({"a": torch.ones(1), "c": torch.ones(1)}, tmp_path / first)
    write_index(tmp_path, {**{n: f for n, f in right.items() if n != "b"}})
    assert refusal(tmp_path).startswith(f"DIR/{INDEX}: weight_map leaves out c, which {first} holds; download")
    write_index(tmp_path, right)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    assert "key a is given twice" in refusal(tmp_path)


def test_truncated_shard(tmp_path: Path) -> None:
    sharded(tmp_path, TWO)
    path = tmp_path / "model-00001-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    text = refusal(tmp_path)
    assert text.startswith(f"DIR/{path.name}: tensor ") and "it is truncated; download the file again" in text


def test_directories_without_safetensors(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "DIR: holds no weights; expected model.safetensors or model.safetensors.index.json"
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "x.pt", "y.pth"):
        (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    assert refusal(tmp_path) == (
        "DIR: holds only pickled weights (pytorch_model-00001-of-00002.bin, pytorch_model-00002-of-00002.bin, x.pt and "
        "1 more), which may run code when read; porter reads safetensors: load them where you trust them and "
        "save_pretrained(..., safe_serialization=True)"
    )
    save_file({"w": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    assert refusal(tmp_path) == (
        "DIR: holds model-00001-of-00002.safetensors but neither model.safetensors nor model.safetensors.index.json; "
        "download the index as well"
    )
    assert refusal(tmp_path / "absent") == (
        "DIR/absent: is not a directory; name the folder that holds config.json and *.safetensors".replace(
            "DIR/absent", "DIR"
        )
    )


def test_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    assert refusal(tmp_path) == "DIR: cannot be read: Permission denied; name a directory that can be"


def test_two_sets_of_weights(tmp_path: Path) -> None:
    sharded(tmp_path, TWO)
    single(tmp_path, {"w": torch.ones(1)})
    assert refusal(tmp_path) == (
        "DIR: holds both model.safetensors and model.safetensors.index.json; remove the one that is stale"
    )
    write_index(tmp_path, {"w": "model.safetensors"})
    assert Checkpoint.open(tmp_path).names == ("w",)
