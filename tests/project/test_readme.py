# SPDX-License-Identifier: Apache-2.0
"""The README's program runs as printed, and the README names the two commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_first_program_runs_as_printed(readme: str, tmp_path: Path):
    """In a process of its own: a reader has none of this suite's settings."""
    block = re.search(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert block, "README.md has no ```python block"
    program = block.group(1)
    lines = [line for line in program.splitlines() if line.strip()]
    assert "import tether" in program and len(lines) <= 20, f"the first program has {len(lines)} lines"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_command_is_named(readme: str, command: str):
    assert command in readme
