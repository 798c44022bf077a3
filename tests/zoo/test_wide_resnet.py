# SPDX-License-Identifier: Apache-2.0
"""WideResNet against its twin in PyTorch, and against the published numbers of parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.zoo import oracle
from tether import errors, zoo
from tether.interop import torch as interop


@pytest.mark.parametrize("name", ["wide", "thin"])
def test_is_its_twin(name: str):
    with jax.enable_x64(True):
        gaps = oracle.differences(oracle.of_tether(oracle.CASES[name]), oracle.stored()[name])
    assert max(gaps.values()) < oracle.BOUND, {what: gap for what, gap in gaps.items() if gap >= oracle.BOUND}


# In millions, from table 4 of the paper.
@pytest.mark.parametrize(("depth", "width", "millions"), [(40, 4, 8.9), (16, 8, 11.0), (28, 10, 36.5)])
def test_has_as_many_parameters_as_published(depth: int, width: int, millions: float):
    model = tether.eval_shape(lambda: zoo.WideResNet(depth, width))
    count = sum(variable.value.size for variable in tether.variables(model, tether.Param).values())
    assert round(count / 1e6, 1) == millions


def test_names_are_those_of_published_weights():
    model = tether.eval_shape(lambda: zoo.WideResNet(16, 2))
    wanted = interop.load(model, {"nothing": np.ones(1)}, strict=False).missing
    of_block = [f"block1.layer.0.{part}" for part in ("bn1.weight", "conv1.weight", "bn2.running_var", "conv2.weight")]
    assert {"conv1.weight", *of_block, "block1.layer.0.convShortcut.weight", "bn1.bias", "fc.weight"} < set(wanted)
    assert not any("layer.1.convShortcut" in name for name in wanted)


def test_dropout_is_between_the_convolutions(key):
    block = zoo.WideBlock(2, 2, dropout=0.5, key=key)
    block.conv2.weight = jnp.zeros_like(block.conv2.weight).at[:, :, 1, 1].set(1)  # sums the channels, place by place
    x = jax.random.normal(key, (8, 2, 3, 3))
    h = jax.nn.relu(block.bn2(block.conv1(jax.nn.relu(block.bn1(x)))))
    y = (block(x, key=jax.random.key(1)) - x)[:, 0]
    sums = np.stack([np.asarray(2 * h[:, 0] * a + 2 * h[:, 1] * b) for a in (0, 1) for b in (0, 1)])
    gaps = np.abs(sums - np.asarray(y)).min(0)  # each place is one of the sums that dropout leaves
    np.testing.assert_allclose(gaps, 0, atol=1e-5)
    assert np.abs(np.asarray(y - h.sum(1))).max() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 27}, "WideResNet: depth is not 6 n + 4."),
        ({"depth": 4}, "WideResNet: depth is not an integer of at least 10."),
        ({"width": 0}, "WideResNet: width is not an integer of at least 1."),
        ({"dropout": -0.5}, "Dropout: p, the probability to drop, is not in [0, 1"),
    ],
)
def test_wrong_option(options, message):
    with pytest.raises(errors.ArgumentError) as error:
        tether.eval_shape(lambda: zoo.WideResNet(**options))
    assert str(error.value).startswith(message), str(error.value)


def test_depth_that_would_do():
    with pytest.raises(errors.ArgumentError, match="fix:      depth=22"):
        zoo.WideResNet(27)


def test_stride_without_projection():
    with pytest.raises(errors.ArgumentError) as error:
        zoo.WideBlock(4, 4, 2)
    assert str(error.value).startswith("WideBlock: a stride without a change of channels leaves the shortcut")


def test_wrong_images():
    with pytest.raises(errors.ShapeError) as error:
        oracle.CASES["wide"].model(np.float32)(jnp.ones((2, 16, 16, 3)))
    assert str(error.value).startswith("WideResNet: x are not images of 3 channels.")
