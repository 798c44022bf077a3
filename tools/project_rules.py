# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that no linter knows, read off the syntax trees.

Each rule takes one parsed file and yields what is wrong with it; `main` prints all of it with
file and line. Run by tools/check, and by tests/project/test_sources.py, which also shows that
each rule catches what it is for.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tether", "tests", "tools", "benchmarks", "examples")
SPDX = "# SPDX-License-Identifier: Apache-2.0"
FILE_LINES = 500
CORE_CODE_LINES = 1000
OWNER = "import from the folder that owns the name"

TRANSFORMS = {
    f"jax.{name}"
    for name in (
        *(
            "checkpoint",
            "closure_convert",
            "custom_gradient",
            "custom_jvp",
            "custom_vjp",
            "eval_shape",
            "grad",
            "hessian",
        ),
        *("jacfwd", "jacobian", "jacrev", "jit", "jvp", "linear_transpose", "linearize", "make_jaxpr", "pmap", "remat"),
        *("shard_map", "value_and_grad", "vjp", "vmap", "ad_checkpoint.checkpoint", "experimental.shard_map.shard_map"),
        *("lax.associative_scan", "lax.cond", "lax.custom_linear_solve", "lax.custom_root", "lax.fori_loop", "lax.map"),
        *("lax.scan", "lax.switch", "lax.while_loop"),
    )
}
# The one folder that calls JAX's transformations, and the places outside it that must, each with its reason.
TRANSFORMS_HOME = "tether/_transforms/"
TRANSFORM_EXEMPTIONS = {
    (
        "tether/nn/_batchnorm.py",
        "jax.jit",
    ): "functions of arrays alone, jitted as jnp's own are: one dispatch, one trace",
    ("tether/random/_streams.py", "jax.vmap"): "of JAX's functions of one key, for stacks of keys",
}
# What Equinox's filtered transformations are: JAX's own, of the arrays (docs/design/004-homes.md says why).
TRANSFORM_EXEMPTIONS |= {
    (f"tether/compat/equinox/{file}.py", f"jax.{name}"): "the home of filter_" + name
    for file, names in {
        "custom": "custom_jvp custom_vjp",
        "eval_shape": "eval_shape",
        "grad": "jvp value_and_grad vjp",
        "jit": "jit",
        "make_jaxpr": "make_jaxpr",
        "vmap_pmap": "eval_shape pmap vmap",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the root of the repository, with slashes, and its text."""

    path: str
    text: str

    @property
    def library(self) -> bool:
        return self.path.startswith("tether/")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)


Complaint = tuple[int, str]
Rule = Callable[[Source], Iterator[Complaint]]


def spdx_line_first(source: Source) -> Iterator[Complaint]:
    lines = source.text.splitlines()
    if lines and lines[0].startswith("#!"):
        lines = lines[1:]
    if not lines or lines[0] != SPDX:
        yield 1, f"the first line is not '{SPDX}'"


def file_is_short(source: Source) -> Iterator[Complaint]:
    lines = source.text.count("\n")
    if lines > FILE_LINES:
        yield lines, f"{lines} lines, over {FILE_LINES}: split it by idea"


def no_private_jax(source: Source) -> Iterator[Complaint]:
    if source.path == "tools/project_rules.py" or source.path.startswith("tests/project/"):
        return
    for number, line in enumerate(source.text.splitlines(), 1):
        if "jax._src" in line:
            yield number, "jax._src: private to JAX, changes without notice"


def no_assert(source: Source) -> Iterator[Complaint]:
    for node in ast.walk(source.tree):
        if source.library and isinstance(node, ast.Assert):
            yield node.lineno, "assert: raise an error of tether.errors, with path, got, expected and fix"


def no_root_import(source: Source) -> Iterator[Complaint]:
    """Inside the library names come from the folder that owns them: through the root, the layers would be a cycle."""
    if not source.library or source.path == "tether/__init__.py":
        return
    folders = {path.stem for path in (ROOT / "tether").iterdir()}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "tether" or (alias.name.startswith("tether.") and alias.asname is None):
                    yield node.lineno, f"'import {alias.name}' binds the package root: {OWNER}"
        elif isinstance(node, ast.ImportFrom) and _absolute_module(node, source.path) == "tether":
            for alias in node.names:
                if alias.name not in folders:
                    yield node.lineno, f"{alias.name} comes from the package root: {OWNER}"


def transforms_stay_home(source: Source) -> Iterator[Complaint]:
    if not source.library or source.path.startswith(TRANSFORMS_HOME):
        return
    names = _bound_names(source.tree)
    asked = {id(part) for node in ast.walk(source.tree) if _asks_for_a_class(node) for part in ast.walk(node)}
    for node in ast.walk(source.tree):
        name = _dotted(node, names)
        if name in TRANSFORMS and id(node) not in asked and (source.path, name) not in TRANSFORM_EXEMPTIONS:
            yield (
                node.lineno,
                f"{name} outside {TRANSFORMS_HOME}: use Tether's, or give a reason in TRANSFORM_EXEMPTIONS",
            )


def _asks_for_a_class(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"


def _absolute_module(node: ast.ImportFrom, path: str) -> str:
    if node.level == 0:
        return node.module or ""
    package = path.split("/")[: -node.level]
    return ".".join(package + ([node.module] if node.module else []))


def _bound_names(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for: ``{"lax": "jax.lax", "scan": "jax.lax.scan"}``."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or bound] = bound
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return owner and f"{owner}.{node.attr}"
    return None


RULES: tuple[Rule, ...] = (
    spdx_line_first,
    file_is_short,
    no_private_jax,
    no_assert,
    no_root_import,
    transforms_stay_home,
)


def code_lines(source: Source) -> int:
    """Counts the lines that hold code: no blank lines, comments or docstrings."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def core_is_small(sources: list[Source]) -> list[str]:
    total = sum(code_lines(source) for source in sources if source.path.startswith("tether/_core/"))
    return [f"tether/_core: {total} lines of code, over {CORE_CODE_LINES}"] if total > CORE_CODE_LINES else []


def sources() -> list[Source]:
    """Every Python file of the project, in order."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return [Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files]


def complaints(files: list[Source]) -> list[str]:
    """What is wrong with these files, one line each."""
    return [f"{file.path}:{line}: {text}" for file in files for rule in RULES for line, text in rule(file)]


def main() -> int:
    files = sources()
    found = complaints(files) + core_is_small(files)
    print("\n".join(found) or f"{len(files)} files follow the rules")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
