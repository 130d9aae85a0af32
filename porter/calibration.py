"""Measuring the inputs of linear layers over data, for schemes that quantize them with one scale and offset."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from porter.activation_range import HIGHEST, LOWEST, Range
from porter.checkpoint.strict_json import read_object, shown
from porter.correspondence import Correspondence
from porter.errors import PorterError
from porter.golden.prompts import read_prompts, read_tokens, tokenize
from porter.original import original_model
from porter.quantization import STATIC, scheme_named
from porter.tokenization import check_vocabulary

if TYPE_CHECKING:
    from porter.adaptation import Port

SCHEMA = "porter.calibration/1"
CALIBRATION_FILE = "calibration.json"
"""What was measured, as it lies in a port: another `--calibration` takes it instead of data."""
LIMIT = 200_000_000
DATA = "prompts as text or JSONL, token ids in .json, or a calibration.json"
REMEDY = "measure it again with --calibration PROMPTS"


@dataclass(frozen=True)
class Calibration:
    """Ranges of inputs by the names of the original's linears, the data that they are of, its number of tokens, and
    the model that ran, as `model_told` tells it ("" where that is not known)."""

    linears: Mapping[str, Range]
    data: str
    sha256: str
    tokens: int
    model: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it is stored: the range of each input, and the scale and offset that it gives."""
        linears = {}
        for name, found in sorted(self.linears.items()):
            scale, offset = found.parameters()
            measured = {"low": found.low, "high": found.high}
            linears[name] = {**measured, "input_scale": float(scale), "input_offset": int(offset)}
        return {
            "schema": SCHEMA,
            "data": self.data,
            "sha256": self.sha256,
            "tokens": self.tokens,
            "model": self.model,
            "linears": linears,
        }

    def of_modules(self, modules: Collection[str], correspondence: Correspondence) -> dict[str, Range]:
        """The ranges of ported linears: those of a fused one's parts, joined. Raises PorterError for one that lacks."""
        found = {}
        for name, parts in linear_sources(modules, correspondence).items():
            missing = [part for part in parts if part not in self.linears]
            if missing:
                raise PorterError(
                    f"--calibration {self.data}: {missing[0]} was never called; give data that reaches it"
                )
            found[name] = reduce(Range.joined, (self.linears[part] for part in parts))
        return found


def linear_sources(modules: Collection[str], correspondence: Correspondence) -> dict[str, tuple[str, ...]]:
    """The original's linears of each ported one."""
    return {n: tuple(s.removesuffix(".weight") for s in correspondence.source_of(f"{n}.weight")) for n in modules}


def calibrated(
    port: Port, file: str | Path | None, directory: Path | None, trust_remote_code: bool, tell: Callable[[str], None]
) -> Port:
    """`port` with the ranges of its linears' inputs, where its scheme needs them and `directory` has the weights.

    `tell` is told what begins. Raises PorterError as `calibration_of` does, and where scheme and `file` do not agree.
    """
    if not scheme_named(port.scheme).calibrated:
        if file is not None:
            raise PorterError(
                f"--calibration: scheme {port.scheme} measures activations as it runs, or not; leave it out"
            )
        return port
    if directory is None:
        return port
    if file is None:
        raise PorterError(
            f"--scheme {port.scheme}: scales of activations are measured beforehand; give --calibration FILE: {DATA}"
        )
    modules = [name for name, scheme in port.config.porter["quantized"].items() if scheme == STATIC]
    tell(f"reading {file} for the inputs of {len(modules)} linear layers ...")
    found = calibration_of(Path(file), directory, modules, port.correspondence, trust_remote_code=trust_remote_code)
    return dataclasses.replace(port, calibration=found)


