"""In which width a piece of Python code computes, read from its text: casts followed through assignments.

Only what the text decides is said: a value is WIDE (float32 or more), NARROW (cast to a 16-bit dtype), GIVEN (in the
dtype of the arguments), SCALAR (a Python number, which widens nothing), or unknown (None), of which nothing follows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Width(IntEnum):
    """What is known of the dtype of a value; the larger wins where two meet in an operation."""

    SCALAR = 0
    NARROW = 1
    GIVEN = 2
    WIDE = 3


@dataclass(frozen=True)
class Site:
    """A place where the width matters. `kind`: softmax, mean-square, linear, cast or return; `target`: what is cast."""

    kind: str
    line: int
    width: Width | None
    target: str = ""


TORCH_DTYPES = {
    **dict.fromkeys(("float32", "float", "float64", "double"), Width.WIDE),
    **dict.fromkeys(("float16", "half", "bfloat16"), Width.NARROW),
}
CASTS = {"float": Width.WIDE, "double": Width.WIDE, "half": Width.NARROW, "bfloat16": Width.NARROW}
NAMESPACES = ("torch", "F", "nn", "functional")
KEEPING = frozenset(
    "pow square mean sum sqrt rsqrt abs neg exp log sigmoid tanh relu silu clamp clamp_min clamp_max div mul add sub "
    "view reshape transpose permute contiguous flatten unflatten unsqueeze squeeze expand expand_as repeat "
    "repeat_interleave detach clone softmax log_softmax gather index_select masked_fill masked_fill_ scatter amax amin "
    "max min var std norm cumsum matmul mm bmm addmm narrow split chunk unbind topk sort t flip roll reciprocal".split()
)
REDUCING = frozenset(("mean", "sum", "var", "norm"))
SOFTMAX = frozenset(("softmax", "log_softmax"))
PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "einsum"))


def sites_of(function: ast.FunctionDef | ast.AsyncFunctionDef, stored: Mapping[str, Width]) -> list[Site]:
    """The sites of one function. `stored`: the widths of the tensors that `self` holds, by attribute name."""
    reader = _Reader(stored)
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.arg != "self":
            reader.values[argument.arg] = Width.GIVEN
    reader.block(function.body)
    return reader.sites


def promoted(*widths: Width | None) -> Width | None:
    """The width of what an operation on all of these gives."""
    if Width.WIDE in widths:
        return Width.WIDE
    known = [width for width in widths if width is not None]
    return max(known, default=Width.SCALAR) if len(known) == len(widths) else None


@dataclass
class _Reader:
    stored: Mapping[str, Width]
    values: dict[str, Width | None] = field(default_factory=dict)
    dtypes: dict[str, Width | None] = field(default_factory=dict)
    squares: set[str] = field(default_factory=set)
    sites: list[Site] = field(default_factory=list)

    def block(self, statements: list[ast.stmt]) -> None:
        """Read statements in order; what only one branch of several says is unknown after them."""
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None:
                for target in targets:
                    self.assign(target, node.value)
        elif isinstance(node, ast.Return) and node.value is not None:
            first = node.value.elts[0] if isinstance(node.value, ast.Tuple) and node.value.elts else node.value
            self.width(node.value)
            self.sites.append(Site("return", node.lineno, self.quietly(first)))
        elif isinstance(node, ast.If):
            self.width(node.test)
            self.branches(node.body, node.orelse)
        elif isinstance(node, ast.For | ast.While | ast.With):
            self.branches(node.body, [])
        elif isinstance(node, ast.Expr | ast.AugAssign) and node.value is not None:
            self.width(node.value)

    def branches(self, *bodies: list[ast.stmt]) -> None:
        before, results = dict(self.values), []
        for body in bodies:
            self.values = dict(before)
            self.block(body)
            results.append(self.values)
        names = {name for values in results for name in values}
        self.values = {
            name: results[0].get(name) if all(v.get(name) == results[0].get(name) for v in results) else None
            for name in names
        }

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            parts = (
                value.elts if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts) else None
            )
            whole = None if parts else self.width(value)
            for index, each in enumerate(target.elts):
                if parts:
                    self.assign(each, parts[index])
                elif isinstance(each, ast.Name):
                    self.values[each.id] = whole
            return
        if isinstance(target, ast.Name):
            dtype = self.dtype(value)
            if dtype is not None:
                self.dtypes[target.id] = dtype
            self.values[target.id] = self.width(value, target.id)
            self.squares.discard(target.id)
            if self.is_square(value):
                self.squares.add(target.id)
        else:
            self.width(value, ast.unparse(target))

    def quietly(self, node: ast.expr) -> Width | None:
        """The width of an expression that was read already: its sites are not noted twice."""
        count = len(self.sites)
        width = self.width(node)
        del self.sites[count:]
        return width

    def width(self, node: ast.expr, target: str = "") -> Width | None:
        """The width of an expression; its sites are noted."""
        if isinstance(node, ast.Name):
            return self.values.get(node.id)
        if isinstance(node, ast.Constant | ast.Compare | ast.BoolOp | ast.JoinedStr):
            return Width.SCALAR
        if isinstance(node, ast.Attribute):
            return self.attribute(node)
        if isinstance(node, ast.Subscript | ast.UnaryOp | ast.Starred):
            return self.width(node.operand if isinstance(node, ast.UnaryOp) else node.value)
        if isinstance(node, ast.BinOp):
            found = promoted(self.width(node.left), self.width(node.right))
            if isinstance(node.op, ast.MatMult):
                self.sites.append(Site("linear", node.lineno, found))
            return found
        if isinstance(node, ast.IfExp):
            one, other = self.width(node.body), self.width(node.orelse)
            return one if one == other else None
        if isinstance(node, ast.Tuple | ast.List):
            return promoted(*(self.width(each) for each in node.elts))
        return self.call(node, target) if isinstance(node, ast.Call) else None

    def attribute(self, node: ast.Attribute) -> Width | None:
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return self.stored.get(node.attr)
        return self.width(node.value) if node.attr in ("T", "mT", "data") else None

    def call(self, node: ast.Call, target: str) -> Width | None:
        function = node.func
        given = [self.width(argument) for argument in node.args]
        keywords = {k.arg: k.value for k in node.keywords if k.arg}
        if not isinstance(function, ast.Attribute):
            return None
        name = function.attr
        if _root(function) in NAMESPACES:
            tensors = [self.width(value) for key, value in keywords.items() if key in ("input", "weight", "bias")]
            operands, receiver = [*given, *tensors], node.args[0] if node.args else None
        elif self.is_held(function.value):
            return None
        else:
            own = self.width(function.value)
            if name in CASTS and not node.args:
                return self.cast(CASTS[name], own, node, target)
            if name in ("to", "type", "type_as"):
                return self.converted(node, name, own, keywords, target)
            if name not in KEEPING:
                return None
            operands, receiver = [own, *(given if name in PRODUCTS else [])], function.value
        dtype = self.dtype(keywords["dtype"]) if "dtype" in keywords else promoted(*operands)
        self.note(name, node, dtype, receiver, operands)
        return None if dtype is Width.SCALAR else dtype

    def is_held(self, node: ast.expr) -> bool:
        """Whether the receiver of a call is `self` or a module that it holds: what that returns is unknown."""
        return (isinstance(node, ast.Name) and node.id == "self") or (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and node.attr not in self.stored
        )

    def converted(
        self, node: ast.Call, name: str, own: Width | None, keywords: Mapping[str, ast.expr], target: str
    ) -> Width | None:
        """`x.to(...)`, `x.type(...)`, `x.type_as(y)`."""
        if name == "type_as":
            return self.quietly(node.args[0]) if node.args else None
        arguments = [*node.args, *([keywords["dtype"]] if "dtype" in keywords else [])]
        found = [dtype for dtype in map(self.dtype, arguments) if dtype is not None]
        return self.cast(found[0], own, node, target) if found else None

    def cast(self, to: Width, own: Width | None, node: ast.Call, target: str) -> Width:
        if to is Width.NARROW:
            function = node.func
            held = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            self.sites.append(Site("cast", node.lineno, own, target or held))
        return to

    def note(
        self, name: str, node: ast.Call, width: Width | None, receiver: ast.expr | None, operands: list[Width | None]
    ) -> None:
        if name in SOFTMAX:
            self.sites.append(Site("softmax", node.lineno, width))
        elif name in PRODUCTS:
            self.sites.append(Site("linear", node.lineno, promoted(*operands)))
        elif name in REDUCING and receiver is not None and (name == "var" or self.is_square(receiver)):
            self.sites.append(Site("mean-square", node.lineno, width))

    def dtype(self, node: ast.expr) -> Width | None:
        """The width that an expression for a dtype names; None where it is no dtype or an unknown one."""
        if isinstance(node, ast.Name):
            return self.dtypes.get(node.id, Width.WIDE if node.id == "float" else None)
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                return TORCH_DTYPES.get(node.attr)
            return self.quietly(node.value) if node.attr == "dtype" else None
        return None

    def is_square(self, node: ast.expr) -> bool:
        """Whether the expression squares something element by element, or is a name that holds such squares."""
        return any(self._squares(each) for each in _outer(node))

    def _squares(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.squares
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            squared = [a for a in node.args if isinstance(a, ast.Constant) and a.value == 2]
            return node.func.attr == "square" or (node.func.attr == "pow" and bool(squared))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return isinstance(node.right, ast.Constant) and node.right.value == 2
        same = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
        return same and isinstance(node, ast.BinOp) and ast.dump(node.left) == ast.dump(node.right)


def _outer(node: ast.expr) -> Iterator[ast.AST]:
    """The expression and what it is called on: `x.pow(2)` of `x.pow(2).float()`."""
    yield node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from _outer(node.func.value)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
