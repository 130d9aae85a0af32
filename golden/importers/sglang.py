"""Dumps of SGLang's dumper: a ``.pt`` file per tensor, everything else in its name.

``<experiment>/step=0___rank=0___dump_index=12___name=non_intrusive__model.layers.0.mlp.output___....pt`` holds
``{"value": tensor, "meta": {...}}`` (older versions: the tensor alone, and ``forward_pass_id`` for ``step``). Hooks
(``non_intrusive_mode=all``) write ``<module>.inputs.<position or name>`` and ``<module>.output[.<place>]``, tensors
alone; token ids, positions and sequence lengths come under their own names, once for all modules. Rows are the tokens
of all sequences without padding, [T, H]; they are given the batch dimension that transformers' modules expect, [1, T,
H].

SGLang's modules are not transformers': attention and decoder layers take positions and a batch object and carry the
residual stream beside the hidden states. Kept are the modules with one tensor in and one out, and norms with a fused
residual addition, as norms of the sum (which the dump holds as their second output); all others are listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from porter.errors import PorterError
from porter.golden.importers.dump import Call, Dump, Missing, Step
from porter.golden.importers.files import NotTensors, load_saved

_HOOKED = "non_intrusive__"
_NAME = re.compile(r"(?:(?P<module>.+)\.)?(?:inputs\.(?P<argument>[^.]+)|output)(?:\.(?P<place>[^.]+))?")
_NORM = re.compile(r"(?:layer)?norm\d*", re.IGNORECASE)
_FOREIGN = "SGLang calls it with other arguments than transformers does"


@dataclass(frozen=True)
class _File:
    path: Path
    step: int
    index: int
    name: str


@dataclass
class _Hooked:
    """One call of a module as its hooks dumped it."""

    module: str
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    foreign: bool = False
    """Whether it, or a module within, takes positions or several states: no module of transformers is called so."""


def read_sglang(path: Path, rank: int | None = None) -> Dump:
    """Open the dump of one rank: the experiment's folder, or the one that holds it."""
    files = _of_rank(path, rank)
    dump = Dump("sglang", True, None, lambda: _steps(files, dump))
    if not any(file.name.startswith(_HOOKED) for file in files):
        raise PorterError(f"{path}: no dumps of module hooks; dump with DUMPER_NON_INTRUSIVE_MODE=all")
    dump.missing = [
        Missing("arguments that are no tensors", "the dumper writes tensors alone"),
        Missing("class names of modules", "the dumper writes paths alone"),
        Missing("attention and decoder layers", "SGLang's take other arguments than transformers'"),
    ]
    dump.dtype = _dtype(files)
    return dump


def _of_rank(path: Path, rank: int | None) -> list[_File]:
    found: dict[int, list[_File]] = {}
    folders = [path] if any(path.glob("*.pt")) else sorted(each for each in path.glob("*") if each.is_dir())
    folders = [folder for folder in folders if any(folder.glob("*.pt"))]
    if len(folders) != 1:
        raise PorterError(f"{path}: holds {len(folders)} folders of .pt files, expected one; name the experiment's")
    for file in folders[0].glob("*.pt"):
        tags = dict(part.partition("=")[::2] for part in file.stem.split("___"))
        step = tags.get("step", tags.get("forward_pass_id", ""))
        if step.isdigit() and tags.get("dump_index", "").isdigit() and "name" in tags:
            number = int(tags.get("rank") or 0)
            found.setdefault(number, []).append(_File(file, int(step), int(tags["dump_index"]), tags["name"]))
    if not found:
        raise PorterError(
            f"{folders[0]}: no file is named step=..___rank=..___dump_index=..___name=..; dump with SGLang"
        )
    if rank is None and len(found) > 1:
        ranks = ", ".join(map(str, sorted(found)))
        raise PorterError(f"{path}: holds ranks {ranks}; import each with --rank, then `porter golden gather`")
    chosen = next(iter(found)) if rank is None else rank
    if chosen not in found:
        raise PorterError(f"--rank {chosen}: {path} holds ranks {', '.join(map(str, sorted(found)))}")
    return sorted(found[chosen], key=lambda file: (file.step, file.index))


def _tensor(file: _File) -> Tensor | None:
    """The tensor of a file; None where it holds something else."""
    try:
        content = load_saved(file.path)
    except NotTensors:
        return None
    value = content.get("value") if isinstance(content, dict) else content
    return value.detach() if isinstance(value, Tensor) else None


def _dtype(files: list[_File]) -> torch.dtype | None:
    """That of the first floating output: of the embedding."""
    for file in files:
        if file.name.startswith(_HOOKED) and ".output" in file.name:
            tensor = _tensor(file)
            if tensor is not None and tensor.is_floating_point():
                return tensor.dtype
    return None


def _steps(files: list[_File], dump: Dump) -> Iterator[Step]:
    for number in dict.fromkeys(file.step for file in files):
        yield _step([file for file in files if file.step == number], dump)


