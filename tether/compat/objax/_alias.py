# SPDX-License-Identifier: Apache-2.0
"""Makes ``import objax`` mean this package.

| Objax | here | what differs |
| --- | --- | --- |
| the package ``objax`` | the very modules of this package, under that name | |
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = __name__.removesuffix("._alias")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``objax.x`` as the module x of this package."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "objax":
            return None
        own = _PACKAGE + fullname.removeprefix("objax")
        return importlib.util.spec_from_loader(fullname, _Loader(own)) if importlib.util.find_spec(own) else None


class _Loader(importlib.abc.Loader):
    """Gives a module that exists already, or is imported under its own name."""

    def __init__(self, own: str):
        self._own = own
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import has just replaced


def install() -> None:
    """From now on ``import objax``, and whatever is in it, gives the modules of this package."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
