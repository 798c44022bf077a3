# SPDX-License-Identifier: Apache-2.0
"""BatchNorm in use: views of it, steps in a loop, options as other libraries hand them over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.nn.batchnorm_oracle import RNG, X, close, normal, oracle
from tether import nn
from tether.errors import ArgumentError, VmapWriteError


@pytest.fixture(autouse=True)
def _same_numbers_in_any_order():
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def test_a_view_with_another_decay_moves_the_same_statistics():
    norm = nn.BatchNorm(2)
    tether.view(norm, decay=0.5)(X)
    close([norm.mean, norm.var], [[2, 12.5], [3, 63]])
    norm(X)
    close(norm.mean, [0.9 * 2 + 0.1 * 4, 0.9 * 12.5 + 0.1 * 25])
    assert norm.decay == 0.9


def test_modes_of_views_and_calls():
    norm = nn.BatchNorm(2)
    close(norm.eval().train()(X), oracle(X, (0,))[0])
    close(norm.eval()(X, training=True), oracle(X, (0,))[0])
    close(norm.mean, [(1 - 0.9**2) * 4, (1 - 0.9**2) * 25])
    before = np.asarray(norm.mean)
    norm.train()(X, training=False)
    np.testing.assert_array_equal(norm.mean, before)


def test_a_view_in_batch_mode_of_a_layer_that_counts():
    norm = nn.BatchNorm(2, mode="ema")
    close(tether.view(norm, mode="batch")(X), oracle(X, (0,))[0])
    np.testing.assert_array_equal(norm.count, [1, 1])
    close([norm.mean, norm.var], [[4, 25], [5, 125]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 2}, r"decay is not a number in \[0, 1\)"),
        ({"eps": -1.0}, "eps is not a finite number of at least 0"),
        ({"mode": "running"}, 'mode is not "batch" or "ema"'),
        ({"mode": "ema"}, "this view needs a count of batches, which the layer doesn't keep"),
        ({"debias": True}, "this view needs a count of batches, which the layer doesn't keep"),
    ],
    ids=str,
)
def test_bad_settings_of_a_view(settings: dict, message: str):
    norm = nn.BatchNorm(2)
    with pytest.raises(ArgumentError, match=message) as error:
        tether.view(norm, **settings)(X)
    assert error.value.fixes
    np.testing.assert_array_equal(norm.mean, [0, 0])


def test_the_message_says_how_to_make_the_layer():
    with pytest.raises(ArgumentError) as error:
        tether.view(nn.BatchNorm(2), mode="ema")(X)
    assert error.value.got == "a view with mode='ema', debias=False"
    assert error.value.fixes == ["BatchNorm(2, mode='ema', debias=False)"]
    close(tether.view(nn.BatchNorm(2), mode="ema")(X, training=False), X / np.sqrt(1 + 1e-5))


@pytest.mark.parametrize("number", [np.float64, np.float32])
def test_numbers_of_numpy_are_settings(number):
    with jax.enable_x64(True):
        norm = nn.BatchNorm(2, decay=number(0.5), eps=number(1e-5))
        assert norm(X).dtype == norm.mean.dtype == jnp.float32
        close([norm.mean, norm.var], [[2, 12.5], [3, 63]])
        assert tether.view(norm, decay=float(number(0.5)))(X).dtype == jnp.float32


@pytest.mark.parametrize("options", [{}, {"mode": "ema"}, {"debias": True}], ids=str)
def test_a_scan_over_steps_is_a_loop(options: dict):
    looped, scanned = nn.BatchNorm(2, **options), nn.BatchNorm(2, **options)
    batches = normal(5, 6, 2, loc=3)
    right = [looped(x) for x in batches]
    _, ys = tether.scan(lambda carry, x: (carry, scanned(x)), 0, batches)
    close(ys, right, 1e-6)
    close([scanned.mean, scanned.var], [looped.mean, looped.var], 1e-6)


@pytest.mark.parametrize("options", [{}, {"mode": "ema"}], ids=str)
def test_checkpoint_moves_the_statistics_once(options: dict):
    norm, c = nn.BatchNorm(2, **options), normal(4, 2)
    loss = lambda call: lambda x: (c * call(x) ** 2).sum()
    right = tether.grad(loss(nn.BatchNorm(2, **options)))(jnp.asarray(X))
    close(tether.jit(tether.grad(loss(tether.checkpoint(norm))))(X), right)
    keep = 0.0 if options else 0.9
    close(norm.mean, (1 - keep) * X.mean(0))


def test_donated_statistics_after_steps():
    norm = nn.BatchNorm(2, decay=0.5)
    step = tether.jit(norm, donate_state=True)
    for _ in range(3):
        step(X)
    close([norm.mean, norm.var], [[3.5, 21.875], [4.5, 109.5]])
    assert step.traces == 1


def test_lanes_with_masks_of_their_own():
    norm, batches, masks = nn.BatchNorm(2), normal(3, 6, 2), RNG.random((3, 6, 1)) < 0.7
    call = lambda x, mask: norm(x, mask=mask)
    with pytest.raises(VmapWriteError):
        tether.vmap(call)(batches, masks)
    y = tether.vmap(lambda x, mask: norm(x, mask=mask, training=False))(batches, masks)
    close(y, batches / np.sqrt(1 + 1e-5))
    many = tether.stack([nn.BatchNorm(2, decay=0) for _ in range(3)])
    ys = tether.vmap(lambda norm, x, mask: norm(x, mask=mask))(many, batches, masks)
    for y, x, mask, mean in zip(ys, batches, masks[..., 0], many.mean, strict=True):
        close(y[mask], oracle(x[mask], (0,))[0])
        close(mean, x[mask].mean(0))


def test_one_input_with_a_mask_in_each_lane():
    norm, x = nn.BatchNorm(2, axis_name="lane", decay=0), np.float32([1, 3])
    masks = np.array([[1, 0], [1, 1], [0, 1], [0, 0]], bool)
    tether.vmap(lambda mask: norm(x, mask=mask), axis_name="lane")(masks)
    close([norm.mean, norm.var], [[1, 3], [0, 0]])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_integers_give_the_dtype_of_the_parameters(dtype: str):
    with jax.enable_x64(True):
        assert nn.BatchNorm(2, dtype=dtype)(X.astype(np.int32)).dtype == dtype
        assert nn.BatchNorm(2)(X.astype(np.int32)).dtype == jnp.float32
        assert nn.BatchNorm(2, affine=False)(X.astype(np.int32)).dtype == jnp.float32
