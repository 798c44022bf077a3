# SPDX-License-Identifier: Apache-2.0
"""`make demo`, run as a user runs it: what it reaches, what it prints, what it writes, what it says when it can't."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the demo's data come with scikit-learn")
pytest.importorskip("matplotlib", reason="the demo draws its curves with matplotlib")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "digits" / "train.py"
PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run with its defaults, as `make demo` has them, but for the folder."""
    folder = tmp_path_factory.mktemp("runs")
    result = run("--out", str(folder))
    assert result.returncode == 0, result.stderr
    return result, folder


def test_reaches_98_percent(demo):
    [accuracy] = re.findall(r"held-out accuracy (\S+) after", demo[0].stdout)
    assert float(accuracy) >= 0.98


def test_step_is_compiled_once(demo):
    assert re.search(r"^step compiled 1 time\(s\), evaluate 2 ", demo[0].stdout, re.MULTILINE)


def test_prints_a_row_for_each_epoch(demo):
    rows = re.findall(r"^ +(\d+) +(\d+\.\d{4}) +(\d\.\d{4}) +(\d+\.\d{4}) +(\d\.\d{4})$", demo[0].stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1)) and len(rows) > 5
    losses = [float(row[1]) for row in rows]
    assert losses[-1] < losses[0] / 10
    accuracies = [float(number) for row in rows for number in row[2::2]]
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)


def test_piped_output_is_plain(demo):
    """No bar, no color, no cursor movement in a file."""
    assert "\x1b" not in demo[0].stdout and "\r" not in demo[0].stdout
    assert demo[0].stderr == ""


def test_draws_learning_curves(demo):
    result, folder = demo
    picture = folder / "curves.png"
    assert str(picture) in result.stdout
    assert picture.read_bytes().startswith(PNG) and picture.stat().st_size > 10_000


@pytest.mark.parametrize(("module", "package"), [("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")])
def test_missing_package_is_named_with_the_remedy(module: str, package: str, tmp_path: Path):
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('No module', name={module!r})\n")
    result = run(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert result.returncode == 1
    assert f"The demo needs {package}, which is not installed: No module" in result.stderr
    assert "\n  fix:      python -m pip install scikit-learn matplotlib " in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_option_is_refused():
    result = run("--batch", "1438")
    assert result.returncode == 2 and "--batch lies between 2 and 1437" in result.stderr
    assert "Traceback" not in result.stderr
