"""The text of a ported modelling file: upstream's with the rewritten classes in place."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from porter.errors import PorterError
from porter.models.class_source import Edit, SourceMismatch, apply_edits, port_class
from porter.models.generated import own_package
from porter.models.rewrite import Candidate

OP_IMPORTS = (
    "from typing import Any",
    "",
    "from porter.kernels.dispatch import OpCall",
    "from porter.models.linear import Linear",
    "from porter.models.schemes import apply_schemes",
)
PLAIN_LINEAR = re.compile(r"(?<![\w.])(?:torch\.)?nn\.Linear\(")
MASKLESS = {"indexer", "sparse_mla_attention"}
STATIC = 'getattr(cache, "is_compileable", True)'
WITHOUT_MASK = (
    (r'"allow_is_causal_skip": False,.*', '"allow_is_causal_skip": not getattr(cache, "is_compileable", False),'),
    (
        r'"indexed_attention": create_causal_mask\(\*\*mask_kwargs\)',
        f'"indexed_attention": create_causal_mask(**mask_kwargs) if attention_mask is not None or {STATIC} else None',
    ),
)
"""Upstream's indexer knows causality by a mask alone, so that upstream always makes one. Where indexer and attention
(`MASKLESS`) are ported, the Ops know it without, and kernels of some chips take no mask; but a static cache shows keys
that are not there yet, and without a cache upstream looks for several sequences in a row."""
AUTO_MODEL = "AutoModel.from_config"
MODEL_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")


def upstream_path(module: str) -> Path:
    """The installed file of an upstream module such as transformers.models.qwen3.modeling_qwen3, not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise PorterError(f"{module}: transformers has no such modelling file; install transformers~=5.24")
    return Path(spec.origin)


def absolute_imports(text: str, module: str) -> str:
    """`text` of `module` with its relative imports made absolute; those of a checkpoint's own code stay, as its package
    has no name that an import statement can spell."""
    if own_package(module):
        return text
    package = module.split(".")[:-1]

    def absolute(match: re.Match[str]) -> str:
        level = len(match["dots"])
        return f"from {'.'.join([*package[: len(package) - level + 1], *filter(None, [match['name']])])} import"

    return re.sub(r"^from (?P<dots>\.+)(?P<name>[\w.]*) import", absolute, text, flags=re.MULTILINE)


