"""Rewrite one class of a modelling file: its text with the fused layers and the ported forward in place."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping

from torch import nn

from porter.errors import PorterError
from porter.models.rewrite import Adopted, Candidate, Fusion

KERNEL_DECORATORS = ("use_kernel_forward_from_hub", "use_kernelized_func", "use_experts_implementation")
Edit = tuple[int, int, list[str]]  # first line, line after the last, replacement; lines count from 0


class SourceMismatch(PorterError):
    """The class's text does not have the form that its rewrite edits; the class is left as it is, with this reason."""

    def __init__(self, class_name: str, reason: str) -> None:
        super().__init__(f"class {class_name} {reason}")
        self.class_name = class_name


def port_class(
    node: ast.ClassDef, candidate: Candidate, lines: list[str], classes: Mapping[str, ast.ClassDef]
) -> list[Edit]:
    """The edits on the `lines` of the file that turn class `node` into its ported form. Raises SourceMismatch.

    A method that it inherits from another of the file's `classes` is written into it.
    """
    decorators = [d for d in node.decorator_list if _is_kernel_decorator(d)]
    edits: list[Edit] = [(d.lineno - 1, d.end_lineno or d.lineno, []) for d in decorators]
    init, forward = (_defining(node, name, classes) for name in ("__init__", "forward"))
    if init is None or forward is None:
        raise SourceMismatch(
            node.name, "does not define both __init__ and forward, nor does a class of its file for it"
        )
    init_edits = _edit_init(node.name, _method(init, "__init__"), candidate)
    forward_edit = _replace_forward(_method(forward, "forward"), candidate, lines)
    inherited = [] if init is node else _inherited_init(init, init_edits, lines)
    inherited += [] if forward is node else ["", *forward_edit[2]]
    edits += init_edits if init is node else []
    edits += [forward_edit] if forward is node else []
    edits += [(_end(node), _end(node), inherited)] if inherited else []
    methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
    edits += [(_start(methods[name]), _end(methods[name]) + 1, []) for name in candidate.drop if name in methods]
    return edits


def _defining(node: ast.ClassDef, name: str, classes: Mapping[str, ast.ClassDef]) -> ast.ClassDef | None:
    """The first class of the file, from `node` up, whose body defines method `name`."""
    if any(isinstance(m, ast.FunctionDef) and m.name == name for m in node.body):
        return node
    bases = [classes[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in classes]
    return next((found for base in bases if (found := _defining(base, name, classes)) is not None), None)


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == name)


def _inherited_init(owner: ast.ClassDef, edits: list[Edit], lines: list[str]) -> list[str]:
    """The edited text of `owner`'s __init__ for a class that inherits it; it calls on from `owner`."""
    init = _method(owner, "__init__")
    start = _start(init)
    text = apply_edits(lines[start : _end(init)], [(a - start, b - start, new) for a, b, new in edits])
    return ["", *(line.replace("super().__init__(", f"super({owner.name}, self).__init__(") for line in text)]


def apply_edits(lines: list[str], edits: list[Edit]) -> list[str]:
    """`lines` with all edits made; edits must not overlap."""
    result = list(lines)
    for start, end, replacement in sorted(edits, key=lambda edit: edit[0], reverse=True):
        result[start:end] = replacement
    return result


