# SPDX-License-Identifier: Apache-2.0
"""BatchNorm against float64 NumPy, hand-written JAX, and six other libraries' stored numbers.

data/batchnorm.npz is made by make_batchnorm_data.py, which says what is in it.
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.nn.batchnorm_oracle import RNG, STANDARD, X, close, normal, oracle
from tether import nn
from tether.errors import ArgumentError, DtypeError, ShapeError

DATA = dict(np.load(pathlib.Path(__file__).parent / "data" / "batchnorm.npz"))


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order():
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.mark.parametrize(("variance", "var"), [("biased", [1.4, 13.4]), ("unbiased", [1.566667, 17.566667])])
def test_one_step_by_hand(variance: str, var: list[float]):
    norm = nn.BatchNorm(2, decay=0.9, variance=variance)
    y = norm(X)
    close(y[:, 0], STANDARD, 1e-6)
    close(norm.mean, [0.4, 2.5], 1e-6)
    close(norm.var, var, 1e-6)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4), (2, 3, 4, 5), (2, 3, 2, 2, 3)])
@pytest.mark.parametrize("channel_axis", [1, -1, 0])
def test_every_rank_and_channel_axis(shape: tuple[int, ...], channel_axis: int):
    x = np.moveaxis(normal(*shape, loc=2, scale=3), 1, channel_axis)
    norm = nn.BatchNorm(3, channel_axis=channel_axis)
    norm.weight, norm.bias = normal(3), normal(3)
    axis = channel_axis % x.ndim
    z, mean, var = oracle(x, tuple(a for a in range(x.ndim) if a != axis))
    wide = [3 if a == axis else 1 for a in range(x.ndim)]
    close(norm(x), z * np.reshape(norm.weight, wide) + np.reshape(norm.bias, wide))
    close(norm.mean, 0.1 * mean)
    close(norm.var, 0.9 + 0.1 * var)


def test_two_calls_in_one_forward_move_the_statistics_in_order():
    norm = nn.BatchNorm(1, decay=0.9)
    norm(jnp.full((4, 1), 2.0))
    norm(jnp.full((4, 1), 4.0))
    close(norm.mean, [0.58], 1e-6)


def test_second_batch_is_normalized_by_itself():
    norm = nn.BatchNorm(1)
    norm(jnp.array([[0.0], [1.0]]))
    close(norm(jnp.array([[10.0], [11.0]])), [[-1.0], [1.0]], 1e-4)


def test_evaluation_uses_the_running_statistics_and_each_row_alone():
    norm = nn.BatchNorm(2)
    norm(X)
    expected = (X - np.array([0.4, 2.5])) / np.sqrt(np.array([1.4, 13.4]) + 1e-5)
    before = np.asarray(norm.mean), np.asarray(norm.var)
    close(norm(X, training=False), expected)
    close(norm.eval()(X[:1]), expected[:1])
    np.testing.assert_array_equal(before, (norm.mean, norm.var))


@pytest.mark.parametrize("options", [{}, {"mode": "ema"}, {"debias": True}, {"debias": "equinox"}])
def test_evaluation_before_training_is_the_identity(options: dict):
    x = normal(5, 3, scale=10)
    y = nn.BatchNorm(3, **options)(x, training=False)
    close(y, x / np.sqrt(1 + 1e-5), 1e-6)
    np.testing.assert_array_equal(nn.BatchNorm(3, eps=0.0, **options)(x, training=False), x)


@pytest.mark.parametrize("steps", [1, 10, 100])
def test_running_statistics_after_many_steps_on_one_batch(steps: int):
    x = normal(8, 2, loc=[1, -3], scale=[0.5, 4])
    _, mean, var = oracle(x, (0,))
    plain, debiased = nn.BatchNorm(2, decay=0.99), nn.BatchNorm(2, decay=0.99, debias=True)
    for _ in range(steps):
        plain(x), debiased(x)
    close(plain.mean, (1 - 0.99**steps) * mean)
    close(plain.var, 0.99**steps + (1 - 0.99**steps) * var)
    close(debiased.mean, mean, 1e-6)
    close(debiased.var, var, 1e-6)
    z = oracle(x, (0,))[0]
    close(debiased(x, training=False), z)


def test_debias_on_changing_batches():
    decay, norm = 0.999, nn.BatchNorm(2, decay=0.999, debias=True, variance="unbiased")
    sums, batches = np.zeros((2, 2)), normal(7, 5, 2, loc=3)
    for n, x in enumerate(batches, 1):
        norm(x)
        sums = decay * sums + (1 - decay) * np.array([x.mean(0, np.float64), x.var(0, np.float64, ddof=1)])
        close([norm.mean, norm.var], sums / (1 - decay**n), 1e-6)
        np.testing.assert_array_equal(norm.count, [n, n])


@pytest.mark.parametrize("debias", [False, True])
def test_decay_zero_keeps_the_last_batch(debias: bool):
    norm = nn.BatchNorm(2, decay=0, debias=debias)
    norm(normal(6, 2))
    norm(X)
    close(norm.mean, [4, 25])
    close(norm.var, [5, 125])


def test_ema_normalizes_by_the_running_statistics():
    norm, decay = nn.BatchNorm(2, mode="ema", decay=0.9), 0.9
    first, second = X, X[::-1] * 2 + 1
    close(norm(first), oracle(first, (0,))[0])
    close([norm.mean, norm.var], oracle(first, (0,))[1:])
    y = norm(second)
    mean, var = (
        decay * a + (1 - decay) * b for a, b in zip(oracle(first, (0,))[1:], oracle(second, (0,))[1:], strict=True)
    )
    close([norm.mean, norm.var], [mean, var])
    close(y, (second - mean) / np.sqrt(var + 1e-5))
    close(norm(X, training=False), (X - mean) / np.sqrt(var + 1e-5))


def test_ema_gradient_is_that_of_the_formula():
    norm, c = nn.BatchNorm(2, mode="ema", decay=0.9), normal(4, 2)
    norm(X)
    x = normal(4, 2)

    def by_hand(x):
        mean = 0.9 * jnp.array([4.0, 25.0]) + 0.1 * x.mean(0)
        var = 0.9 * jnp.array([5.0, 125.0]) + 0.1 * x.var(0)
        return jnp.sum(c * (x - mean[None]) * jax.lax.rsqrt(var[None] + 1e-5))

    close(tether.grad(lambda x: jnp.sum(c * norm(x)))(jnp.asarray(x)), jax.grad(by_hand)(jnp.asarray(x)))


def test_ema_first_batch_that_is_not_finite_initializes_nothing():
    norm = nn.BatchNorm(2, mode="ema")
    norm(np.where(np.arange(2) == 1, np.nan, X).astype(np.float32))
    np.testing.assert_array_equal(norm.count, [1, 0])
    close(norm.mean, [4, 0])
    norm(X)
    np.testing.assert_array_equal(norm.count, [2, 1])
    close([norm.mean, norm.var], [[4, 25], [5, 125]])


def test_large_offset():
    x = np.float32([[4096], [4097], [4098], [4099]])
    close(nn.BatchNorm(1)(x)[:, 0], [-1.34164, -0.44721, 0.44721, 1.34164], 1e-4)


@pytest.mark.parametrize("shape", [(4, 2), (999, 2), (32, 2, 7, 7), (512, 2, 10, 10)])
@pytest.mark.parametrize("wrap", [lambda f: f, tether.jit], ids=["eager", "jit"])
def test_constant_channel_is_exactly_zero(shape: tuple[int, ...], wrap):
    norm = nn.BatchNorm(2, decay=0)
    x = np.full(shape, 1e7, np.float32)
    x[:, 1] = 0.1
    np.testing.assert_array_equal(wrap(norm)(x), np.zeros(shape))
    np.testing.assert_array_equal(norm.var, [0, 0])
    np.testing.assert_array_equal(norm.mean, np.float32([1e7, 0.1]))


def test_small_spread_on_a_large_offset():
    x = (1e4 + 0.01 * RNG.normal(size=(1000, 1))).astype(np.float32)
    close(nn.BatchNorm(1, eps=1e-12)(x), oracle(x, (0,), 1e-12)[0], 1e-4)


def test_outlier_in_the_first_row():
    x = normal(100, 3)
    x[0] = [1e7, -1e5, 1e3]
    close(nn.BatchNorm(3)(x), oracle(x, (0,))[0])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype):
    norm = nn.BatchNorm(2)
    x = jnp.asarray(np.stack([60000 + np.arange(4.0), [1e3, -1e3, 6e4, -6e4]], 1), dtype)
    y = norm(x)
    assert y.dtype == dtype
    assert norm.mean.dtype == norm.var.dtype == jnp.float32
    assert np.isfinite(y.astype(jnp.float32)).all()
    z, mean, var = oracle(np.asarray(x, np.float64), (0,))
    close(y.astype(jnp.float32), z, 1e-2)
    close(norm.mean, 0.1 * mean)
    close(norm.var, 0.9 + 0.1 * var)
    assert norm.var[1] > 65504


def test_half_precision_parameters_leave_the_statistics_in_float32():
    norm = nn.BatchNorm(2, dtype=jnp.float16)
    assert (norm.weight.dtype, norm.bias.dtype, norm.mean.dtype, norm.var.dtype) == (
        *[jnp.float16] * 2,
        *[jnp.float32] * 2,
    )
    assert norm(jnp.asarray(X, jnp.float16)).dtype == jnp.float16
    close(norm(X), np.stack([STANDARD, STANDARD], 1))


def test_compute_dtype_is_that_of_the_output_alone():
    norm = nn.BatchNorm(1)
    half = tether.view(norm, compute_dtype=jnp.float16)
    y = half(np.float32([[1e5], [1e5 + 1]]))  # neither fits float16
    assert y.dtype == jnp.float16
    close(y.astype(jnp.float32), [[-1], [1]], 1e-3)
    close(norm.mean, [0.1 * (1e5 + 0.5)])


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_])
def test_integers_give_the_default_float(dtype):
    y = nn.BatchNorm(2)((X % 4 > 1).astype(dtype))
    assert y.dtype == jnp.float32
    close(y, oracle(X % 4 > 1, (0,))[0])


def test_float64_stays_float64():
    with jax.enable_x64(True):
        norm = nn.BatchNorm(2, dtype=jnp.float64)
        x = jnp.asarray(RNG.normal(size=(6, 2)) + 1e3)
        y = norm(x)
        assert y.dtype == norm.mean.dtype == norm.var.dtype == jnp.float64
        np.testing.assert_allclose(y, oracle(x, (0,))[0], rtol=1e-10)
        mixed = nn.BatchNorm(2)
        assert mixed(x).dtype == jnp.float64
        assert mixed.mean.dtype == jnp.float32


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_nothing_but_finite_numbers_enters_the_statistics(bad: float):
    norm = nn.BatchNorm(2)
    norm(X)
    before = np.asarray(norm.mean), np.asarray(norm.var)
    x = X.copy()
    x[2, 0] = bad
    norm(x)
    np.testing.assert_array_equal((norm.mean[0], norm.var[0]), (before[0][0], before[1][0]))
    close((norm.mean[1], norm.var[1]), (0.9 * 2.5 + 2.5, 0.9 * 13.4 + 12.5))
    for value in (np.inf, np.nan):
        norm(jnp.full((3, 2), value))
    assert np.isfinite((norm.mean, norm.var)).all()


MASK = np.array([1, 1, 1, 0, 1, 0, 0, 1], bool)


@pytest.mark.parametrize(
    ("mask", "mean", "var"),
    [(MASK, 2.8, 6.16), (np.array([1, 1, 1, 0, 0, 0, 0, 1], bool), 2.5, 7.25)],
)
@pytest.mark.parametrize("padding", [0.0, 1e9, np.nan])
def test_mask_by_hand(mask: np.ndarray, mean: float, var: float, padding: float):
    x = np.where(mask, np.arange(8), padding).astype(np.float32)[:, None]
    norm = nn.BatchNorm(1, decay=0)
    y = norm(x, mask=mask[:, None])
    close([norm.mean, norm.var], [[mean], [var]], 1e-6)
    close(y[mask, 0], (np.arange(8)[mask] - mean) / np.sqrt(var + 1e-5))
    assert np.isfinite(y).all()
    lanes = nn.BatchNorm(1, decay=0, axis_name="batch")
    mapped = tether.vmap(lambda x, m: lanes(x, mask=m), axis_name="batch")
    close(mapped(x, mask)[mask], y[mask])
    close([lanes.mean, lanes.var], [[mean], [var]], 1e-6)
    shards = nn.BatchNorm(1, decay=0, axis_name="shard", channel_axis=1)
    mapped = tether.vmap(lambda x, m: shards(x, mask=m), axis_name="shard")
    close(mapped(x.reshape(4, 2, 1), mask.reshape(4, 2, 1)).reshape(8, 1)[mask], y[mask])
    close([shards.mean, shards.var], [[mean], [var]], 1e-6)


def test_mask_over_space_with_the_gradient():
    x, mask, c = normal(4, 3, 5), RNG.random((4, 1, 5)) < 0.6, jnp.asarray(normal(4, 3, 5))
    valid = np.broadcast_to(mask, x.shape)
    norm = nn.BatchNorm(3, variance="unbiased")

    def hand(x):
        n = valid.sum((0, 2), keepdims=True).astype(np.float32)
        mean = jnp.where(valid, x, 0).sum((0, 2), keepdims=True) / n
        var = jnp.where(valid, (x - mean) ** 2, 0).sum((0, 2), keepdims=True) / n
        return jnp.sum(jnp.where(valid, c * (x - mean) * jax.lax.rsqrt(var + 1e-5), 0)), (mean, var * n / (n - 1))

    expected, (mean, var) = jax.grad(hand, has_aux=True)(jnp.asarray(x))
    padded = jnp.where(valid, x, jnp.nan)
    actual = tether.grad(lambda x: jnp.sum(jnp.where(valid, c * norm(x, mask=mask), 0)))(padded)
    close(actual, expected)
    close([norm.mean, norm.var], [0.1 * mean.ravel(), 0.9 + 0.1 * var.ravel()])


@pytest.mark.parametrize("options", [{}, {"mode": "ema"}, {"variance": "unbiased"}, {"debias": True}])
@pytest.mark.parametrize("valid", [0, 1])
def test_mask_with_too_little_left(options: dict, valid: int):
    """One value has no variance: zero output there, and no update; none at all: the running statistics stand in."""
    norm = nn.BatchNorm(2, **options)
    norm(X)
    before = [np.asarray(v.value) for v in tether.variables(norm).values()]
    mask = (np.arange(4) < valid)[:, None]
    y = norm(X, mask=mask)
    assert np.isfinite(y).all()
    for old, new in zip(before, tether.variables(norm).values(), strict=True):
        np.testing.assert_array_equal(old, new.value)
    if valid == 0 or options.get("mode") == "ema":
        close(y, norm(X, training=False))
    else:
        np.testing.assert_array_equal(y[0], [0, 0])
    gradient = tether.grad(lambda x: jnp.sum(jnp.asarray(X) * norm(x, mask=mask)))(jnp.asarray(X))
    assert np.isfinite(gradient).all()


def test_mask_of_each_channel():
    norm = nn.BatchNorm(2, decay=0, debias=True)
    norm(X, mask=np.array([[1, 0], [1, 0], [0, 0], [0, 0]], bool))
    np.testing.assert_array_equal(norm.count, [1, 0])
    close([norm.mean, norm.var], [[2, 0], [1, 1]])


def test_structure_is_fixed_from_construction():
    for options, paths in (
        ({}, ["weight", "bias", "mean", "var"]),
        ({"affine": False}, ["mean", "var"]),
        ({"mode": "ema"}, ["weight", "bias", "mean", "var", "count"]),
        ({"debias": True}, ["weight", "bias", "mean", "var", "count"]),
    ):
        norm = nn.BatchNorm(3, **options)
        before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), norm)
        treedef = jax.tree.structure(norm)
        norm(normal(4, 3)), norm(normal(4, 3), training=False)
        assert list(tether.variables(norm)) == paths
        kinds = [type(v) for v in tether.variables(norm).values()]
        assert kinds == [tether.Param] * (len(paths) - 2 - ("count" in paths)) + [tether.State] * (
            2 + ("count" in paths)
        )
        assert jax.tree.structure(norm) == treedef
        assert jax.tree.leaves(before) == jax.tree.leaves(
            jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), norm)
        )
        assert ("count" in paths) == (len(paths) == 5)


def test_without_affine():
    norm = nn.BatchNorm(2, affine=False)
    assert norm.weight is norm.bias is None
    close(norm(X), oracle(X, (0,))[0])


def test_one_trace_under_jit_and_the_same_numbers():
    norm, eager = nn.BatchNorm(2, mode="ema"), nn.BatchNorm(2, mode="ema")
    step = tether.jit(lambda norm, x: norm(x))
    for x in (X, 2 * X, X + 1):
        close(step(norm, x), eager(x))
        close([norm.mean, norm.var], [eager.mean, eager.var])
    assert step.traces == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "train"}, 'mode is not "batch" or "ema"'),
        ({"variance": "population"}, 'variance is not "biased" or "unbiased"'),
        ({"debias": "yes"}, "debias is not False or True"),
        ({"decay": 1}, r"decay is not a number in \[0, 1\)"),
        ({"decay": -0.1}, r"decay is not a number in \[0, 1\)"),
        ({"decay": "0.9"}, r"decay is not a number in \[0, 1\)"),
        ({"decay": float("nan")}, r"decay is not a number in \[0, 1\)"),
        ({"eps": -1e-5}, "eps is not a finite number of at least 0"),
        ({"eps": float("inf")}, "eps is not a finite number of at least 0"),
        ({"axis_name": 0}, "axis_name is not a name or a tuple of names"),
        ({"axis_name": ()}, "axis_name is not a name or a tuple of names"),
        ({"channel_axis": 1.0}, "channel_axis is not an int or None"),
        ({"channel_axis": True}, "channel_axis is not an int or None"),
        ({"dtype": jnp.int32}, "dtype is not a floating dtype"),
        ({"dtype": jnp.complex64}, "dtype is not a real floating dtype"),
    ],
)
def test_bad_options(options: dict, message: str):
    with pytest.raises(ArgumentError, match=message) as error:
        nn.BatchNorm(3, **options)
    assert error.value.expected
    assert error.value.fixes


def test_bad_size_and_bad_preset():
    with pytest.raises(ArgumentError, match="size is not an integer of at least 1"):
        nn.BatchNorm(0)
    with pytest.raises(ArgumentError, match="name is not one of 'torch', 'flax', 'haiku'"):
        nn.BatchNorm.preset("keras", 3)
    with pytest.raises(ArgumentError, match="name is not one of 'torch', 'flax', 'haiku'"):
        nn.BatchNorm.preset(["torch"], 3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({}, (5, 4), "axis 1 of x has 4 channels; it should have 3"),
        ({}, (5, 4, 3), "axis 1 of x has 4 channels; it should have 3"),
        ({}, (3,), "axis 1 of x does not exist, for want of a batch axis; it should have 3"),
        ({}, (), "axis 1 of x does not exist"),
        ({"channel_axis": -1}, (5, 3, 4), "axis -1 of x has 4 channels; it should have 3"),
        ({"channel_axis": -3}, (5, 3), "axis -3 of x does not exist"),
    ],
)
def test_bad_shapes(options: dict, shape: tuple[int, ...], message: str, training: bool):
    model = nn.Sequential([nn.BatchNorm(3, **options)])
    with pytest.raises(ShapeError, match=message) as error:
        model(jnp.ones(shape), training=training)
    assert error.value.got == f"float32[{', '.join(map(str, shape))}]"
    assert error.value.expected.startswith("float[")
    assert error.value.fixes
    assert "[0]" in error.value.at


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1), (0, 3)])
def test_one_value_per_channel_in_training(shape: tuple[int, ...]):
    norm = nn.BatchNorm(3)
    with pytest.raises(ShapeError, match=f"two or more values of each channel, and this batch has {shape[0]}"):
        norm(jnp.ones(shape))
    np.testing.assert_array_equal(norm.var, np.ones(3))
    assert norm(jnp.ones(shape), training=False).shape == shape


@pytest.mark.parametrize("training", [True, False])
def test_bad_mask(training: bool):
    norm = nn.BatchNorm(2)
    for mask in (np.ones((4, 1), np.float32), True, [True]):
        with pytest.raises(DtypeError, match="the mask is not an array of bools"):
            norm(X, mask=mask, training=training)
    for mask in (np.ones(4, bool), np.ones((2, 1), bool), np.ones((4, 1, 1), bool), np.ones((1, 4, 2), bool)):
        with pytest.raises(ShapeError, match="the mask doesn't fit x") as error:
            norm(X, mask=mask, training=training)
    assert error.value.got == "mask bool[1, 4, 2], x float32[4, 2]"
    assert error.value.fixes[0] == "mask.reshape(-1, 1) for a mask of whole examples"


def test_bad_input():
    norm = nn.BatchNorm(2)
    with pytest.raises(DtypeError, match="complex"):
        norm(X + 0j)
    with pytest.raises(DtypeError, match="not an array of numbers"):
        norm([[1.0, 2.0]])


PEERS = ("torch", "flax", "haiku", "objax", "equinox-ema", "equinox-batch")


def lanes(norm: nn.BatchNorm):
    return tether.vmap(norm, axis_name="batch")


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("peer", "options", "call"),
    [
        *[(peer, {}, lambda norm: norm) for peer in PEERS],
        *[(peer, {"axis_name": "batch"}, lanes) for peer in PEERS if peer.startswith("equinox")],
    ],
)
def test_presets_give_the_other_libraries_numbers(peer: str, options: dict, call, jitted: bool):
    norm = nn.BatchNorm.preset(peer, 3, **options)
    norm.weight, norm.bias = DATA["weight"], DATA["bias"]
    wanted = {name.removeprefix(f"{peer}/"): value for name, value in DATA.items() if name.startswith(f"{peer}/")}
    c = jnp.asarray(DATA["c"])

    def step(norm, x):
        def loss(norm, x):
            y = call(norm)(x)
            return jnp.sum(c * y), y

        (d_norm, d_x), y = tether.grad(loss, argnums=(0, 1), has_aux=True)(norm, x)
        norm.weight, norm.bias = norm.weight - 0.1 * d_norm.weight, norm.bias - 0.1 * d_norm.bias
        return {"y": y, "grad_x": d_x, "grad_weight": d_norm.weight, "grad_bias": d_norm.bias}

    step = tether.jit(step) if jitted else step
    for t, x in enumerate(DATA["x"][:10]):
        got = step(norm, jnp.asarray(x)) | {"mean": norm.mean, "var": norm.var}
        for name, value in got.items():
            np.testing.assert_allclose(value, wanted[name][t], rtol=1e-5, atol=1e-5, err_msg=f"{name} at step {t}")
    close(call(norm.eval())(jnp.asarray(DATA["x"][10])), wanted["evaluated"])


def test_preset_options_go_before_its_own():
    norm = nn.BatchNorm.preset("haiku", 3, decay=0.5, channel_axis=-1)
    assert (norm.decay, norm.debias, norm.channel_axis) == (0.5, True, -1)


@pytest.mark.parametrize(("steps", "spread"), [(1, 0.00999), (10, 0.095), (100, 0.63), (200, 0.87)])
def test_equinox_batch_repeats_the_inflated_variance(steps: int, spread: float):
    """The fault of Equinox 0.13.8 in evaluation, and the right numbers with debias=True."""
    x = np.float32([[1], [-1]] * 4)
    faulty, right = nn.BatchNorm.preset("equinox-batch", 1), nn.BatchNorm(1, decay=0.99, debias=True)
    for _ in range(steps):
        faulty(x), right(x)
    np.testing.assert_allclose(np.var(faulty(x, training=False)), spread, rtol=1e-2)
    np.testing.assert_allclose(np.var(right(x, training=False)), 1, rtol=1e-4)
