# SPDX-License-Identifier: Apache-2.0
"""BatchNorm's numbers against float64 NumPy, and what users of Equinox 0.9 asked of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx
from tether.compat.equinox.experimental import BatchNorm
from tether.compat.equinox.experimental.stateful import stored


def reference(batches, momentum=0.99, eps=1e-5):
    """Outputs and running statistics, batch after batch: x is (batch, channels, ...)."""
    mean = var = None
    for x in np.asarray(batches, np.float64):
        axes = (0, *range(2, x.ndim))
        batch_mean, batch_var = x.mean(axes), x.var(axes)
        mean = batch_mean if mean is None else momentum * mean + (1 - momentum) * batch_mean
        var = batch_var if var is None else momentum * var + (1 - momentum) * batch_var
        shape = (-1,) + (1,) * (x.ndim - 2)
        yield (x - mean.reshape(shape)) / np.sqrt(var.reshape(shape) + eps), mean, var


def statistics(norm):
    return jax.tree.map(np.asarray, stored(norm.state_index))


@pytest.mark.parametrize("shape", [(3, 4, 2), (3, 4, 2, 5, 6)], ids=["vectors", "images"])
@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_running_statistics_normalize(key, shape, jit):
    batches = 2 + 3 * jax.random.normal(key, shape)
    norm = BatchNorm(2, axis_name="batch", momentum=0.9)
    call = jit(lambda norm, x: jax.vmap(norm, axis_name="batch")(x))
    for x, (out, mean, var) in zip(batches, reference(batches, 0.9), strict=True):
        np.testing.assert_allclose(call(norm, x), out, atol=2e-5)
        np.testing.assert_allclose(statistics(norm)[0], mean, rtol=1e-5)
        np.testing.assert_allclose(statistics(norm)[1], var, rtol=1e-5)
    frozen = eqx.tree_inference(norm, True)
    expected = (np.asarray(batches[0], np.float64) - mean.reshape(-1, *[1] * (len(shape) - 3))) / np.sqrt(
        var.reshape(-1, *[1] * (len(shape) - 3)) + 1e-5
    )
    np.testing.assert_allclose(call(frozen, batches[0]), expected, atol=2e-5)
    np.testing.assert_allclose(
        jax.vmap(lambda x: norm(x, inference=True), axis_name="batch")(batches[0]), expected, atol=2e-5
    )
    np.testing.assert_allclose(statistics(norm)[0], mean, rtol=1e-5)


def test_gradient_goes_through_the_statistics_of_the_batch(key):
    x = jax.random.normal(key, (5, 2))
    norm = BatchNorm(2, axis_name="batch", momentum=0.5)
    loss = lambda x: (jax.vmap(norm, axis_name="batch")(x) ** 3).sum()
    jax.vmap(norm, axis_name="batch")(x + 1)
    old = statistics(norm)

    def by_hand(x):
        mean, var = 0.5 * old[0] + 0.5 * x.mean(0), 0.5 * old[1] + 0.5 * x.var(0)
        return (((x - mean[None]) / jnp.sqrt(var + 1e-5)[None]) ** 3).sum()

    np.testing.assert_allclose(jax.grad(loss)(x), jax.grad(by_hand)(x), rtol=1e-4, atol=1e-5)


def test_several_axes(key):
    x = jax.random.normal(key, (3, 4, 2))
    norm = BatchNorm(2, axis_name=["a", "b"], channelwise_affine=False)
    out = jax.vmap(jax.vmap(norm, axis_name="b"), axis_name="a")(x)
    ((expected, mean, _),) = reference([x.reshape(12, 2)])
    np.testing.assert_allclose(out.reshape(12, 2), expected, atol=1e-5)
    np.testing.assert_allclose(statistics(norm)[0], mean, atol=1e-6)
    assert norm.weight is None and norm.bias is None


def test_models_of_an_ensemble_have_statistics_of_their_own(key):
    x = jax.random.normal(key, (3, 5, 2)) + jnp.arange(3.0)[:, None, None]
    norms = eqx.filter_vmap(lambda _: BatchNorm(2, axis_name="batch"))(jnp.arange(3))
    call = lambda norm, x: jax.vmap(norm, axis_name="batch")(x)
    out = eqx.filter_vmap(call)(norms, x)
    for member in range(3):
        ((expected, mean, _),) = reference(x[member : member + 1])
        np.testing.assert_allclose(out[member], expected, atol=1e-5)
        np.testing.assert_allclose(statistics(norms)[0][member], mean, atol=1e-6)


class TestReports:
    def test_a_scan_over_one_that_was_never_called(self, key):
        x = jax.random.normal(key, (4, 3, 2))
        norm = BatchNorm(2, axis_name="batch")
        leaves, treedef = jax.tree.flatten(norm)
        step = lambda carry, x: (carry, jax.vmap(norm, axis_name="batch")(x))
        _, out = eqx.filter_jit(lambda x: jax.lax.scan(step, 0, x))(x)
        *_, (_, mean, _) = reference(x)
        for row, (expected, _, _) in zip(out, reference(x), strict=True):
            np.testing.assert_allclose(row, expected, atol=2e-5)
        np.testing.assert_allclose(statistics(norm)[0], mean, atol=1e-6)
        assert jax.tree.structure(norm) == treedef and len(jax.tree.leaves(norm)) == len(leaves)

    def test_a_vmap_around_a_scan_over_one_that_was_never_called_twice(self, key):
        x = jax.random.normal(key, (5, 3, 2))
        norm = BatchNorm(2, axis_name="batch")
        gradient = eqx.filter_grad(
            lambda norm, x: jax.vmap(lambda x: jax.lax.map(norm, x), axis_name="batch")(x).mean()
        )
        gradient(norm, x), gradient(norm, x)
        *_, (_, mean, var) = reference([*x.swapaxes(0, 1), *x.swapaxes(0, 1)])
        np.testing.assert_allclose(statistics(norm)[0], mean, atol=1e-6)
        np.testing.assert_allclose(statistics(norm)[1], var, rtol=1e-5)

    def test_one_compilation(self, key, caplog):
        traces = []

        class Net(eqx.Module):
            layer: eqx.nn.Linear
            norm: BatchNorm

            def __call__(self, x):
                traces.append(1)
                return self.norm(self.layer(x))

        net = Net(eqx.nn.Linear(2, 3, key=key), BatchNorm(3, axis_name="batch"))

        @eqx.filter_jit
        def training_step(net, x):
            gradient = eqx.filter_grad(lambda net: (jax.vmap(net, axis_name="batch")(x) ** 2).sum())(net)
            return eqx.apply_updates(net, gradient)

        with jax.log_compiles(True):
            for _ in range(3):
                net = training_step(net, jnp.ones((4, 2)))
        compiled = [text for text in caplog.messages if "XLA compilation of jit(training_step)" in text]
        assert len(traces) == 1 == len(compiled)

    def test_the_same_batch_gives_the_same_output_and_the_same_leaves(self, key):
        """Two stages, called on one batch: the first stores its statistics, and the mean of equal values is that."""
        x = jax.random.normal(key, (8, 3))
        stages = [(eqx.nn.Linear(3, 3, key=k), BatchNorm(3, axis_name="batch")) for k in jax.random.split(key)]

        def run(x, stages):
            for layer, norm in stages:
                x = jax.vmap(norm, axis_name="batch")(jax.vmap(layer)(x))
            return x

        before = jax.tree.leaves(eqx.filter(stages, eqx.is_array))
        outputs = [run(x, stages) for _ in range(3)]
        after = jax.tree.leaves(eqx.filter(stages, eqx.is_array))
        assert len(before) == 8 == len(after) and all(a is b for a, b in zip(before, after, strict=True))
        np.testing.assert_allclose(outputs[2], outputs[0], atol=1e-5)


class TestMistakes:
    def test_no_axis(self):
        with pytest.raises(NameError, match="no vmap around it has the axis of the batch"):
            jax.vmap(BatchNorm(2, axis_name="batch"))(jnp.ones((3, 2)))

    def test_inference_before_training(self):
        norm = BatchNorm(2, axis_name="batch", inference=True)
        with pytest.raises(RuntimeError, match="nothing was saved under this index yet"):
            eqx.filter_jit(jax.vmap(norm, axis_name="batch"))(jnp.ones((3, 2)))
