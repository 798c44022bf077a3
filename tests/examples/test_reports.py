# SPDX-License-Identifier: Apache-2.0
"""The reports that started the project, run as a user runs them, print what is stored beside them.

Each program compares its numbers with hand-written JAX and NumPy, and exits with an error where they differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "examples" / "reports").glob("*.py"))
NUMBER = re.compile(r"-?\d+\.\d+")


def words_and_numbers(text: str) -> tuple[list[str], list[float]]:
    return NUMBER.sub("#", text).splitlines(), [float(number) for number in NUMBER.findall(text)]


def test_both_reports_are_here():
    assert [program.stem for program in PROGRAMS] == ["a_structure_that_stays", "gradient_taken_twice"]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_report_prints_what_is_stored(program: Path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-W", "error", str(program)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    words, numbers = words_and_numbers(result.stdout)
    stored_words, stored_numbers = words_and_numbers(program.with_suffix(".txt").read_text(encoding="utf-8"))
    assert words == stored_words
    # The last digit printed may differ from processor to processor.
    assert numbers == pytest.approx(stored_numbers, abs=0.011)
    assert result.stderr == ""
