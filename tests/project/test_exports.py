# SPDX-License-Identifier: Apache-2.0
"""Every public name exists, and says what it is."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def public_packages() -> list[str]:
    """The root, and each folder or file right below it that users may import from."""
    below = (file for file in sorted((ROOT / "tether").iterdir()) if not file.name.startswith(("_", ".")))
    names = [file.stem for file in below if file.suffix == ".py" or (file / "__init__.py").exists()]
    return ["tether", *(f"tether.{name}" for name in names)]


def undocumented(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        if not vars(value).get("__doc__"):
            yield name
        for member, attribute in vars(value).items():
            method = isinstance(attribute, property | classmethod | staticmethod) or inspect.isfunction(attribute)
            if method and not member.startswith("_") and not inspect.getdoc(getattr(value, member)):
                yield f"{name}.{member}"
    elif (callable(value) or isinstance(value, ModuleType)) and not inspect.getdoc(value):
        yield name


def public_names(module: ModuleType) -> list[str]:
    """What ``__all__`` says; without one, each name that the module binds, as in ``from ... import jit as jit``."""
    return getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]


@pytest.mark.parametrize("package", public_packages())
class TestPackage:
    def test_names_exist_once(self, package: str):
        module = importlib.import_module(package)
        names = public_names(module)
        assert len(names) == len(set(names)), f"{package}.__all__ says a name twice"
        missing = [name for name in names if not hasattr(module, name)]
        assert not missing, f"{package}.__all__ names what {package} does not have: {missing}"

    def test_names_are_documented(self, package: str):
        module = importlib.import_module(package)
        values = {f"{package}.{name}": getattr(module, name) for name in public_names(module)}
        missing = [text for name, value in values.items() for text in undocumented(name, value)]
        assert not missing, f"no docstring: {missing}"

    def test_nothing_public_is_left_out(self, package: str):
        module = importlib.import_module(package)
        public = {name for name, value in vars(module).items() if not name.startswith("_") and _is_of(value, package)}
        left_out = public - set(public_names(module))
        assert not left_out, f"{package}.__all__ lacks {sorted(left_out)}"


def _is_of(value: Any, package: str) -> bool:
    """A class or function that is defined in the package; subpackages don't count, the import system binds them."""
    return (inspect.isclass(value) or inspect.isfunction(value)) and f"{value.__module__}.".startswith(f"{package}.")


def test_undocumented_finds_what_it_is_for():
    class Bare:
        def method(self):
            pass

        def _private(self):
            pass

    class Child(Bare):
        """Says what it is."""

        @property
        def size(self):
            return 1

    assert list(undocumented("Bare", Bare)) == ["Bare", "Bare.method"]
    assert list(undocumented("Child", Child)) == ["Child.size"]
    assert list(undocumented("f", lambda: None)) == ["f"]
