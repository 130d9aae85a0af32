"""What can be put back in a candidate: the reference in place of a kernel, the source's module in place of a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.calls import SourceGroup
from porter.alignment.pairing import CONTAINERS
from porter.correspondence import Correspondence
from porter.kernels.dispatch import op_calls


class Replacements:
    """The kernels and modules of `candidate` that have something to be replaced by.

    `source` is the source model, in the precision that it is to run in.
    """

    def __init__(self, candidate: nn.Module, source: nn.Module, correspondence: Correspondence) -> None:
        self._candidate = candidate
        self._source = source
        self._correspondence = correspondence
        self._known = {name for name, _ in source.named_modules()}
        self._calls = dict(op_calls(candidate))

    def ops(self) -> dict[str, list[str]]:
        """Places of each Op ("name/variant") that has a kernel."""
        found: dict[str, list[str]] = {}
        for site, call in self._calls.items():
            if call.preferred() != "reference":
                found.setdefault(self.op_of(site), []).append(site)
        return found

    def op_of(self, site: str) -> str:
        """The Op called at a place."""
        return f"{self._calls[site].name}/{self._calls[site].variant}"

    def provider_of(self, site: str) -> str:
        """Whose kernel serves a place."""
        return str(self._calls[site].preferred())

    def sites_within(self, module: str) -> list[str]:
        """Places of kernels inside a module."""
        return [site for sites in self.ops().values() for site in sites if site.startswith(f"{module}.")]

    def children(self, module: str) -> list[str]:
        """The nearest modules below `module` ("" is the root) that the source has too."""
        found = []
        for name, child in self._candidate.get_submodule(module).named_children():
            path = f"{module}.{name}" if module else name
            replaceable = not isinstance(child, CONTAINERS) and self._has_source(path)
            found += [path] if replaceable else self.children(path)
        return found

    def without_source(self) -> list[str]:
        """Modules that cannot be put back, because the source has none of that name."""
        names = [name for name, module in self._candidate.named_modules() if not isinstance(module, CONTAINERS)]
        return [name for name in names if name and not self._has_source(name)]

    def source_names(self, module: str) -> tuple[str, ...]:
        """The source's modules that make up a module of the candidate."""
        return self._correspondence.source_of(module)

    def _has_source(self, module: str) -> bool:
        return all(source in self._known for source in self.source_names(module))

    @contextmanager
    def put_back(self, sites: Iterable[str], modules: Iterable[str]) -> Iterator[None]:
        """The candidate with the reference at these places and the source's modules under these names."""
        forced = [(self._calls[site], self._calls[site].force_reference(True)) for site in sites]
        swapped: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for name in modules:
                path, _, leaf = name.rpartition(".")
                parent = self._candidate.get_submodule(path)
                swapped.append((parent, leaf, parent.get_submodule(leaf)))
                parent._modules[leaf] = self._replacement(name, swapped[-1][2])
            yield
        finally:
            for parent, leaf, module in reversed(swapped):
                parent._modules[leaf] = module
            for call, before in forced:
                call.force_reference(before)

    def _replacement(self, name: str, module: nn.Module) -> nn.Module:
        sources = self.source_names(name)
        if len(sources) > 1:
            return SourceGroup({s.rpartition(".")[2]: self._source.get_submodule(s) for s in sources})
        source = self._source.get_submodule(sources[0])
        adds = any("." not in site and call.name == "add_rms_norm" for site, call in op_calls(module))
        return AddThenNorm(source) if adds else source


class AddThenNorm(nn.Module):
    """The source's norm where the candidate's takes the residual too: (norm(x + residual), x + residual)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        """The norm of [..., H], alone without `residual`."""
        if residual is None:
            return self.norm(hidden_states)
        total = torch.add(hidden_states, residual)
        return self.norm(total), total
