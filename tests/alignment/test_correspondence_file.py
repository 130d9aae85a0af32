"""What `--correspondence`, `--modules` and `--device` refuse: one line with the file, the entry and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import bfloat16, golden_of, qwen2

from porter.alignment.align import align
from porter.alignment.correspondence_file import read_correspondence
from porter.correspondence import Correspondence
from porter.errors import PorterError

GOOD = {"target": "model.norm", "sources": ["model.norm"], "sizes": [4]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("x", ["holds a str"]),
        ([3], ["entry 0", "is a int"]),
        ([{**GOOD, "sources": "q_proj"}], ["entry 0", "sources", "'q_proj'"]),
        ([{**GOOD, "sources": []}], ["entry 0", "sources"]),
        ([{**GOOD, "sources": ["a", "a"], "sizes": [1, 1]}], ["entry 0", "sources", "'a'", "twice"]),
        ([{**GOOD, "sizes": [-1]}], ["entry 0", "sizes", "-1"]),
        ([{**GOOD, "sizes": [True]}], ["entry 0", "sizes"]),
        ([{**GOOD, "sizes": [1, 2]}], ["entry 0", "sizes", "2 for 1"]),
        ([{**GOOD, "target": ""}], ["entry 0", "target"]),
        ([{"sources": ["a"], "sizes": [1]}], ["entry 0", "target", "missing"]),
        ([{**GOOD, "kind": "odd"}], ["entry 0", "kind", "'odd'"]),
        ([{**GOOD, "source": ["a"]}], ["entry 0", "source", "no field"]),
        ([GOOD, GOOD], ["entry 1", "target", "entry 0"]),
        ([{**GOOD, "sources": [["q_proj"], {"k": 1}], "sizes": [1, 1]}], ["entry 0", "sources", "['q_proj']"]),
        ([{**GOOD, "sources": [1]}], ["entry 0", "sources", "[1]"]),
        ([{**GOOD, "sizes": ["4"]}], ["entry 0", "sizes", "'4'"]),
        ([{**GOOD, "kind": ["linear"]}], ["entry 0", "kind", "['linear']"]),
        ([{**GOOD, "target": ["model.norm"]}], ["entry 0", "target", "['model.norm']"]),
    ],
)
def test_malformed_entries_are_refused(tmp_path: Path, data: Any, words: list[str]) -> None:
    file = tmp_path / "names.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PorterError) as refused:
        read_correspondence(file)
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in [str(file), *words])
    with pytest.raises(PorterError) as refused:
        Correspondence.from_json(data)
    assert all(word in str(refused.value) for word in ["correspondence: ", *words])


@pytest.mark.parametrize("data", [None, 1, {"target": "a"}, [None], [[GOOD]], (GOOD,)])
def test_what_is_no_list_of_entries_is_refused(data: Any) -> None:
    with pytest.raises(PorterError, match="expected a list like"):
        Correspondence.from_json(data)


def test_good_entries_are_read() -> None:
    table = read_correspondence([GOOD, {"target": "e", "sources": ["a", "b"], "sizes": [1], "kind": "experts"}])
    assert table is not None and [entry.target for entry in table.entries] == ["model.norm", "e"]


def test_unknown_names_selections_and_devices(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = qwen2()
    golden, candidate = golden_of(model, tmp_path / "golden"), bfloat16(model)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"correspondence": [{**GOOD, "target": "model.nrm"}]}, "target.*'model.nrm'; did you mean 'model.norm'"),
        ({"correspondence": [{**GOOD, "sources": ["model.nrm"]}]}, "sources.*the golden has no module"),
        ({"modules": "zzz"}, "--modules 'zzz': matches none"),
        ({"device": "moon"}, "--device moon"),
        ({"device": "meta"}, "--device meta"),
    ]
    for options, words in cases:
        with pytest.raises(PorterError, match=words):
            align(golden, candidate, **options)
