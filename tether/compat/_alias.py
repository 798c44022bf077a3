# SPDX-License-Identifier: Apache-2.0
"""Makes the import of a library that has a home here mean its home."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``library.x`` as the module x of the home."""

    def __init__(self, library: str, home: str):
        self._library, self._home = library, home

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._library:
            return None
        own = self._home + fullname.removeprefix(self._library)
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


def install(library: str, home: str) -> None:
    """From now on ``import library``, and whatever is in it, gives the modules of the package ``home``."""
    sys.meta_path.insert(0, _Finder(library, home))
