"""The writer: what it writes the libraries read, and every byte is planned, written once, and accounted for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_checkpoint import TENSORS, planned, refuses, write

from porter.checkpoint import journal, staging
from porter.checkpoint.header import SAFETENSORS_DTYPES
from porter.checkpoint.reader import Checkpoint
from porter.checkpoint.writer import CheckpointWriter, TensorPlan


@pytest.mark.parametrize("shard_bytes", [1, 70, 10**9])
def test_other_libraries_read_it(tmp_path: Path, shard_bytes: int) -> None:
    target = write(tmp_path / "out", shard_bytes=shard_bytes)
    files = sorted(target.glob("*.safetensors"))
    loaded = {name: t for file in files for name, t in load_file(file).items()}
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    with safe_open(files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    index = target / "model.safetensors.index.json"
    if shard_bytes == 10**9:
        assert [f.name for f in files] == ["model.safetensors"] and not index.exists()
    else:
        data = json.loads(index.read_text())
        assert data["metadata"] == {"total_size": sum(t.numel() * t.element_size() for t in TENSORS.values())}
        assert data["weight_map"].keys() == TENSORS.keys() and set(data["weight_map"].values()) == {
            f.name for f in files
        }
        assert [f.name for f in files] == [
            f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
        ]
    assert {p.name for p in target.iterdir()} == {f.name for f in files} | ({index.name} if len(files) > 1 else set())
    assert not target.with_name("out.partial").exists()
    assert Checkpoint.open(target).total_bytes == sum(t.numel() * t.element_size() for t in TENSORS.values())


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_DTYPES, key=str), ids=str)
def test_every_dtype_keeps_its_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    content = torch.arange(35 * size, dtype=torch.uint8).bitwise_and(1 if dtype == torch.bool else 255)
    tensor = content.view(dtype).reshape(5, 7)
    loaded = Checkpoint.open(write(tmp_path / "out", {"w": tensor})).load("w")
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_strided_and_conjugated_tensors(tmp_path: Path) -> None:
    base = torch.randn(6, 8, requires_grad=True)
    tensors = {
        "transposed": base.t(),
        "sliced": base[::2, 1::3],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    }
    checkpoint = Checkpoint.open(write(tmp_path / "out", tensors))
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.load(name), tensor)


def test_shards_hold_at_most_their_bytes_and_tensors_lie_aligned(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    dtypes = (torch.int8, torch.float32, torch.bfloat16, torch.float64)
    tensors = {f"t{i}": torch.randn(1 + i % 7, generator=generator).to(dtypes[i % 4]) for i in range(40)}
    writer = CheckpointWriter(tmp_path / "out", planned(tensors), shard_bytes=100)
    by_shard: dict[str, int] = {}
    for place in writer.layout.places.values():
        by_shard[place.shard] = by_shard.get(place.shard, 0) + place.plan.nbytes
        assert place.offset % torch.empty((), dtype=place.plan.dtype).element_size() == 0
    assert max(by_shard.values()) <= 100 and len(by_shard) == len(writer.layout.shards) > 5
    assert list(writer.layout.places) == list(tensors)


def test_bytes_depend_on_the_plan_alone(tmp_path: Path) -> None:
    write(tmp_path / "one", shard_bytes=70)
    writer = CheckpointWriter(tmp_path / "two", planned(TENSORS), shard_bytes=70)
    for name, tensor in TENSORS.items():
        writer.write(name, tensor)
    writer.finish()
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_every_byte_is_accounted_for(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", planned(TENSORS))
    at = f"{tmp_path}/out.partial"
    writer.write("a", TENSORS["a"])
    assert refuses(writer.write, "z", TENSORS["a"]) == f"{at}: tensor z is not in the plan; add it or drop it"
    assert refuses(writer.write, "a", TENSORS["a"]) == f"{at}: tensor a was written before; write it once"
    assert refuses(writer.write, "b", TENSORS["b"].float()) == (
        f"{at}: tensor b is torch.float32 [2, 2, 2], planned torch.bfloat16 [2, 2, 2]; correct the plan or the tensor"
    )
    assert refuses(writer.write, "b", TENSORS["b"][0]).startswith(f"{at}: tensor b is torch.bfloat16 [2, 2], planned")
    assert refuses(writer.finish) == (
        f"{at}: 4 of 5 planned tensors were not written (codes, b, scalar and 1 more); write them before finish()"
    )
    assert writer.remaining == ("codes", "b", "scalar", "empty") and not (tmp_path / "out").exists()
    for name in writer.remaining:
        writer.write(name, TENSORS[name])
    writer.finish()
    assert len(Checkpoint.open(tmp_path / "out")) == 5


def test_a_tensor_in_pieces(tmp_path: Path) -> None:
    tensor = torch.randn(7, 3, 2)
    writer = CheckpointWriter(tmp_path / "out", planned({"w": tensor, "v": tensor}))
    with writer.sink("w") as sink:
        for piece in tensor.split([1, 0, 4, 2]):
            sink.append(piece)
    writer.write("v", tensor)
    assert writer.digests["w"] == writer.digests["v"]
    assert torch.equal(Checkpoint.open(writer.finish()).load("w"), tensor)


def test_pieces_must_make_up_the_tensor(tmp_path: Path) -> None:
    tensor = torch.randn(7, 3)
    writer = CheckpointWriter(tmp_path / "out", planned({"w": tensor}))

    def append(*pieces: torch.Tensor) -> None:
        with writer.sink("w") as sink:
            for piece in pieces:
                sink.append(piece)

    at = f"{tmp_path}/out.partial: tensor w"
    assert refuses(append, tensor[:6]) == f"{at} has 6 of 7 planned rows [7, 3]; correct the plan or the tensor"
    assert refuses(append, tensor, tensor[:1]).startswith(f"{at} is torch.float32 [1, 3] after 7 rows, planned torch")
    assert refuses(append, tensor.t()).startswith(f"{at} is torch.float32 [3, 7], planned torch.float32 [7, 3]")
    assert refuses(append, tensor[0]).startswith(f"{at} is torch.float32 [3], planned")
    assert refuses(append, tensor.half()).startswith(f"{at} is torch.float16 [7, 3], planned")
    assert writer.remaining == ("w",) and writer.digests == {}
    append(tensor)
    assert torch.equal(Checkpoint.open(writer.finish()).load("w"), tensor)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_full_disk(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "out", planned(TENSORS))
    writer.start()
    shard = staging.part(writer.directory, "model.safetensors")
    shard.unlink()
    shard.symlink_to("/dev/full")
    assert refuses(writer.write, "a", TENSORS["a"]) == (
        f"{tmp_path}/out.partial: tensor a: writing failed: No space left on device; mend the disk and run again to "
        "resume"
    )
    assert writer.remaining == tuple(TENSORS)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ([TensorPlan("w", torch.float32, (1,))] * 2, "planned tensor w: is planned twice; rename it"),
        ([TensorPlan("__metadata__", torch.float32, ())], "planned tensor __metadata__: is a reserved name; rename it"),
        ([TensorPlan("w", torch.qint8, ())], "planned tensor w: torch.qint8 has no place in safetensors; expected one"),
        ([TensorPlan("w", torch.float32, (-1,))], "planned tensor w: shape (-1,) must be non-negative integers"),
        ([TensorPlan("w\n", torch.float32, ())], "planned tensor w\\n: a tensor name must be printable text; rename"),
    ],
)
def test_impossible_plans(tmp_path: Path, plan: Sequence[TensorPlan], says: str) -> None:
    assert refuses(CheckpointWriter, tmp_path / "out", plan).startswith(says)
    assert not any(tmp_path.iterdir())


def test_an_occupied_output_is_refused_and_an_empty_one_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    text = refuses(CheckpointWriter, tmp_path / "out", [])
    assert text == f"{tmp_path}/out: already exists and is not empty; name another output or remove it"
    (tmp_path / "file").touch()
    assert "already exists" in refuses(CheckpointWriter, tmp_path / "file", [])


def test_foreign_files_in_the_partial_directory_are_not_removed(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.txt").touch()
    text = refuses(CheckpointWriter(tmp_path / "out", planned(TENSORS)).start)
    assert text == (
        f"{partial}: holds files that are no conversion of porter's; remove it: porter assembles its output there"
    )
    assert (partial / "thesis.txt").exists()
    shutil.rmtree(partial)
    (tmp_path / "elsewhere").mkdir()
    partial.symlink_to("elsewhere")
    assert "is not a directory" in refuses(CheckpointWriter(tmp_path / "out", planned(TENSORS)).start)


def test_two_writers_of_one_directory(tmp_path: Path) -> None:
    first = CheckpointWriter(tmp_path / "out", planned(TENSORS))
    first.start()
    second = CheckpointWriter(tmp_path / "out", planned(TENSORS))
    assert refuses(second.start) == f"{tmp_path}/out.partial: another porter is writing it; wait for it, or stop it"
    first.write("a", TENSORS["a"])
    first.close()
    assert second.start() == {"a"}
    second.close()


def test_disk_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = [TensorPlan("w", torch.float32, (2**50,))]
    text = refuses(CheckpointWriter(tmp_path / "out", huge).start)
    assert text.startswith(f"{tmp_path}/out.partial: needs 4.5e+06 GB, the disk has ") and "another disk" in text
    assert [p.name for p in (tmp_path / "out.partial").iterdir()] == [journal.NAME]


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = refuses(CheckpointWriter(tmp_path / "file" / "out", planned(TENSORS)).start)
    assert text.startswith(f"{tmp_path}/file/out.partial: writing failed: Not a directory")