def ported_text(
    module: str,
    candidates: Mapping[str, Candidate],
    chip: str,
    class_name: str = "",
    parts: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> str:
    """The modelling file of `module` with each class in `candidates` ported. Raises SourceMismatch naming the class.

    `class_name` is the model's class, where its name does not end as transformers' own do. `parts` names the class of
    this file that (class, attribute) is an instance of: where an auto class would build it, which finds transformers'
    own class, the one of this file is named instead.
    """
    original = upstream_path(module).read_text(encoding="utf-8")
    lines = original.split("\n")
    classes = {node.name: node for node in ast.parse(original).body if isinstance(node, ast.ClassDef)}
    _refuse_heirs(candidates, classes)
    edits: list[Edit] = []
    kept: list[tuple[int, int]] = []
    pretrained = [name for name in classes if name.endswith("PreTrainedModel")] or [class_name]
    for name, node in classes.items():
        if name in candidates:
            edits += port_class(node, candidates[name], lines, classes)
            kept += _kept_linears(node, candidates[name])
        edits += _part_edits(node, parts, lines)
        if name == class_name or name.endswith(MODEL_SUFFIXES):
            edits.append(_scheme_edit(node))
        if name in pretrained:
            edits.append(_float32_edit(node))
    lines = [line if _within(i, kept) else PLAIN_LINEAR.sub("Linear(", line) for i, line in enumerate(lines)]
    if MASKLESS <= {candidate.rewrite for candidate in candidates.values()}:
        for forced, causal in WITHOUT_MASK:
            lines = [re.sub(forced, causal, line) for line in lines]
    return _with_header(absolute_imports("\n".join(apply_edits(lines, edits)), module), module, chip)


def _part_edits(node: ast.ClassDef, parts: Mapping[tuple[str, str], str], lines: list[str]) -> list[Edit]:
    edits: list[Edit] = []
    for stmt in ast.walk(node):
        if not isinstance(stmt, ast.Assign) or not isinstance(stmt.value, ast.Call):
            continue
        part = parts.get((node.name, ast.unparse(stmt.targets[0]).removeprefix("self.")))
        if part is not None and ast.unparse(stmt.value.func) == AUTO_MODEL:
            text = "\n".join(lines[stmt.lineno - 1 : stmt.end_lineno])
            own = text.replace(AUTO_MODEL, f"{part}._from_config").split("\n")
            edits.append((stmt.lineno - 1, stmt.end_lineno or stmt.lineno, own))
    return edits


def _refuse_heirs(candidates: Mapping[str, Candidate], classes: Mapping[str, ast.ClassDef]) -> None:
    """A class that stays as it is must not inherit from one that is ported under it."""
    for name, node in classes.items():
        for base in node.bases:
            ported = candidates.get(base.id) if isinstance(base, ast.Name) and name not in candidates else None
            own = any(isinstance(m, ast.FunctionDef) and m.name == "forward" for m in node.body)
            if ported is not None and (ported.fusions or not own):
                raise SourceMismatch(ast.unparse(base), f"is inherited by {name}, which is not ported")


def _kept_linears(node: ast.ClassDef, candidate: Candidate) -> list[tuple[int, int]]:
    """Line ranges of linears that stay torch's, since an Op reads their weight instead of calling them."""
    return [
        (stmt.lineno - 1, stmt.end_lineno or stmt.lineno)
        for stmt in ast.walk(node)
        if isinstance(stmt, ast.Assign) and ast.unparse(stmt.targets[0]).removeprefix("self.") in candidate.keep_linear
    ]


def _within(line: int, ranges: list[tuple[int, int]]) -> bool:
    return any(start <= line < end for start, end in ranges)


def _scheme_edit(node: ast.ClassDef) -> Edit:
    """Int8 layers take their places before the weights are initialised or loaded."""
    init = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
    if init is None:
        last = node.end_lineno or node.lineno
        lines = ["", "    def __init__(self, config, *arguments, **keywords):"]
        lines += ["        super().__init__(config, *arguments, **keywords)", "        apply_schemes(self, config)"]
        return last, last, lines
    last = max(s.end_lineno or s.lineno for s in init.body if "self.post_init()" not in ast.unparse(s))
    return last, last, ["        apply_schemes(self, config)"]


def _float32_edit(node: ast.ClassDef) -> Edit:
    """The scales of int8 weights stay float32 whatever dtype the model is loaded in."""
    name = "_keep_in_fp32_modules_strict"
    kept = [s for s in node.body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == name]
    if not kept:
        last = node.end_lineno or node.lineno
        return last, last, [f'    {name} = ["_scale"]']
    value = kept[0].value
    names = [ast.literal_eval(e) for e in value.elts] if isinstance(value, ast.List) else []
    listed = ", ".join(f'"{n}"' for n in [*names, "_scale"])
    return kept[0].lineno - 1, kept[0].end_lineno or kept[0].lineno, [f"    {name} = [{listed}]"]


def _with_header(text: str, module: str, chip: str) -> str:
    """The file with porter's imports after the last import, and upstream's do-not-edit banner replaced."""
    text = re.sub(r"\A(?:# +🚨.*\n(?:#.*\n)*?# +🚨.*\n)", "", text)
    lines = text.split("\n")
    last = max(s.end_lineno or 0 for s in ast.parse(text).body if isinstance(s, ast.Import | ast.ImportFrom))
    banner = f"# {module}, ported to {chip} by porter. upstream.diff shows every line that differs."
    return "\n".join([banner, *lines[:last], "", *OP_IMPORTS, *lines[last:]])


def upstream_diff(module: str, text: str, name: str) -> str:
    """A unified diff from upstream's file, with absolute imports, to the ported `text`."""
    original = absolute_imports(upstream_path(module).read_text(encoding="utf-8"), module)
    return "".join(
        difflib.unified_diff(original.splitlines(True), text.splitlines(True), f"{module.replace('.', '/')}.py", name)
    )
