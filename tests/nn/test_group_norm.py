# SPDX-License-Identifier: Apache-2.0
"""GroupNorm and InstanceNorm against float64 NumPy: axes, groups, running statistics, and where variances fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError
from tether.nn._group_norm import GroupNorm, InstanceNorm

RNG = np.random.default_rng(0)


def oracle(x, groups: int, eps: float = 1e-5):
    """For one example with channels first, a group after the other."""
    x = np.asarray(x, np.float64)
    inside = x.shape[0] // groups
    parts = [x[g * inside : (g + 1) * inside] for g in range(groups)]
    return np.concatenate([(p - p.mean()) / np.sqrt(((p - p.mean()) ** 2).mean() + eps) for p in parts])


def batch_oracle(x, groups: int, eps: float = 1e-5):
    return np.stack([oracle(example, groups, eps) for example in x])


def with_values(norm):
    """Random weight and bias, and them for channels first."""
    norm.weight, norm.bias = (jnp.asarray(RNG.normal(size=norm.size), jnp.float32) for _ in range(2))
    return norm


def after(norm, y, channel: int):
    shape = [-1 if axis == channel else 1 for axis in range(y.ndim)]
    return y * np.asarray(norm.weight).reshape(shape) + np.asarray(norm.bias).reshape(shape)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("space", [(5,), (3, 2), (2, 3, 2)])
def test_group_values(groups: int, space: tuple[int, ...]):
    norm = with_values(GroupNorm(groups, 6, eps=1e-3))
    x = RNG.normal(3, 2, (2, 6, *space))
    np.testing.assert_allclose(norm(x), after(norm, batch_oracle(x, groups, 1e-3), 1), rtol=1e-4, atol=1e-5)


def test_group_of_vectors():
    norm, x = GroupNorm(2, 6), RNG.normal(size=(3, 6))
    np.testing.assert_allclose(norm(x), batch_oracle(x, 2), rtol=1e-4, atol=1e-5)
    tokens = GroupNorm(2, 6, channel_axis=-1, space_axes=())
    x = RNG.normal(size=(2, 3, 6))
    np.testing.assert_allclose(tokens(x).reshape(-1, 6), batch_oracle(x.reshape(-1, 6), 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("space", [(-3, -2), (1, 2), [2, -3]])
def test_channels_last(space):
    group = with_values(GroupNorm(2, 4, channel_axis=-1, space_axes=space))
    instance = with_values(InstanceNorm(4, affine=True, channel_axis=-1, space_axes=space))
    x = RNG.normal(size=(2, 3, 5, 4))
    first = np.moveaxis(x, -1, 1)
    for norm, groups in ((group, 2), (instance, 4)):
        wanted = after(norm, batch_oracle(first, groups), 1)
        np.testing.assert_allclose(np.moveaxis(np.asarray(norm(x)), -1, 1), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (2,), (3, 2)])
def test_channels_from_the_end_take_any_axes_in_front(leading: tuple[int, ...]):
    x = RNG.normal(size=(*leading, 4, 3, 2))
    examples = x.reshape(-1, 4, 3, 2)
    for norm, groups in ((GroupNorm(2, 4, channel_axis=-3), 2), (InstanceNorm(4, channel_axis=-3), 4)):
        wanted = batch_oracle(examples, groups).reshape(x.shape)
        np.testing.assert_allclose(norm(x), wanted, rtol=1e-4, atol=1e-5)


def test_space_before_the_channels():
    """Time in front: [time, batch, channels], statistics over time."""
    norm = InstanceNorm(4, channel_axis=2, space_axes=0)
    x = RNG.normal(size=(7, 2, 4))
    wanted = batch_oracle(np.transpose(x, (1, 2, 0)), 4)
    np.testing.assert_allclose(np.transpose(norm(x), (1, 2, 0)), wanted, rtol=1e-4, atol=1e-5)


def test_one_example_under_vmap():
    x = RNG.normal(size=(5, 4, 3)).astype(np.float32)
    for one, many in (
        (GroupNorm(2, 4, channel_axis=0), GroupNorm(2, 4)),
        (InstanceNorm(4, channel_axis=0), InstanceNorm(4)),
    ):
        np.testing.assert_allclose(jax.vmap(one)(x), many(x), atol=1e-6)
        np.testing.assert_allclose(tether.vmap(one)(x), many(x), atol=1e-6)


def test_first_values_and_absent_parameters():
    norm = GroupNorm(2, 4, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(norm.weight, np.ones(4))
    np.testing.assert_array_equal(norm.bias, np.zeros(4))
    assert norm.weight.dtype == norm.bias.dtype == jnp.bfloat16
    assert not tether.variables(GroupNorm(2, 4, affine=False)) and not tether.variables(InstanceNorm(4))
    tracked = InstanceNorm(4, affine=True, track_running_stats=True, dtype=jnp.float16)
    assert list(tether.variables(tracked)) == ["weight", "bias", "mean", "var"]
    assert (tracked.weight.dtype, tracked.mean.dtype, tracked.var.dtype) == (jnp.float16, jnp.float32, jnp.float32)
    assert GroupNorm(2, 4, affine=False)(jnp.ones((1, 4, 2), jnp.int32)).dtype == jnp.float32


@pytest.mark.parametrize("norm", [GroupNorm(2, 4), InstanceNorm(4)], ids=["group", "instance"])
def test_statistics_that_are_hard(norm):
    groups = 2 if isinstance(norm, GroupNorm) else 4
    x = RNG.normal(1e4, 1e-2, (2, 4, 50)).astype(np.float32)
    np.testing.assert_allclose(norm(x), batch_oracle(x, groups), rtol=1e-4, atol=1e-4)
    half = jnp.asarray(RNG.normal(6e4, 100, (1, 4, 50)), jnp.float16)  # the squares overflow in float16
    y = norm(half)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(y.astype(jnp.float32), batch_oracle(half, groups), rtol=2e-3, atol=2e-3)
    for value in (1e7, 0.1, -3e30):
        np.testing.assert_array_equal(norm(jnp.full((1, 4, 7), value, jnp.float32)), np.zeros((1, 4, 7)))
    with jax.enable_x64(True):
        wide = RNG.normal(size=(2, 4, 5))
        np.testing.assert_allclose(norm(wide), batch_oracle(wide, groups), rtol=1e-12)


def test_gradient_agrees_with_float64_differences():
    x, c, direction = (RNG.normal(size=(2, 4, 3)) for _ in range(3))
    for norm, groups in ((GroupNorm(2, 4), 2), (InstanceNorm(4, track_running_stats=True), 4)):
        up, down = (batch_oracle(x + step * direction, groups) for step in (1e-6, -1e-6))
        slope = ((up - down) * c).sum() / 2e-6
        loss = lambda x, norm=norm: (jnp.asarray(c, jnp.float32) * norm(x)).sum()
        grad = tether.grad(loss)(x)
        assert float((np.asarray(grad) * direction).sum()) == pytest.approx(slope, rel=1e-3)


def moved(old, examples, decay: float):
    """Running mean and var after a batch of examples, channels first."""
    x = np.asarray(examples, np.float64).reshape(len(examples), examples.shape[1], -1)
    count = x.shape[-1]
    mean, var = x.mean(-1).mean(0), (x.var(-1) * count / (count - 1)).mean(0)
    return decay * old[0] + (1 - decay) * mean, decay * old[1] + (1 - decay) * var


@pytest.mark.parametrize("how", ["eager", "jit", "vmap", "scan"])
def test_running_statistics(how: str):
    norm = InstanceNorm(3, track_running_stats=True, decay=0.8, channel_axis=-2)
    right = np.zeros(3), np.ones(3)
    xs = RNG.normal(2, 3, (3, 4, 3, 5)).astype(np.float32)
    if how == "scan":
        tether.scan(lambda _, x: (None, norm(x)), None, xs)
    for x in xs:
        right = moved(right, x, 0.8)
        if how != "scan":
            {"eager": norm, "jit": tether.jit(norm), "vmap": tether.vmap(norm)}[how](x)
    np.testing.assert_allclose(norm.mean, right[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(norm.var, right[1], rtol=1e-5)
    x, broad = xs[0], lambda s: np.asarray(s)[:, None]
    wanted = (x - broad(right[0])) / np.sqrt(broad(right[1]) + 1e-5)
    np.testing.assert_allclose(norm(x, training=False), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm.mean, right[0], rtol=1e-5, atol=1e-6)


def test_values_that_are_not_finite_leave_the_running_statistics_of_their_channel_alone():
    norm = InstanceNorm(2, track_running_stats=True)
    x = RNG.normal(5, 1, (2, 2, 4))
    right = moved((np.zeros(2), np.ones(2)), x, 0.9)
    x[0, 1, 0] = np.nan
    norm(x)
    np.testing.assert_allclose(norm.mean, [right[0][0], 0], rtol=1e-5)
    np.testing.assert_allclose(norm.var, [right[1][0], 1], rtol=1e-5)


def test_wrong_channels_say_what_to_do():
    with pytest.raises(ShapeError) as caught:
        GroupNorm(2, 4)(jnp.ones((2, 5, 3)))
    assert str(caught.value) == (
        "GroupNorm: axis 1 of x does not have 4 channels.\n"
        "  at:       the module itself  (GroupNorm)\n"
        "  got:      float32[2, 5, 3]\n"
        "  expected: [_, 4, ...]\n"
        "  fix:      one of\n"
        "    1. size as the input has channels\n"
        "    2. channel_axis=-3 for [..., C, H, W], 0 for one example [C, ...]"
    )
    with pytest.raises(ShapeError, match="InstanceNorm: axis -3 of x does not have 4 channels") as caught:
        InstanceNorm(4, channel_axis=-3)(jnp.ones((4, 3)))
    assert caught.value.expected == "[..., 4, _, _]"


@pytest.mark.parametrize("space", [(5,), (1,), (2, 2), (2, -1), -4])
def test_space_axes_must_be_axes_of_x(space):
    with pytest.raises(ShapeError) as caught:
        InstanceNorm(4, space_axes=space)(jnp.ones((2, 4, 3)))
    assert caught.value.what == "InstanceNorm: space_axes are not axes of x beside the channels."
    assert caught.value.got.startswith("float32[2, 4, 3], space_axes=(")
    assert caught.value.fixes == ["space_axes=(-3, -2), channel_axis=-1 for [..., H, W, C]"]


def test_one_value_has_no_variance():
    for norm, x in (
        (InstanceNorm(4), jnp.ones((2, 4))),
        (InstanceNorm(4), jnp.ones((2, 4, 1))),
        (InstanceNorm(4, track_running_stats=True), jnp.ones((2, 4, 1))),
        (GroupNorm(4, 4), jnp.ones((2, 4))),
    ):
        with pytest.raises(ShapeError, match="Norm: a mean and a variance of 1 value") as caught:
            norm(x)
        assert caught.value.expected == "at least 2 values in each group of channels of an example"
    with pytest.raises(ShapeError, match="GroupNorm: a mean and a variance of 0 value"):
        GroupNorm(2, 4)(jnp.ones((2, 4, 0)))
    evaluated = InstanceNorm(4, track_running_stats=True)(jnp.ones((2, 4, 1)), training=False)
    np.testing.assert_allclose(evaluated, np.full((2, 4, 1), 1 / np.sqrt(1 + 1e-5)), rtol=1e-6)


def test_groups_must_divide_the_channels():
    with pytest.raises(ArgumentError) as caught:
        GroupNorm(4, 6)
    assert str(caught.value) == (
        "GroupNorm: groups does not divide size.\n"
        "  got:      groups=4, size=6\n"
        "  expected: size a multiple of groups\n"
        "  fix:      groups=2"
    )


def test_channels_last_need_space_axes():
    for make in (lambda **options: GroupNorm(2, 4, **options), lambda **options: InstanceNorm(4, **options)):
        with pytest.raises(ArgumentError, match="Norm: channels come last, and no axis is behind them") as caught:
            make(channel_axis=-1)
        assert caught.value.fixes == ["space_axes=(-3, -2) for [..., H, W, C]", "space_axes=() for vectors [..., C]"]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"eps": -1e-5}, "eps is not a positive number"),
        ({"eps": 0}, "eps is not a positive number"),
        ({"channel_axis": 1.0}, "channel_axis and space_axes are not axis numbers"),
        ({"channel_axis": True}, "channel_axis and space_axes are not axis numbers"),
        ({"space_axes": "all"}, "channel_axis and space_axes are not axis numbers"),
        ({"dtype": jnp.int32}, "dtype is not a floating dtype"),
    ],
)
def test_options_are_checked(options, what: str):
    with pytest.raises(ArgumentError, match=f"GroupNorm: {what}"):
        GroupNorm(2, 4, **options)
    with pytest.raises(ArgumentError, match=f"InstanceNorm: {what}"):
        InstanceNorm(4, **options)


def test_sizes_and_decay_are_checked():
    with pytest.raises(ArgumentError, match="GroupNorm: groups is not an integer of at least 1"):
        GroupNorm(0, 4)
    with pytest.raises(ArgumentError, match="InstanceNorm: size is not an integer of at least 1"):
        InstanceNorm(-1)
    for decay in (1, -0.1, True, "0.9", float("nan")):
        with pytest.raises(ArgumentError, match=r"InstanceNorm: decay is not a number in \[0, 1\)") as caught:
            InstanceNorm(4, decay=decay)
    assert caught.value.fixes == ["decay=1 - momentum, if momentum is as in PyTorch"]


def test_complex_numbers_are_refused():
    with pytest.raises(DtypeError, match="GroupNorm: complex numbers"):
        GroupNorm(2, 4)(jnp.ones((1, 4, 3), jnp.complex64))
    with pytest.raises(ArgumentError, match="InstanceNorm: dtype is complex"):
        InstanceNorm(4, affine=True, dtype=jnp.complex64)


def test_in_a_model():
    model = nn.Sequential([nn.Conv2d(1, 4, 3, key=jax.random.key(0)), GroupNorm(2, 4), InstanceNorm(4)])
    grads = tether.grad(lambda model: (model(jnp.ones((2, 1, 6, 6))) ** 2).sum())(model)
    assert list(tether.variables(grads)) == ["[0].weight", "[0].bias", "[1].weight", "[1].bias"]
