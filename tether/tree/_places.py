# SPDX-License-Identifier: Apache-2.0
"""Where the modules in a module lie: a shared one lies in several places, of which the first one counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tether._modules import Module
from tether._modules.module import survey

__all__ = ["Places"]


class Places(NamedTuple):
    """The modules in a module by path, itself under "".

    Attributes:
        modules: Every path of every module, in the order of the walk.
        first: The path that counts, by the id of the module.
    """

    modules: Mapping[str, Module]
    first: Mapping[int, str]

    @classmethod
    def of(cls, module: Module) -> Places:
        """The places in a finished module."""
        walk = survey(module)
        return cls(walk.module_places, {key: path for key, (path, _) in walk.modules.items()})

    def owner(self, place: str) -> str:
        """Path of the innermost module around a path."""
        cuts = (i for i in range(len(place) - 1, 0, -1) if place[i] in ".[")
        return next((place[:i] for i in cuts if place[:i] in self.modules), "")

    def first_of(self, path: str) -> str:
        """The first path of the module at a path."""
        return self.first[id(self.modules[path])]

    def is_first(self, path: str) -> bool:
        """Whether the module at a path counts there."""
        return self.first_of(path) == path

    def first_modules(self) -> dict[str, Module]:
        """Every module once, by the path that counts."""
        return {path: part for path, part in self.modules.items() if self.is_first(path)}

    def all_of(self, path: str) -> list[str]:
        """Every path of the module at a path, those inside of another shared module left out."""
        part = self.modules[path]
        return [place for place, other in self.modules.items() if other is part and self.is_first(self.owner(place))]
