# SPDX-License-Identifier: Apache-2.0
"""The sources follow the rules of tools/project_rules.py, and each rule catches what it is for."""

from __future__ import annotations

import project_rules
import pytest
from project_rules import RULES, SPDX, Source


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: project_rules.Rule):
    found = [f"{source.path}:{line}: {text}" for source in project_rules.sources() for line, text in rule(source)]
    assert not found, "\n".join(found)


def test_core_is_small():
    assert not project_rules.core_is_small(project_rules.sources())


def test_exemptions_are_needed():
    by_path = {source.path: source for source in project_rules.sources()}
    for path, name in project_rules.TRANSFORM_EXEMPTIONS:
        assert path in by_path and name.rpartition(".")[2] in by_path[path].text, f"{path} no longer uses {name}"


def found_in(code: str, path: str = "tether/nn/linear.py") -> list[str]:
    return [
        text.split(":")[0] for text in (text for rule in RULES for _, text in rule(Source(path, f"{SPDX}\n{code}\n")))
    ]


@pytest.mark.parametrize(
    "code",
    [
        "import jax\njax.jit(f)",
        "import jax\n@jax.jit\ndef f(x): return x",
        "import jax\nfrom functools import partial\npartial(jax.vmap, in_axes=1)",
        "import jax as j\nj.grad(f)",
        "import jax\njax.lax.scan(f, 0, None)",
        "from jax import lax\nlax.cond(p, f, g)",
        "from jax import lax as l\nl.while_loop(c, f, 0)",
        "from jax.lax import scan\nscan(f, 0, None)",
        "import jax.lax as lax\nlax.map(f, x)",
        "from jax import checkpoint as save\nsave(f)",
        "def g():\n    import jax\n    return jax.eval_shape(f)",
    ],
)
def test_transform_outside_its_folder_is_found(code: str):
    assert len(found_in(code)) == 1
    assert found_in(code, "tether/_transforms/_jit.py") == []
    assert found_in(code, "tests/nn/test_linear.py") == []


@pytest.mark.parametrize(
    "code",
    [
        "import jax\njax.lax.conv_general_dilated(x, w)",
        "from tether._transforms import jit\njit(f)",
        "import re\nre.map(f)",
        "def grad(f): return f\ngrad(1)",
        "self.scan(f)",
    ],
)
def test_other_names_are_no_transforms(code: str):
    assert found_in(code) == []


@pytest.mark.parametrize("code", ["import jax._src.core", "from jax._src import core", "# see jax._src.core"])
def test_private_jax_is_found(code: str):
    assert found_in(code) and found_in(code, "benchmarks/step.py")


def test_assert_is_found_in_the_library_only():
    assert len(found_in("def f(x):\n    assert x")) == 1
    assert found_in("def f(x):\n    assert x", "tests/nn/test_linear.py") == []


@pytest.mark.parametrize(
    "code",
    [
        "import tether",
        "import tether.errors",
        "from tether import Module",
        "from .. import Module",
        "import tether as t",
    ],
)
def test_root_import_is_found(code: str):
    assert len(found_in(code)) == 1
    assert found_in(code, "tests/nn/test_linear.py") == []


@pytest.mark.parametrize(
    "code",
    [
        "from tether import errors",
        "from tether.errors import ShapeError",
        "from . import conv",
        "from .conv import Conv",
    ],
)
def test_import_from_a_folder_is_right(code: str):
    assert found_in(code) == []


def test_licence_line_and_length():
    complaints = [text for rule in RULES for _, text in rule(Source("tools/long.py", "x = 1\n" * 501))]
    assert [text.split()[0] for text in complaints] == ["the", "501"]
    assert not list(project_rules.spdx_line_first(Source("tools/run.py", f"#!/usr/bin/env python3\n{SPDX}\n")))


def test_code_lines_leave_out_comments_and_docstrings():
    text = '"""Says what.\n\nMore.\n"""\n\n# Why.\nx = [\n    1,  # one\n]\n\n\n'
    text += 'def f():\n    """Does."""\n    return """a\n    b"""\n'
    assert project_rules.code_lines(Source("tether/_core/x.py", text)) == 6
