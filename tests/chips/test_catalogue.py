"""The catalogue: what ships is consistent and sourced; a bad file is refused with its name and the key."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import porter.kernels
from porter.chips.catalogue import Catalogue, load_catalogue, read_chip
from porter.chips.detect import running_cpu_chip
from porter.errors import PorterError

GOOD = """
name = "zeta-1"
title = "Zeta 1"
vendor = "Zeta"
aliases = ["zeta"]
device = "cuda"
distributed = "nccl"
dtypes = ["float32", "bfloat16"]
providers = ["reference"]
source = "zeta manual"

[memory]
value = 64
unit = "GiB"
source = "zeta manual"

[peaks.bfloat16]
value = 312
unit = "TFLOPS"
source = "zeta manual"
"""

EXPECTED = """
cpu-x86-avx2 cpu-x86-avx512 cpu-arm64 ascend-310p ascend-910b ascend-910c ascend-950 nvidia-a100 nvidia-h100
nvidia-h200 nvidia-b200 amd-mi300x hygon-k100 hygon-bw1000 cambricon-mlu590 moorethreads-s4000 moorethreads-s5000
metax-c550 iluvatar-bi150 kunlunxin-p800
""".split()


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def write(folder: Path, text: str, name: str = "zeta-1") -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_chip_ships(catalogue: Catalogue) -> None:
    assert sorted(chip.name for chip in catalogue) == sorted(EXPECTED)
    assert len(catalogue) == len(EXPECTED)


@pytest.mark.parametrize(
    ("alias", "chip"),
    [
        ("ascend", "ascend-910b"),
        ("nvidia", "nvidia-h100"),
        ("amd", "amd-mi300x"),
        ("hygon", "hygon-bw1000"),
        ("cambricon", "cambricon-mlu590"),
        ("moorethreads", "moorethreads-s5000"),
        ("metax", "metax-c550"),
        ("iluvatar", "iluvatar-bi150"),
        ("kunlunxin", "kunlunxin-p800"),
        ("Ascend-910B", "ascend-910b"),
        ("cpu", running_cpu_chip()),
    ],
)
def test_a_vendor_is_an_alias_for_its_most_common_chip(catalogue: Catalogue, alias: str, chip: str) -> None:
    assert catalogue.get(alias).name == chip


def test_an_unknown_chip_is_refused_with_the_nearest_names(catalogue: Catalogue) -> None:
    with pytest.raises(PorterError, match=r"chip 'asend'.*\bascend\b") as caught:
        catalogue.get("asend")
    assert caught.value.exit_code == 2
    with pytest.raises(PorterError, match="ascend-910b, ascend-910c"):
        catalogue.get("???")


def test_every_provider_named_exists_and_ends_with_the_reference(catalogue: Catalogue) -> None:
    folders = {path.parent.name for path in Path(porter.kernels.__path__[0]).glob("*/__init__.py")}
    for chip in catalogue:
        assert set(chip.providers) <= folders, chip.name
        assert chip.providers[-1] == "reference"


def test_figures_in_base_units(catalogue: Catalogue) -> None:
    ascend = catalogue.get("ascend-910b")
    assert ascend.memory_bytes() == 64e9
    assert ascend.bandwidth_bytes_per_second() == 1.6 * 2**40
    assert ascend.peak_per_second("bfloat16") == 294.9e12
    assert ascend.peak_per_second("float8_e4m3fn") is None
    unknown = catalogue.get("cambricon")
    assert unknown.memory_bytes() is None and unknown.bandwidth_bytes_per_second() is None


def test_a_chip_is_frozen_and_hashable(catalogue: Catalogue) -> None:
    chip = catalogue.get("nvidia-h200")
    assert len({chip, catalogue.get("h200")}) == 1
    with pytest.raises(FrozenInstanceError):
        chip.name = "other"  # type: ignore[misc]


def test_two_catalogues_share_nothing(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    own = load_catalogue(tmp_path)
    assert [chip.name for chip in own] == ["zeta-1"]
    assert own.get("zeta").memory_bytes() == 64 * 2**30
    with pytest.raises(PorterError):
        load_catalogue().get("zeta")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('vendor = "Zeta"', "", "vendor"),
        ('vendor = "Zeta"', "vendor = 3", "vendor"),
        ('vendor = "Zeta"', 'vendor = " "', "vendor"),
        ('vendor = "Zeta"', 'vendor = "Zeta"\ncolour = "red"', "colour"),
        ('aliases = ["zeta"]', 'aliases = "zeta"', "aliases"),
        ('aliases = ["zeta"]', "aliases = [3]", "aliases"),
        ('["float32", "bfloat16"]', '["float32", "float19"]', "dtypes"),
        ('["float32", "bfloat16"]', '["float32"]', "peaks.bfloat16"),
        ('providers = ["reference"]', "providers = []", "providers"),
        ('providers = ["reference"]', 'providers = ["reference", "cpu"]', "providers"),
        ("value = 64", "value = 0", "memory.value"),
        ("value = 64", "value = nan", "memory.value"),
        ("value = 64", "value = true", "memory.value"),
        ("value = 64", 'value = "64"', "memory.value"),
        ("value = 64", "value = 64\nnote = 'x'", "memory.note"),
        ('unit = "GiB"', 'unit = "furlong"', "memory.unit"),
        ('unit = "GiB"', 'unit = "TB/s"', "memory.unit"),
        ('unit = "GiB"\nsource = "zeta manual"', 'unit = "GiB"', "memory.source"),
        ('unit = "TFLOPS"\nsource = "zeta manual"', 'unit = "TFLOPS"\nsource = ""', "peaks.bfloat16.source"),
        ("[memory]", "[alignment.x]", "alignment.x.unit"),
        ("[memory]\nvalue = 64\nunit = \"GiB\"\nsource = \"zeta manual\"", "[peaks]\nfloat32 = 3", "peaks.float32"),
        ('name = "zeta-1"', 'name = "zeta-2"', "name"),
    ],
)
def test_a_bad_key_is_named_with_its_file(tmp_path: Path, old: str, new: str, key: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(PorterError) as caught:
        read_chip(path)
    message = str(caught.value)
    assert str(path) in message and f"'{key}'" in message
    assert "\n" not in message


def test_bad_toml_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "name = ")
    with pytest.raises(PorterError, match="not valid TOML") as caught:
        load_catalogue(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("alias", ["zeta", "zeta-1", "cpu"])
def test_a_duplicate_alias_is_refused(tmp_path: Path, alias: str) -> None:
    write(tmp_path, GOOD)
    second = GOOD.replace("zeta-1", "zeta-2").replace('aliases = ["zeta"]', f'aliases = ["{alias}"]')
    write(tmp_path, second, "zeta-2")
    with pytest.raises(PorterError, match=rf"zeta-2\.toml: key 'aliases': '{alias}' is taken"):
        load_catalogue(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PorterError, match="no chip files"):
        load_catalogue(tmp_path)