def _start(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _is_kernel_decorator(node: ast.expr) -> bool:
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id in KERNEL_DECORATORS


def _edit_init(class_name: str, init: ast.FunctionDef, candidate: Candidate) -> list[Edit]:
    edits: list[Edit] = []
    built = {
        name: stmt
        for stmt in init.body
        if isinstance(stmt, ast.Assign) and (name := _assigned_attribute(stmt)) is not None
    }
    for fusion in candidate.fusions:
        missing = [s for s in fusion.sources if s not in built or _linear_call(built[s]) is None]
        if missing:
            raise SourceMismatch(class_name, f"does not build {missing[0]} by a plain nn.Linear(...) call")
        first, *rest = (built[s] for s in fusion.sources)
        position = min((first, *rest), key=lambda s: s.lineno)
        new = [" " * 8 + line for line in _fused_lines(class_name, fusion, [built[s] for s in fusion.sources])]
        edits += [(s.lineno - 1, _end(s), new if s is position else []) for s in (first, *rest)]
    if candidate.append:
        last = _end(init.body[-1])
        edits.append((last, last, [" " * 8 + line for line in candidate.append]))
    return edits


def _assigned_attribute(stmt: ast.Assign) -> str | None:
    """`name` where the statement is `self.name = ...`."""
    target = stmt.targets[0]
    if len(stmt.targets) != 1 or not isinstance(target, ast.Attribute) or ast.unparse(target.value) != "self":
        return None
    return target.attr


def _linear_call(stmt: ast.Assign) -> tuple[str, str, str] | None:
    """(in_features, out_features, bias) as text where the statement's value is `nn.Linear(a, b, bias=c)`."""
    call = stmt.value
    if not isinstance(call, ast.Call) or ast.unparse(call.func) != "nn.Linear" or len(call.args) < 2:
        return None
    bias = next((ast.unparse(k.value) for k in call.keywords if k.arg == "bias"), "True")
    if len(call.args) > 2:
        bias = ast.unparse(call.args[2])
    return ast.unparse(call.args[0]), ast.unparse(call.args[1]), bias


def _fused_lines(class_name: str, fusion: Fusion, built: list[ast.Assign]) -> list[str]:
    calls = [call for stmt in built if (call := _linear_call(stmt)) is not None]
    if len({(a, c) for a, _, c in calls}) != 1:
        raise SourceMismatch(class_name, f"gives {', '.join(fusion.sources)} different input sizes or biases")
    in_features, bias = calls[0][0], calls[0][2]
    rows = [rows for _, rows, _ in calls]
    if fusion.sizes is None:
        total = f"2 * {rows[0]}" if len(rows) == 2 and rows[0] == rows[1] else " + ".join(rows)
        return [f"self.{fusion.target} = Linear({in_features}, {total}, bias={bias})"]
    return [
        f"self.{fusion.sizes} = [",
        *(f"    {row}," for row in rows),
        "]",
        f"self.{fusion.target} = Linear({in_features}, sum(self.{fusion.sizes}), bias={bias})",
    ]


def _written(candidate: Candidate) -> list[type]:
    """The candidate's class and the bases that it shares with no other module, outermost base first."""
    return [kind for kind in reversed(candidate.forward.__mro__) if kind not in nn.Module.__mro__]


def _replace_forward(forward: ast.FunctionDef, candidate: Candidate, lines: list[str]) -> Edit:
    methods = {name: method for kind in _written(candidate) for name, method in vars(kind).items()}
    functions = [method for method in methods.values() if inspect.isfunction(method)]
    functions.sort(key=lambda function: function.__name__ != "forward")
    texts = [textwrap.dedent(inspect.getsource(function)) for function in functions]
    if candidate.adopt is not None:
        texts[0] = _adopting(texts[0], candidate.adopt, forward, lines)
    text = "\n".join(texts)
    for ours, theirs in candidate.rename.items():
        text = re.sub(rf"\bself\.{ours}\b", f"self.{theirs}", text)
    # The upstream signature line starts after its decorators, which stay.
    return forward.lineno - 1, _end(forward), textwrap.indent(text, " " * 4).rstrip("\n").split("\n")


def _adopting(text: str, adopt: Adopted, forward: ast.FunctionDef, lines: list[str]) -> str:
    """The ported forward `text` under upstream's own signature."""
    signature = lines[forward.lineno - 1 : forward.body[0].lineno - 1]
    method = ast.parse(text).body[0]
    if not signature or not isinstance(method, ast.FunctionDef):
        raise SourceMismatch(forward.name, "has its body on the line of its signature")
    body = text.split("\n")[method.body[0].lineno - 1 :]
    body = [re.sub(r"^(    return .+), None$", rf"\1{RETURNED[min(adopt.returns, 3)]}", line) for line in body]
    own = textwrap.dedent("\n".join(signature)).split("\n")
    return "\n".join([*own, *(f"    {line}" for line in adopt.prologue), *body])


RETURNED = {1: "", 2: ", None", 3: ", None, cache"}
"""What follows the output where a forward returns so many values."""