def calibration_of(
    file: Path,
    directory: Path,
    modules: Collection[str],
    correspondence: Correspondence,
    *,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """What `file` holds of the inputs of ported linears `modules`, or what the original checkpoint `directory` shows.

    A file is one that was measured before (calibration.json), prompts as `porter golden capture --prompts` takes them,
    or in JSON token ids as its --tokens: with those the original runs, on the CPU. Raises PorterError where the file or
    the checkpoint cannot be used, and for inputs that are not finite.
    """
    if not file.is_file():
        # A device or a pipe has no end, or is empty when it is read again for its digest.
        raise PorterError(f"--calibration {file}: is missing or not a regular file; {DATA}")
    if file.suffix == ".json" and file.read_bytes()[:64].lstrip().startswith(b"{"):
        stored, here = read_calibration(file), model_told(directory)
        if stored.model and here and stored.model != here:
            raise PorterError(f"--calibration {file}: model: was measured on {stored.model}, not on {here}; {REMEDY}")
        return stored
    rows = read_tokens(file) if file.suffix == ".json" else tokenize(read_prompts(file), directory)
    names = {source for each in linear_sources(modules, correspondence).values() for source in each}
    model = original_model(directory, trust_remote_code=trust_remote_code)
    found = measure(model, names, rows, progress)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Calibration(found, file.name, digest, sum(map(len, rows)), model_told(directory))


def model_told(directory: Path) -> str:
    """A checkpoint's model in a few words from its config.json, the same however its weights are stored."""
    path = directory / "config.json"
    if not path.is_file():
        return ""
    config = read_object(path, "name a checkpoint directory", LIMIT)
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    sizes = (text.get(field) for field in ("hidden_size", "num_hidden_layers", "vocab_size"))
    return "{}, {} wide, {} layers, {} tokens".format(shown(str(config.get("model_type"))), *sizes)


def read_calibration(file: Path) -> Calibration:
    """A calibration that was stored. Raises PorterError naming the file, the linear and the field."""
    content = read_object(file, REMEDY, LIMIT)
    linears = content.get("linears")
    if not isinstance(linears, dict):
        raise PorterError(f"{file}: linears: expected an object of names to input_scale and input_offset; {REMEDY}")
    found = {name: _range(f"{file}: linears[{shown(name)}]", fields) for name, fields in linears.items()}
    tokens = content.get("tokens")
    data, digest, model = (str(content.get(field, "")) for field in ("data", "sha256", "model"))
    return Calibration(found, data or file.name, digest, tokens if type(tokens) is int else 0, model)


def _range(where: str, fields: object) -> Range:
    given = fields if isinstance(fields, dict) else {}
    values = {name: _number(value) for name, value in given.items() if type(value) in (int, float)}
    if {"low", "high"} <= values.keys():
        low, high = values["low"], values["high"]
    elif {"input_scale", "input_offset"} <= values.keys() and values["input_scale"] > 0:
        low, high = ((code - values["input_offset"]) * values["input_scale"] for code in (LOWEST, HIGHEST))
    else:
        raise PorterError(f"{where}: expected numbers low and high, or input_scale above 0 and input_offset; {REMEDY}")
    if not (-torch.inf < low <= 0.0 <= high < torch.inf):
        raise PorterError(f"{where}: the range from {low:g} to {high:g} does not hold zero, or is not finite; {REMEDY}")
    return Range(low, high)


def _number(value: float) -> float:
    """A number of JSON, whose integers have any length."""
    try:
        return float(value)
    except OverflowError:
        return torch.inf if value > 0 else -torch.inf


def measure(
    model: nn.Module,
    names: Collection[str],
    rows: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Range]:
    """The range of each module's first input over all `rows` of token ids, one row at a time; nothing of modules that
    were not called."""
    seen: dict[str, Range] = {}
    with torch.no_grad(), _watching(model, names, seen):
        for number, row in enumerate(rows):
            tokens = torch.tensor([list(row)], dtype=torch.int64)
            check_vocabulary(tokens, model.config)
            model(tokens, use_cache=False)
            if progress is not None:
                progress(number + 1, len(rows))
    return seen


@contextmanager
def _watching(model: nn.Module, names: Collection[str], seen: dict[str, Range]) -> Iterator[None]:
    handles = [model.get_submodule(name).register_forward_pre_hook(_noting(name, seen)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noting(name: str, seen: dict[str, Range]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0]
        if not given.numel():
            return
        low, high = (float(bound) for bound in given.aminmax())
        if not (low > -torch.inf and high < torch.inf):
            raise PorterError(f"--calibration: the input of {name} is not finite on this data; the original overflows")
        found = Range(min(low, 0.0), max(high, 0.0))
        seen[name] = found.joined(seen[name]) if name in seen else found

    return note
