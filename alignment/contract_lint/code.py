"""Casts: places where the golden's code computes in float32 and the candidate's does not, read from the source text."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.contract_lint.contract import Contract
from porter.alignment.contract_lint.kinds import KINDS, is_router, precision, short
from porter.alignment.contract_lint.widths import Site, Width, sites_of
from porter.alignment.pairing import Pairing
from porter.alignment.report import LintFinding

DEPTH = 2
"""How far functions of the same file are followed from `forward`."""

SITES = {"softmax": "softmax-dtype", "mean-square": "norm-accumulation"}


@dataclass(frozen=True)
class CodeFacts:
    """The sites of a module's `forward` and of the functions of its own file that it names; `unread`: no source."""

    sites: tuple[Site, ...]
    file: str
    unread: bool = False

    def of(self, kind: str) -> list[Site]:
        """The sites of one kind."""
        return [site for site in self.sites if site.kind == kind]

    def all_wide(self, kind: str) -> bool:
        """Whether there are such sites and every one computes in float32 or more."""
        found = self.of(kind)
        return bool(found) and all(site.width is Width.WIDE for site in found)

    def first_narrow(self, kind: str) -> Site | None:
        """The first site that computes in the dtype it is given, or in a narrower one."""
        return next((s for s in self.of(kind) if s.width in (Width.GIVEN, Width.NARROW)), None)


def narrower_code(golden: Contract, candidate: Contract, pairing: Pairing) -> Iterator[LintFinding]:
    """Findings for candidate modules whose code lacks a float32 that the source's has, or casts to 16 bits.

    Modules made of several sources, and those that run the source's very code, are not looked at. In float32 only
    casts matter.
    """
    assert candidate.module is not None and golden.module is not None, "code is read from modules alone"
    for pair in pairing.pairs:
        if len(pair.sources) != 1:
            continue
        mine, theirs = candidate.module.get_submodule(pair.module), golden.module.get_submodule(pair.sources[0])
        one, other = _function(mine), _function(theirs)
        if one is not None and other is not None and not _same_code(one, other):
            yield from _differences(pair.module, mine, theirs, candidate.compute, golden.compute)


def _differences(
    name: str, mine: nn.Module, theirs: nn.Module, compute: torch.dtype, recorded: torch.dtype
) -> Iterator[LintFinding]:
    facts, golden = code_facts(mine, compute), code_facts(theirs, recorded)
    if facts.unread or golden.unread:
        return
    narrow = precision(compute) > precision(torch.float32)
    for kind, contract in SITES.items():
        site = facts.first_narrow(kind)
        if narrow and site is not None and golden.all_wide(kind):
            yield _finding(contract, name, f"{kind} in line {site.line} of {facts.file}", compute)
    if is_router(name, type(theirs).__name__) and narrow:
        yield from _router(name, facts, golden, compute)
    if golden.of("cast"):
        return
    for site in facts.of("cast"):
        if site.width is Width.WIDE or site.width is None or not narrow:
            kind = _cast_kind(name, theirs, site)
            what = f"{site.target} is cast to 16 bits in line {site.line} of {facts.file}"
            yield LintFinding(kind, name, what, "no such cast", "16 bits", False, KINDS[kind])
            return


def _router(name: str, facts: CodeFacts, golden: CodeFacts, compute: torch.dtype) -> Iterator[LintFinding]:
    site = facts.first_narrow("linear")
    if site is not None and golden.all_wide("linear"):
        yield _finding("router-dtype", name, f"scores in line {site.line} of {facts.file}", compute)
        return
    site = facts.first_narrow("return")
    if site is not None and golden.all_wide("return"):
        yield _finding("router-dtype", name, f"scores returned in line {site.line} of {facts.file}", compute)


def _cast_kind(name: str, theirs: nn.Module, site: Site) -> str:
    if is_router(name, type(theirs).__name__):
        return "router-dtype"
    return "state-dtype" if "state" in site.target.replace("hidden_state", "") else "narrow-cast"


def _finding(kind: str, name: str, what: str, compute: torch.dtype) -> LintFinding:
    return LintFinding(kind, name, what, "float32", short(compute), False, KINDS[kind])


def code_facts(module: nn.Module, compute: torch.dtype) -> CodeFacts:
    """The sites of the code that `module`, of a model that computes in `compute`, runs when called."""
    stored = _stored_widths(module, compute)
    sites: list[Site] = []
    start = _function(module)
    waiting, seen = [(start, 0)], set()
    while waiting:
        function, depth = waiting.pop(0)
        if function is None or _code(function) in seen:
            continue
        seen.add(_code(function))
        tree = _tree(function)
        if tree is None:
            if depth == 0:
                return CodeFacts((), "", unread=True)
            continue
        first = _code(function).co_firstlineno - 1
        found = sites_of(tree, stored)
        sites += [Site(s.kind, s.line + first, s.width, s.target) for s in found if s.kind != "return" or depth == 0]
        if depth < DEPTH:
            waiting += [(called, depth + 1) for called in _called(function, module)]
    file = "" if start is None else _code(start).co_filename.rpartition("/")[2]
    return CodeFacts(tuple(sites), file)


def _stored_widths(module: nn.Module, compute: torch.dtype) -> Mapping[str, Width]:
    """What is stored in the model's own dtype is as wide as what the module is given, whatever that dtype is."""
    held: dict[str, Any] = {**module._parameters, **module._buffers}
    return {
        name: Width.WIDE if precision(tensor.dtype) < precision(compute) else Width.GIVEN
        for name, tensor in held.items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }


def _function(module: nn.Module) -> types.FunctionType | None:
    """The plain function behind `module.forward`, without its decorators; None for anything else."""
    forward: Any = module.forward
    forward = inspect.unwrap(getattr(forward, "__func__", forward))
    return forward if isinstance(forward, types.FunctionType) else None


def _code(function: Any) -> Any:
    return getattr(function, "__code__", None)


def _same_code(one: types.FunctionType, other: types.FunctionType) -> bool:
    """Whether two functions run the same code on the same globals' file."""
    return one.__code__ is other.__code__ and one.__globals__ is other.__globals__


def _called(function: types.FunctionType, module: nn.Module) -> Iterator[types.FunctionType]:
    """The functions of the same file that `function` names: globals, and methods of the module's class."""
    for name in function.__code__.co_names:
        found = function.__globals__.get(name)
        if found is None and isinstance(getattr(type(module), name, None), types.FunctionType):
            found = getattr(type(module), name)
        found = inspect.unwrap(found) if callable(found) and not inspect.isclass(found) else None
        if isinstance(found, types.FunctionType) and found.__code__.co_filename == function.__code__.co_filename:
            yield found


def _tree(function: types.FunctionType) -> ast.FunctionDef | None:
    try:
        text = textwrap.dedent(inspect.getsource(function))
        parsed = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        # Compiled, generated without its text, or a lambda inside an expression.
        return None
    return next((node for node in parsed.body if isinstance(node, ast.FunctionDef)), None)
