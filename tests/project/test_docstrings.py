# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings run, and print what they say they print."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Parser(doctest.DocTestParser):
    """Ends an example where the next section begins, because our sections have no blank lines between them."""

    def parse(self, string: str, name: str = "<string>") -> list[str | doctest.Example]:
        return super().parse(re.sub(r"^ *[A-Z]\w+:$", "", string, flags=re.MULTILINE), name)


def modules() -> list[str]:
    files = sorted((ROOT / "tether").rglob("*.py"))
    return [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]


@pytest.mark.parametrize("name", modules())
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    module, tether = importlib.import_module(name), importlib.import_module("tether")
    given = {
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "optax": optax,
        "tether": tether,
        "__name__": "example",  # not the library's own name: discovery doesn't walk into libraries
        "objax": importlib.import_module("tether.compat.objax"),
        "eqx": importlib.import_module("tether.compat.equinox"),
        "nn": importlib.import_module("tether.nn"),
    }
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for example in doctest.DocTestFinder(parser=Parser()).find(module, name, globs=vars(module) | given):
        tether.seed(0)
        runner.run(example, out=printed.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(printed)


def test_example_ends_at_the_next_section():
    text = """Says.

    Example:
        >>> 1 + 1
        2
    References:
        Somebody.
    """
    (example,) = Parser().get_examples(text)
    assert (example.source, example.want, example.lineno) == ("1 + 1\n", "2\n", 3)
