"""A flattened copy of the Op code, as an exported model carries it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from porter.chips.catalogue import load_catalogue
from porter.code_bundle import python_files
from porter.kernels.dispatch import OpCall, bind_model, op_calls, usage, using_reference

IMPORT = "from porter.kernels.dispatch import OpCall\n"

ALONE = """
import sys
sys.modules["porter"] = None
import torch
from flattened_ops.porter_kernels_dispatch import OpCall
with torch.no_grad():
    print(OpCall("swiglu", "standard")(torch.tensor([[1.0, 2.0]])).tolist())
    print(tuple(OpCall("swiglu", "standard")(torch.empty(3, 8, device="meta")).shape))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "flattened_ops"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in python_files(IMPORT, load_catalogue().get("cpu")).items():
        assert "from porter." not in text and "import porter" not in text
        (package / name).write_text(text)
    return tmp_path


def test_the_copy_runs_where_porter_is_not_installed(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values, shape = done.stdout.splitlines()
    assert eval(values)[0][0] == pytest.approx(2 / (1 + 2.718281828**-1), rel=1e-6)
    assert shape == "(3, 4)"


def test_the_copy_and_porter_share_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    copied = importlib.import_module("flattened_ops.porter_kernels_dispatch")
    assert copied.OpCall is not OpCall
    model = nn.Module()
    model.ours, model.theirs = OpCall("swiglu", "standard"), copied.OpCall("swiglu", "standard")
    assert [site for site, _ in op_calls(model)] == ["ours", "theirs"]
    bind_model(model, "cpu", [])
    x = torch.randn(3, 8)
    assert torch.equal(model.ours(x), model.theirs(x))
    assert model.ours(x.to("meta")).shape == model.theirs(x.to("meta")).shape == (3, 4)
    with using_reference(model):
        assert model.theirs.preferred() == "reference"
    assert [(row["site"], row["calls"]) for row in usage(model)] == [("ours", 1), ("theirs", 1)]
