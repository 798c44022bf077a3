# SPDX-License-Identifier: Apache-2.0
"""ConvNet against its twin in PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo import oracle
from tether import errors, zoo
from tether.interop import torch as interop


def test_is_its_twin():
    with jax.enable_x64(True):
        gaps = oracle.differences(oracle.of_tether(oracle.CASES["ConvNet"]), oracle.stored()["ConvNet"])
    assert max(gaps.values()) < oracle.BOUND, gaps


def test_is_its_twin_in_float32():
    gaps = oracle.differences(oracle.of_tether(oracle.CASES["ConvNet"], np.float32), oracle.stored()["ConvNet"])
    assert max(gaps.values()) < 1e-4, gaps


def test_names():
    names = list(interop.state_dict(oracle.CASES["ConvNet"].model(np.float32)))
    assert names[:6] == [f"features.{name}" for name in ("0.weight", *(f"1.{n}" for n in PARTS), "4.weight")]
    assert names[-2:] == ["classifier.weight", "classifier.bias"]


PARTS = ("weight", "bias", "running_mean", "running_var")


def test_no_channels():
    with pytest.raises(errors.ArgumentError) as error:
        zoo.ConvNet(())
    assert str(error.value).startswith("ConvNet: channels are no list.")


def test_images_too_small():
    with pytest.raises(errors.ShapeError) as error:
        oracle.CASES["ConvNet"].model(np.float32)(jnp.ones((2, 2, 8, 3)))
    assert str(error.value) == (
        "ConvNet: the images are too small for 2 stages that each halve them.\n"
        "  at:       the module itself  (ConvNet)\n"
        "  got:      float32[2, 2, 8, 3]\n"
        "  expected: height and width of 4 or more\n"
        "  fix:      fewer channels=(...), one for each stage"
    )
