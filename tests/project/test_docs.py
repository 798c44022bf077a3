# SPDX-License-Identifier: Apache-2.0
"""Every program in the docs and the README runs, and prints what the page says it prints.

The ```python blocks of a page run from top to bottom in one namespace, as a reader would type them. A ```text block
right after one holds what it prints: its output, then each warning and the exception that it raised as
``Name: message``. A block without a ```text block must print, warn and raise nothing. To see what a page prints
(and write it there after having read it): ``python tests/project/test_docs.py docs/errors.md``.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

import tether
from tether import errors, nn

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DECIMAL = re.compile(r"-?\d+\.\d+")  # what training reached differs a little from processor to processor
BASES = {"TetherError", "TetherWarning"}


@dataclass(frozen=True)
class Block:
    """A program of a page: the line that it begins at, its code, and what the page says it prints, if it says."""

    line: int
    code: str
    printed: str | None


def blocks(text: str) -> list[Block]:
    fences = list(FENCE.finditer(text))
    found = []
    for fence, after in itertools.zip_longest(fences, fences[1:]):
        if fence[1] == "python":
            follows = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
            found.append(Block(text.count("\n", 0, fence.start(2)) + 1, fence[2], after[2] if follows else None))
    return found


def name_and_message(raised: Warning | BaseException) -> str:
    return f"{type(raised).__name__}: {raised}\n"


def run(block: Block, namespace: dict[str, object]) -> str:
    """Runs a block and gives back what it printed, warned and raised."""
    output, raised = io.StringIO(), ""
    code = compile(block.code, "program.py", "exec")  # a name for messages that say where something was made
    with contextlib.redirect_stdout(output), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(code, namespace)
        except Exception as error:
            raised = name_and_message(error)
    return output.getvalue() + "".join(name_and_message(warning.message) for warning in caught) + raised


def words_and_numbers(text: str) -> tuple[list[str], list[float]]:
    return DECIMAL.sub("#", text.rstrip()).splitlines(), [float(number) for number in DECIMAL.findall(text)]


def is_as_said(printed: str, block: Block) -> bool:
    """Whether words and whole numbers are as the page has them, and decimals within two percent."""
    words, numbers = words_and_numbers(printed)
    said_words, said_numbers = words_and_numbers(block.printed or "")
    return words == said_words and numbers == pytest.approx(said_numbers, rel=0.02, abs=0.02)


def outputs(page: Path) -> list[tuple[Block, str]]:
    namespace: dict[str, object] = {"__name__": "a_page_of_the_docs"}
    # A reader has none of the suite's strict settings.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return [(block, run(block, namespace)) for block in blocks(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_prints_what_it_says(page: Path):
    for block, printed in outputs(page):
        where = f"{page.relative_to(ROOT)}, line {block.line}"
        assert is_as_said(printed, block), f"{where} printed:\n{printed}\nand should:\n{block.printed or 'nothing'}"


def test_output_belongs_to_the_program_right_before_it():
    page = "```python\nprint(1)\n```\n\n```text\n1\n```\nand\n```python\nx = 2\n```\nwords\n```text\nno output\n```\n"
    assert blocks(page) == [Block(2, "print(1)\n", "1\n"), Block(10, "x = 2\n", None)]


def test_warnings_and_errors_count_as_output():
    code = "import warnings\nprint(1)\nwarnings.warn('w')\nraise ValueError('v')\n"
    assert run(Block(1, code, None), {}) == "1\nUserWarning: w\nValueError: v\n"


def test_other_output_is_not_as_said():
    said = Block(1, "", "2 rows: 0.93\n")
    assert is_as_said("2 rows: 0.94\n", said)
    for printed in (
        "2 rows: 0.83\n",
        "3 rows: 0.93\n",
        "2 columns: 0.93\n",
        "2 rows\n",
        "",
        "2 rows: 0.93\nUserWarning: w\n",
    ):
        assert not is_as_said(printed, said)
    assert is_as_said("", Block(1, "", None)) and not is_as_said("1\n", Block(1, "", None))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)#]+)", FENCE.sub("", page.read_text(encoding="utf-8")))
    lost = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not lost, f"{page.name} links to {lost}"


@pytest.mark.parametrize("name", nn.__all__)
def test_layer_is_listed(name: str):
    page = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    assert f"`{name}`" in page or f"`nn.{name}`" in page, f"docs/layers.md does not list {name}"


def documented(text: str) -> dict[str, str]:
    """The sections of the page of errors, by the class that they are about."""
    parts = re.split(r"^## (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


CLASSES = [name for name in errors.__all__ if isinstance(getattr(errors, name), type) and name not in BASES]


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    return documented((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CLASSES)
def test_error_class_has_its_section(name: str, sections: dict[str, str]):
    assert name in sections, f"docs/errors.md has no section '## {name}'"
    programs = blocks(sections[name])
    failing = [block for block in programs if f"{name}: " in (block.printed or "")]
    assert failing, f"no program of the section ends in a {name}"
    assert programs[-1] is not failing[-1], "the repaired program is missing"


def test_every_section_is_about_a_class(sections: dict[str, str]):
    assert set(sections) <= set(errors.__all__)


if __name__ == "__main__":
    tether.seed(0)
    for block, printed in outputs(Path(sys.argv[1]).resolve()):
        verdict = "as the page says" if is_as_said(printed, block) else "NOT as the page says"
        print(f"--- line {block.line}: {verdict}\n{printed}", end="")
