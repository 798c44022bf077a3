# SPDX-License-Identifier: Apache-2.0
"""Packages that the library doesn't need."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from tether import errors
from tether.interop._packages import package


def test_gives_the_package():
    assert package("math", "a test") is math


def test_message_for_a_package_that_is_not_there():
    with pytest.raises(errors.ArgumentError) as error:
        package("no_such_package.numpy", "interop.torch.load")
    assert str(error.value) == (
        "interop.torch.load: the package no_such_package is not installed.\n"
        "  got:      no module 'no_such_package'\n"
        "  expected: no_such_package, which Tether itself doesn't need\n"
        "  fix:      pip install no_such_package"
    )


def test_package_that_lacks_one_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        package("half_installed", "a test")


def test_importing_the_library_imports_none_of_them():
    program = "import sys, tether.interop, tether.zoo; print({'torch', 'safetensors', 'equinox'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
