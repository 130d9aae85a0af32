"""A comparison that was interrupted continues where it was, and reports what it would have reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import deepseek_v3, golden_of, qwen2
from torch import nn

import porter.alignment.align as aligning
from porter.alignment import journal as journal_file
from porter.alignment import journal_key, weight_judgement
from porter.alignment.free_pass import FreePass
from porter.alignment.journal import Resumption
from porter.alignment.rows import OUTLIER

CPU = torch.device("cpu")
Case = tuple[Any, Path]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_num_threads(1)
    # Not $PORTER_CACHE, which has the compiled kernels.
    monkeypatch.setattr(aligning, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "alignment"


def dense() -> nn.Module:
    return qwen2(layers=6)


def scaled(model: Any) -> None:
    """A wrong eps in every norm, of which three are explained, and a wrong weight."""
    model.config.rms_norm_eps = 1e-3
    model.model.layers[3].self_attn.o_proj.weight.mul_(1.02)


def unbiased(model: Any) -> None:
    """A router without its bias: flips with margin."""
    model.model.layers[1].mlp.gate.e_score_correction_bias.zero_()


def sound(model: Any) -> None:
    """Nothing is wrong but for the precision."""


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], torch.dtype]] = {
    "drift": (dense, scaled, torch.bfloat16),
    "router": (lambda: deepseek_v3(), unbiased, torch.bfloat16),
    "sibling": (dense, sound, torch.float32),
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in made:
            build, change, dtype = MODELS[name]
            folder, model = tmp_path_factory.mktemp(name), build()
            golden = golden_of(model, folder / "golden", new_tokens=2, rows=1)
            with torch.no_grad():
                change(model)
            model.to(dtype).save_pretrained(folder / "candidate", max_shard_size="40KB")
            made[name] = golden, folder / "candidate"
        return made[name]

    return make


@pytest.fixture
def unlike_its_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's norm, right in float64, makes everything a little too large in its own precision."""
    load = aligning.load_candidate

    def loading(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        norm = found.model.get_submodule("model.layers.3.post_attention_layernorm")
        norm.register_forward_hook(lambda m, x, out: out if out.dtype == torch.float64 else out * (1 + 1.6e-6))
        return found

    monkeypatch.setattr(aligning, "load_candidate", loading)


class Run:
    """Aligns again and again; `said` is what the last run said."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.golden, self.candidate = case
        self.options = options
        self.said: list[str] = []
        self.advanced = 0

    def report(self, fresh: bool = False, until: int | None = None, **options: Any) -> Any:
        """The report; interrupted once `until` modules are done."""
        self.said, self.advanced = [], 0

        def advance(amount: int) -> None:
            self.advanced += amount
            if self.advanced == until:
                raise KeyboardInterrupt

        options = {"resumption": Resumption(fresh, self.said.append), **self.options, **options}
        return aligning.align(self.golden, self.candidate, progress=advance, **options).to_json()

    def interrupted(self, until: int) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.report(until=until)


@pytest.mark.parametrize("name", MODELS)
def test_interrupted_again_and_again(
    cases: Callable[[str], Case], name: str, cache: Path, request: pytest.FixtureRequest
) -> None:
    if name == "sibling":
        request.getfixturevalue("unlike_its_siblings")
    run = Run(cases(name))
    whole = run.report()
    assert run.said == [] and not list(cache.iterdir())
    assert whole["verdict"] == "drift"
    assert len(whole["causes"]) >= {"drift": 3, "router": 1, "sibling": 0}[name]
    assert bool(whole["routing"]) == (name == "router")
    assert any(OUTLIER in row["why"] for row in whole["modules"]) == (name == "sibling")
    total = run.advanced
    before = 0
    few = (1, 2, total // 3, total // 2, total // 2 + 1, total - 1, total)
    for until in range(1, total + 1) if name == "router" else few:
        run.interrupted(until)
        resumed = [f"resuming: {before} of {total} modules were compared before"] if before else []
        # What is reported is done: the last one was entered before the progress was told.
        assert run.said == [*resumed, f"interrupted after {until} of {total} modules: the same command continues there"]
        before = until
    assert run.report() == whole
    assert run.said == [f"resuming: {total} of {total} modules were compared before"]
    assert not list(cache.iterdir()), "a comparison that ended leaves nothing"


def test_interrupted_in_the_free_run(cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(cases("router"))
    whole = run.report()
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(FreePass, "run", lambda self: (_ for _ in ()).throw(MemoryError()))
        run.report()
    assert run.report() == whole
    assert run.said[0].startswith("resuming:")


def test_interrupted_among_the_weights(cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(cases("drift"), passes=("weights", "replay"), modules=r"layers\.3\.self_attn")
    whole = run.report()
    judged: list[str] = []

    def judge(weight: Any) -> Any:
        judged.append(weight.name)
        if len(judged) == 20:
            raise KeyboardInterrupt
        return weight_judgement.judge(weight)

    monkeypatch.setattr(journal_file, "judge", judge)
    run.interrupted(1000)
    assert run.said == ["interrupted after 19 weights: the same command continues there"]
    assert run.report() == whole
    assert run.said == ["resuming: 19 weights were compared before"]
    assert len(judged) == 20 + len(set(judged)) - 19 and judged[19] == judged[20]


def test_changed_settings_weights_or_golden_start_anew(cases: Callable[[str], Case], tmp_path: Path) -> None:
    golden, source = cases("drift")
    folder = tmp_path / "candidate"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    options: dict[str, Any] = {"passes": "replay", "modules": r"layers\.[01]\."}
    run = Run((golden, folder), **options)
    run.interrupted(5)
    run.report(until=None, factor=3.0)
    assert run.said == []
    run.report(until=None, dtype="float32")
    assert run.said == []
    run.report(until=None, modules=r"layers\.[012]\.")
    assert run.said == []
    again = golden_of(dense(), tmp_path / "golden", new_tokens=1, rows=1)
    other = Run((again, folder), **options)
    other.report()
    assert other.said == []
    file = sorted(folder.glob("*.safetensors"))[0]
    times = file.stat()
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    run.report()
    assert run.said == []
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    (folder / "alignment.json").write_text("{}")
    run.interrupted(6)
    assert run.said[0].startswith("resuming: 5 of"), "all else changed back, and its own report does not count"
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    run.report()
    assert run.said == []


def test_fresh_and_models_in_memory(cases: Callable[[str], Case], cache: Path) -> None:
    run = Run(cases("drift"), passes="replay", modules=r"layers\.1\.")
    run.interrupted(3)
    whole = run.report(fresh=True)
    assert run.said == []
    assert run.report() == whole and run.said == []
    with pytest.raises(KeyboardInterrupt):
        run.report(resumption=None, until=3)
    assert run.said == [] and not list(cache.iterdir()), "not asked to be resumable"
    in_memory = Run((run.golden, dense()), passes="replay", modules=r"layers\.1\.")
    with pytest.raises(KeyboardInterrupt):
        in_memory.report(until=3)
    assert in_memory.said == [] and not list(cache.iterdir())


def test_a_killed_process_leaves_what_it_did(
    cases: Callable[[str], Case], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stamps of two processes differ where somebody edits porter in between.
    monkeypatch.setattr(journal_key, "code_stamp", lambda: b"this code")
    run = Run(cases("drift"), passes="replay", modules=r"layers\.[01]\.")
    code = """
import os, signal, sys
from porter.alignment.align import align
from porter.alignment.journal import Resumption
from pathlib import Path
from porter.alignment import journal as journal_file
from porter.alignment import journal_key, weight_judgement
import porter.alignment.align as aligning
import torch
torch.set_num_threads(1)
journal_key.code_stamp = lambda: b"this code"
aligning.cache_directory = lambda: Path(sys.argv[3])
done = 0
def advance(amount):
    global done
    done += amount
    if done == 7:
        os.kill(os.getpid(), signal.SIGKILL)
align(sys.argv[1], sys.argv[2], passes="replay", modules=r"layers\\.[01]\\.", progress=advance, resumption=Resumption())
"""
    command = [sys.executable, "-c", code, str(run.golden.path), str(run.candidate), str(cache.parent)]
    assert subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == -signal.SIGKILL
    (journal,) = cache.iterdir()
    with journal.open("ab") as file:
        file.write(b"0123456789abcdef {half a li")
    run.report()
    assert run.said[0].startswith("resuming: 7 of ")


def test_two_at_once(cases: Callable[[str], Case], cache: Path) -> None:
    run, other = (Run(cases("drift"), passes="replay", modules=r"layers\.1\.") for _ in range(2))
    seen: list[Any] = []

    def advance(amount: int) -> None:
        if not seen:
            seen.append(other.report())

    golden, candidate = cases("drift")
    first = aligning.align(
        golden, candidate, progress=advance, resumption=Resumption(say=run.said.append), **run.options
    ).to_json()
    assert seen == [first]
    assert other.said == ["another process compares the same: this one cannot be continued if it is interrupted"]
    assert run.said == [] and not list(cache.iterdir())
