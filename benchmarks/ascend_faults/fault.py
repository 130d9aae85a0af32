"""A fault: a small edit of the text of an export, and what must be said of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

KERNELS = "porter_kernels_ascend_"


@dataclass(frozen=True)
class Place:
    """An export that faults are planted in: a shipped model in a scheme; `tokens` are drawn after the prompt."""

    model: str
    scheme: str = "bf16"
    tokens: int = 3
    prompt: str = "Once upon a time"

    @property
    def name(self) -> str:
        """A name for folders."""
        return f"{self.model}-{self.scheme}"


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new` in one file of the export, named by the start of its name; `old` stands there once."""

    file: str
    old: str
    new: str

    def plant(self, directory: Path) -> None:
        """Change the file, which becomes one of its own. Raises LookupError where the text is not there once."""
        files = [f for f in sorted(directory.iterdir()) if f.name.startswith(self.file)]
        if not files:
            raise LookupError(f"{directory} has no file {self.file}*")
        text = files[0].read_text()
        if text.count(self.old) != 1:
            raise LookupError(
                f"{files[0].name}: {text.count(self.old)} times {self.old!r}, which must stand there once"
            )
        files[0].unlink()
        files[0].write_text(text.replace(self.old, self.new))


def kernel(file: str, old: str, new: str) -> Edit:
    """An edit of an exported Ascend kernel."""
    return Edit(f"{KERNELS}{file}.py", old, new)


def modeling(old: str, new: str) -> Edit:
    """An edit of the exported modelling file."""
    return Edit("modeling_", old, new)


@dataclass(frozen=True)
class Refused:
    """The catalogue refuses: its words contain each of `words`."""

    words: tuple[str, ...]

    def met(self, text: str) -> bool:
        """Whether a refusal says so."""
        return all(word in text for word in self.words)


@dataclass(frozen=True)
class Found:
    """Alignment finds the first drift in a module that `module` matches, one of whose causes is of `kinds`."""

    module: str
    kinds: tuple[str, ...]

    def met(self, module: str, kinds: list[str]) -> bool:
        """Whether a report says so: module of the first drift, and the kinds of causes there."""
        return re.search(self.module, module) is not None and bool(set(self.kinds) & set(kinds))


@dataclass(frozen=True)
class Linted:
    """`porter adapt --check` says so: too small for the numbers to show, it contradicts the config."""

    rule: str


@dataclass(frozen=True)
class Fault:
    """`trap` is the vendor's trap in words; the edits plant it in the export of `place`."""

    id: str
    trap: str
    place: Place
    edits: tuple[Edit, ...]
    expected: Refused | Found | Linted
    modules: str | None = None
    """What is aligned, where the whole model would only take longer."""
