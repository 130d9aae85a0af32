"""What a proof on a few random tokens might not see: limits that only large values or long inputs reach."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

CLAMPS = frozenset(
    {
        "clamp",
        "clamp_",
        "clip",
        "clip_",
        "clamp_min",
        "clamp_max",
        "minimum",
        "maximum",
        "hardtanh",
        "relu6",
        "floor",
        "ceil",
    }
)
ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
CONDITION = (
    ast.Attribute, ast.Name, ast.Load, ast.Compare, ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.Constant, ast.BoolOp,
    ast.And, ast.Or, ast.UnaryOp, ast.Not,
)  # fmt: skip
"""What a condition may be made of whose answer is the same at every call of a module."""


def hidden_limit(module: nn.Module, ported: str = "") -> str | None:
    """A limit in `module`'s forward, or in what its file lets it call, that values or lengths beyond those of a proof
    may reach; None where there is none, or where the `ported` text names one too.

    Branches that the module's own settings rule out are not looked at.
    """
    if any(word in ported for word in ("clamp", "limit")):
        return None
    for where, function in _functions(type(module)):
        for node in _reached(_parsed(function), module):
            if isinstance(node, ast.Call) and _called(node) in CLAMPS:
                return f"{where} limits values ({ast.unparse(node)[:80]}), which its proof might not reach"
            if isinstance(node, ast.Compare) and _is_threshold(node, module):
                return f"{where} depends on a threshold ({ast.unparse(node)[:80]}), which its proof might not reach"
    return None


def _functions(kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The forward of a class, and each method and function of its file that it names, directly or through another."""
    home = inspect.getmodule(inspect.unwrap(kind.forward))
    waiting, seen = [("forward", kind.forward)], set()
    while waiting:
        name, function = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name, function
        for node in ast.walk(_parsed(function)):
            found: Any = None
            if isinstance(node, ast.Name):
                found = getattr(home, node.id, None)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                found = getattr(kind, node.attr, None)
            found = inspect.unwrap(found) if callable(found) else None
            if inspect.isfunction(found) and inspect.getmodule(found) is home:
                waiting.append((found.__name__, found))


def _parsed(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


def _reached(node: ast.AST, module: nn.Module) -> Iterator[ast.AST]:
    """The nodes below `node`, without branches that `module`'s own attributes rule out."""
    yield node
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If | ast.IfExp):
        answer = _settled(node.test, module)
        parts = {True: node.body, False: node.orelse}
        if answer is not None:
            chosen = parts[answer]
            children = list(chosen) if isinstance(chosen, list) else [chosen]
    for child in children:
        yield from _reached(child, module)


def _settled(test: ast.expr, module: nn.Module) -> bool | None:
    """The answer of a condition on the module's attributes alone; None for any other condition."""
    parts = list(ast.walk(test))
    if not all(isinstance(part, CONDITION) for part in parts):
        # `self.training and self.jitter > 0`: the first part alone may rule it out.
        first = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and _settled(test.values[0], module)
        return False if first is False and isinstance(test, ast.BoolOp) else None
    if {part.id for part in parts if isinstance(part, ast.Name)} != {"self"}:
        return None
    try:
        return bool(eval(compile(ast.Expression(test), "condition", "eval"), {"__builtins__": {}}, {"self": module}))
    except (AttributeError, TypeError, RuntimeError):
        return None


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_threshold(node: ast.Compare, module: nn.Module) -> bool:
    """Whether something is measured against a number above 1, of the text or among the module's settings."""
    if not any(isinstance(op, ORDERINGS) for op in node.ops):
        return False
    values = [_number(operand, module) for operand in (node.left, *node.comparators)]
    return any(value is not None and abs(value) > 1 for value in values)


def _number(node: ast.expr, module: nn.Module) -> float | None:
    chain: list[str] = []
    value: Any = node
    while isinstance(value, ast.Attribute):
        chain.append(value.attr)
        value = value.value
    found: Any = None
    if isinstance(value, ast.Constant) and not chain:
        found = value.value
    elif isinstance(value, ast.Name) and value.id == "self":
        found = module
        for name in reversed(chain):
            found = getattr(found, name, None)
    else:
        return None
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
