# SPDX-License-Identifier: Apache-2.0
"""Programs run as their users would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *arguments: str) -> str:
    """What a program under examples/ prints; it may not fail, or write to stderr."""
    command = [sys.executable, "-W", "error::UserWarning", str(ROOT / "examples" / program), *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    return result.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]
