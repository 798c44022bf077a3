# SPDX-License-Identifier: Apache-2.0
"""Programs that were run under Equinox 0.9.2 itself give the same numbers here (recorded/programs.py says how)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import tether.compat.equinox as eqx

FOLDER = Path(__file__).parent / "recorded"
RECORDED = json.loads((FOLDER / "equinox_092.json").read_text())


def load():
    spec = importlib.util.spec_from_file_location("recorded_programs", FOLDER / "programs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results():
    # Equinox's layers drew their weights when JAX split keys in the old way.
    with jax.threefry_partitionable(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return load().results(eqx)


@pytest.mark.parametrize("layer", RECORDED["layers"])
def test_layers(results, layer):
    ours, theirs = results["layers"][layer], RECORDED["layers"][layer]
    assert ours["weights"] == theirs["weights"]
    assert len(ours["out"]) == len(theirs["out"])
    for out, expected in zip(ours["out"], theirs["out"], strict=True):
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("program", ["stages_in_turn", "compiled", "trained", "micro_batches", "spectral"])
def test_state(results, program):
    for name, expected in RECORDED[program].items():
        np.testing.assert_allclose(results[program][name], expected, rtol=2e-4, atol=2e-5, err_msg=name)


def test_text_but_for_where_lines_break(results):
    for name, text in RECORDED["text"].items():
        assert "".join(results["text"][name].split()) == "".join(text.split())


def test_files(results):
    assert results["file"] == RECORDED["file"]