def _step(files: list[_File], dump: Dump) -> Step:
    core: dict[str, Tensor] = {}
    hooks = _Hooks()
    for file in files:
        tensor = _tensor(file)
        if tensor is None:
            continue
        if file.name.startswith(_HOOKED):
            hooks.add(file.name.removeprefix(_HOOKED), tensor)
        else:
            core.setdefault(file.name, tensor)
    tokens = core["input_ids"].numel() if "input_ids" in core else None
    calls = []
    for hooked in hooks.done:
        call = _call(hooked, tokens)
        if call is not None:
            calls.append(call)
        elif hooked.module:
            dump.lost.setdefault(hooked.module, _FOREIGN)
    rows, mask = _rows(core)
    calls += [head for hooked in hooks.done for head in _head(hooked, rows, mask)]
    logits = next((h.outputs["next_token_logits"] for h in hooks.done if "next_token_logits" in h.outputs), None)
    known = logits is not None and rows is not None and len(logits) == len(rows)
    generated: list[int] | None = logits.argmax(-1).tolist() if logits is not None and known else None
    return Step(calls, rows, mask, generated, _least(core))


class _Hooks:
    """Puts the calls together again: inputs come when a module is entered, outputs when it is left."""

    def __init__(self) -> None:
        self._open: list[_Hooked] = []
        self.done: list[_Hooked] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """The next file, in the order of dumping."""
        match = _NAME.fullmatch(name)
        if match is None:
            return
        module, place = match["module"] or "", match["place"] or ""
        if match["argument"] is not None:
            key = match["argument"] + (f".{place}" if place else "")
            if not self._open or self._open[-1].module != module or key in self._open[-1].inputs:
                self._open.append(_Hooked(module))
            self._open[-1].inputs[key] = tensor
        elif self.done and self.done[-1].module == module and place and place not in self.done[-1].outputs:
            self.done[-1].outputs[place] = tensor
        else:
            self._close(module, place, tensor)

    def _close(self, module: str, place: str, tensor: Tensor) -> None:
        hooked = _Hooked(module)
        if any(each.module == module for each in self._open):
            # Modules above this one on the stack were left without an output that is a tensor.
            while (hooked := self._open.pop()).module != module:
                pass
        hooked.outputs[place] = tensor
        self.done.append(hooked)
        if hooked.foreign or len(hooked.inputs) > 2 or any(not t.is_floating_point() for t in hooked.inputs.values()):
            for around in self._open:
                around.foreign = True


def _call(hooked: _Hooked, tokens: int | None) -> Call | None:
    """The call as transformers' module of that name is called; None where there is no such way."""
    inputs, outputs = list(hooked.inputs.values()), list(hooked.outputs.values())
    if not hooked.module or hooked.foreign:
        return None
    if len(inputs) == len(outputs) == 1:
        return Call(hooked.module, None, [_batched(inputs[0], tokens)], {}, _batched(outputs[0], tokens))
    if len(inputs) == len(outputs) == 2 and _NORM.search(hooked.module.rpartition(".")[2]):
        return Call(hooked.module, None, [_batched(outputs[1], tokens)], {}, _batched(outputs[0], tokens))
    return None


def _head(hooked: _Hooked, rows: list[list[int]] | None, mask: list[list[int]] | None) -> Iterator[Call]:
    """The head's call, which SGLang's logits processor makes itself: of the last token of every sequence."""
    logits = hooked.outputs.get("next_token_logits")
    states = [t for t in hooked.inputs.values() if t.is_floating_point() and t.dim() == 2]
    if logits is None or rows is None or len(states) != 1 or not hooked.module:
        return
    lengths = [sum(row) for row in mask] if mask else [len(row) for row in rows]
    last = torch.tensor(lengths).cumsum(0) - 1
    if len(logits) == len(rows) and len(states[0]) == sum(lengths):
        yield Call("lm_head", None, [states[0][last].unsqueeze(0)], {}, logits.unsqueeze(0))


def _batched(tensor: Tensor, tokens: int | None) -> Tensor:
    """[T, ...] as [1, T, ...]."""
    return tensor.unsqueeze(0) if tensor.dim() and tensor.shape[0] == tokens else tensor


def _rows(core: dict[str, Tensor]) -> tuple[list[list[int]] | None, list[list[int]] | None]:
    """Token rows, padded on the left, and their mask: by the sequence lengths where they add up to the tokens, one
    token a row where every sequence goes on by one, else all as one row."""
    if "input_ids" not in core:
        return None, None
    ids: list[int] = core["input_ids"].flatten().tolist()
    lengths: list[int] = core["seq_lens"].flatten().tolist() if "seq_lens" in core else [len(ids)]
    if sum(lengths) != len(ids):
        lengths = [1] * len(ids) if len(lengths) == len(ids) else [len(ids)]
    rows, longest = [], max(lengths, default=0)
    for length in lengths:
        rows.append([0] * (longest - length) + ids[:length])
        ids = ids[length:]
    if len(set(lengths)) <= 1:
        return rows, None
    return rows, [[0] * (longest - length) + [1] * length for length in lengths]


def _least(core: dict[str, Tensor]) -> int | None:
    positions = core.get("positions")
    return None if positions is None or not positions.numel() else int(positions.min())
