# SPDX-License-Identifier: Apache-2.0
"""Every module of the library has its test file, where one expects it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Modules that are tested by a folder, or through the module that they help.
ELSEWHERE = {
    "tether/errors.py": "tests/errors",
    "tether/compat/_alias.py": "tests/compat/objax/test_main.py",
    "tether/compat/_program.py": "tests/compat/objax/test_main.py",
    "tether/compat/equinox/__main__.py": "tests/compat/equinox/test_main.py",
    "tether/compat/equinox/_errors.py": "tests/compat/equinox/test_module.py",
}
# Objax's modules are many and small.
ELSEWHERE |= {
    f"tether/compat/objax/{module}": f"tests/compat/objax/{tests}"
    for module, tests in {
        "__main__.py": "test_main.py",
        "_check.py": "test_variable.py",
        "_devices.py": "test_parallel.py",
        "_errors.py": "test_variable.py",
        "constants.py": "util/test_small.py",
        "functional/core/_inputs.py": "functional/core",
        "module.py": "test_objects.py",
        "optimizer/_gradients.py": "optimizer/test_optimizers.py",
        "optimizer/adam.py": "optimizer/test_optimizers.py",
        "optimizer/lars.py": "optimizer/test_optimizers.py",
        "optimizer/momentum.py": "optimizer/test_optimizers.py",
        "optimizer/sgd.py": "optimizer/test_optimizers.py",
        "typing.py": "test_gradient.py",
        "util/check.py": "test_variable.py",
        "util/util.py": "util/test_small.py",
        "zoo/convnet.py": "zoo/test_small.py",
        "zoo/dnnet.py": "zoo/test_small.py",
        "zoo/rnn.py": "zoo/test_small.py",
    }.items()
}


def mirror(module: str) -> str:
    """``tether/_transforms/_jit.py`` -> ``tests/transforms/test_jit.py``."""
    *folders, name = (part.lstrip("_") for part in module.split("/")[1:])
    return "/".join(["tests", *folders, f"test_{name}"])


def modules() -> list[str]:
    files = (file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "tether").rglob("*.py")))
    return [file for file in files if not file.endswith("/__init__.py")]


def test_mirror_drops_underscores():
    assert mirror("tether/_core/frame.py") == "tests/core/test_frame.py"
    assert mirror("tether/_transforms/_jit.py") == "tests/transforms/test_jit.py"
    assert mirror("tether/errors.py") == "tests/test_errors.py"


@pytest.mark.parametrize("module", modules())
def test_module_has_tests(module: str):
    expected = ELSEWHERE.get(module, mirror(module))
    assert (ROOT / expected).exists(), f"{module} has no tests: write {expected}"


def test_two_modules_never_share_a_test_file():
    mirrors = [mirror(module) for module in modules()]
    assert len(mirrors) == len(set(mirrors))


@pytest.mark.parametrize("module", ELSEWHERE)
def test_exemption_is_still_needed(module: str):
    assert (ROOT / module).exists(), f"{module} is gone: take it out of ELSEWHERE"
    assert not (ROOT / mirror(module)).exists(), f"{mirror(module)} exists: take {module} out of ELSEWHERE"
