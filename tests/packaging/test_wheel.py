"""The wheel holds everything that porter needs at run time, and the main job works from it, far from the repository."""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]

PACKAGES = {
    "porter": "porter",
    "models": "porter/models",
    "kernels": "porter/kernels",
    "golden": "porter/golden",
    "alignment": "porter/alignment",
    "cli": "porter/cli",
}
"""Folder of the repository -> folder of the wheel."""

SUFFIXES = {".py", ".toml", ".cpp", ".h", ".json", ".safetensors", ".typed", ".txt", ".jinja"}
"""What counts as part of porter; anything else in those folders is a by-product."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )
    for name in tracked.stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("porter-*.whl"))


def test_every_folder_of_modules_is_a_package_of_the_wheel() -> None:
    named = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    folders = {
        f"{target}/{path.parent.relative_to(ROOT / folder)}".removesuffix("/.").replace("/", ".")
        for folder, target in PACKAGES.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert folders == named


@pytest.mark.slow
def test_the_wheel_holds_every_file(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"{target}/{path.relative_to(ROOT / folder)}"
        for folder, target in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts
    }
    assert not sorted(wanted - held)
    assert not [name for name in held if name.startswith(("tests/", "kernels/", "models/", "cli/"))]


@pytest.mark.slow
def test_the_main_job_works_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(wheel, tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*command: str) -> str:
        words = [str(python.parent / command[0]), *command[1:]]
        done = subprocess.run(words, cwd=elsewhere, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("python", "-c", "import porter, porter.models; print(porter.__file__, porter.models.__file__)")
    assert str(tmp_path / "venv") in where and str(ROOT) not in where
    run("porter", "adapt", "tiny-deepseek-v3", "--target", "cpu", "--output", "port")
    assert (elsewhere / "port" / "config.json").is_file()
    script = "import porter; model = porter.load('port'); print(type(model).__name__, model.num_parameters() > 0)"
    assert run("python", "-c", script).split()[-1] == "True"
    chips = json.loads(run("porter", "chips", "--json"))["chips"]
    assert len(chips) == len(list((ROOT / "porter" / "chips").glob("*.toml")))


def make_environment(wheel: Path, folder: Path) -> Path:
    """A virtual environment with the wheel, and torch and the rest through a path to this environment's packages.

    A .pth file of the other folder is read as a plain path, so this environment's editable porter stays out of it.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "this_environment.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    return python
