# SPDX-License-Identifier: Apache-2.0
"""The pinned files hold names and versions, no address of any registry, and agree with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
PIN = re.compile(r"([A-Za-z0-9][\w.-]*)==([\w.]+)")


def pins(file: Path) -> dict[str, str]:
    found = [PIN.fullmatch(line) for line in file.read_text().splitlines()]
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_lines_are_pins(file: Path):
    assert [line for line in file.read_text().splitlines() if not PIN.fullmatch(line)] == []


def test_every_requirement_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {
        re.split(r"[\[<>=]", line)[0]: line for lines in (project["dependencies"], *extras.values()) for line in lines
    }
    tools = pins(ROOT / "requirements/tools.txt")
    for lane in ("oldest", "newest"):
        pinned = pins(ROOT / f"requirements/{lane}.txt") | pins(ROOT / "requirements/parity.txt") | tools
        assert set(named) - {"tether"} <= set(pinned), f"{lane}.txt lacks a requirement of pyproject.toml"
    assert all(f"=={tools[name]}" in line for name, line in named.items() if name in tools)


def test_lanes_are_the_ends_of_the_supported_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = (pins(ROOT / f"requirements/{lane}.txt") for lane in ("oldest", "newest"))
    assert f"jax>={oldest['jax']}" in project["dependencies"]
    assert [int(part) for part in newest["jax"].split(".")] > [int(part) for part in oldest["jax"].split(".")]
