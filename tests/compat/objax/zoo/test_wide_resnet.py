# SPDX-License-Identifier: Apache-2.0
"""Wide residual networks: published numbers of parameters, and a float64 network in NumPy."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tests.compat.objax.zoo import _numpy
from tether._transforms import eval_shape
from tether.compat.objax.zoo.wide_resnet import BN_EPS, BN_MOM, WideResNet, WideResNetGeneral, WRNBlock, conv_args


@pytest.mark.parametrize(
    ("depth", "width", "nclass", "size"),
    [
        # Zagoruyko and Komodakis 2016, tables 4 and 5, in millions: 8.9, 11.0, 36.5. Oliver et al. 2018: 1.5.
        (40, 4, 10, 8_949_210),
        (16, 8, 10, 10_961_370),
        (28, 10, 10, 36_479_194),
        (28, 2, 10, 1_467_610),
    ],
)
def test_sizes(depth, width, nclass, size):
    def trained():
        return [v.value for v in WideResNet(3, nclass, depth, width).vars().subset(objax.TrainVar)]

    found = sum(math.prod(value.shape) for value in eval_shape(trained))
    assert found == size
    assert round(found / 1e6, 1) == {40: 8.9, 16: 11.0}.get(depth, {10: 36.5, 2: 1.5}[width] if depth == 28 else None)


def test_names():
    names: list[str] = []
    eval_shape(lambda: names.extend(WideResNet(3, 10, 10, 2).vars().keys()))
    assert names[:3] == [
        "(WideResNet)[0](Conv2D).w",
        "(WideResNet)[1](WRNBlock).proj_conv(Conv2D).w",
        "(WideResNet)[1](WRNBlock).norm_1(BatchNorm2D).running_mean",
    ]
    assert names[-2:] == ["(WideResNet)[7](Linear).b", "(WideResNet)[7](Linear).w"]
    assert not any("proj_conv" in name for name in WRNBlock(16, 16).vars().keys())  # noqa: SIM118  (of variables)


def by_hand(x, values, strides, training):
    root = next(iter(values)).partition("[")[0]

    def at(prefix):
        return _numpy.part(values, root + prefix)

    def conv(h, prefix, stride, size):
        return _numpy.conv(h, at(prefix)["w"], stride, _numpy.same(h.shape[2], size, stride))

    def norm(h, prefix):
        return np.maximum(_numpy.batch_norm(h, at(prefix), 1e-5, training), 0)

    h = conv(x, "[0](Conv2D).", 1, 3)
    for number, stride in enumerate(strides, 1):
        block = f"[{number}](WRNBlock)."
        first = norm(h, f"{block}norm_1(")
        second = norm(conv(first, f"{block}conv_1(", stride, 3), f"{block}norm_2(")
        has_projection = any(name.startswith(f"{root}{block}proj") for name in values)
        shortcut = conv(first, f"{block}proj_conv(", stride, 1) if has_projection else h
        h = conv(second, f"{block}conv_2(", 1, 3) + shortcut
    last = len(strides) + 1
    head = at(f"[{last + 3}](Linear).")
    return norm(h, f"[{last}](BatchNorm2D).").mean((2, 3)) @ head["w"] + head["b"]


def test_values():
    network = WideResNetGeneral(nin=3, nclass=4, blocks_per_group=[2, 1], width=0.5)
    values = _numpy.weights(network)
    for name, variable in network.vars().items():
        variable.assign(jnp.asarray(values[name]))
    x = np.random.default_rng(1).normal(size=(3, 3, 9, 9)).astype("f")
    for training in (False, True):
        expected = by_hand(x.astype(np.float64), values, [1, 1, 2], training)
        found = objax.Jit(functools.partial(network, training=training), network.vars())(x)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_statistics():
    """In each step a tenth of the batch's."""
    assert (BN_MOM, BN_EPS) == (0.9, 1e-5)
    block = WRNBlock(4, 4)
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype("f")
    block(x, training=True)
    expected = 0.1 * x.astype(np.float64).mean((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(block.norm_1.running_mean.value, expected, rtol=1e-4, atol=1e-7)


def test_the_first_weights():
    conv = objax.nn.Conv2D(64, 32, 3, **conv_args(3, 32))
    np.testing.assert_allclose(float(conv.w.value.std()), math.sqrt(2 / (9 * 32)), rtol=0.02)
    assert conv.b is None and conv.padding == "SAME"


def test_another_normalization():
    block = WRNBlock(4, 4, bn=functools.partial(objax.nn.GroupNorm2D, groups=2))
    assert repr(block.norm_2) == "objax.nn.GroupNorm2D(nin=4, groups=2, eps=1e-05)"
    assert not list(block.vars().subset(objax.StateVar))
    assert block(jnp.zeros((1, 4, 8, 8)), training=True).shape == (1, 4, 8, 8)


@pytest.mark.parametrize(("depth", "fix"), [(29, 28), (4, 10)])
def test_depths_that_do_not_exist(depth, fix):
    with pytest.raises(AssertionError) as caught:
        WideResNet(3, 10, depth)
    assert str(caught.value) == (
        "WideResNet: depth should be 6n+4.\n"
        f"  got:      depth={depth}\n"
        "  expected: 10, 16, 22, 28 ...: two convolutions in each of n blocks in each of three groups\n"
        f"  fix:      depth={fix}"
    )
