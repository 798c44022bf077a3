# SPDX-License-Identifier: Apache-2.0
"""jax.export of pure functions: serialized, and called in a process that knows neither the model nor the library."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn

XS = {n: np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32) for n in (2, 5)}
STREAM = "tether.random.default"


class Net(tether.Module):
    def __init__(self):
        self.norm, self.dropout = nn.BatchNorm(3), nn.Dropout(0.5)
        self.head = nn.Linear(3, 2, key=jax.random.key(0))

    def __call__(self, x):
        return self.head(self.dropout(self.norm(x)))


@pytest.fixture
def net():
    net = Net()
    net.norm.weight, net.norm.bias = jnp.array([1.0, 2.0, -1.0]), jnp.array([0.5, 0.0, 1.0])
    for x in XS.values():
        net(x)  # statistics that are not those of a new layer
    return net


def forward(values, x, training):
    """The result, and the statistics and stream after it, in float64."""
    v = {path: np.float64(value) for path, value in values.items() if path != STREAM}
    mean, var = (x.mean(0), x.var(0)) if training else (v["norm.mean"], v["norm.var"])
    y, new = (x - mean) / np.sqrt(var + 1e-5) * v["norm.weight"] + v["norm.bias"], {}
    if training:
        key, drawn = jax.random.split(values[STREAM])
        y = y * np.asarray(jax.random.bernoulli(drawn, 0.5, x.shape)) / 0.5
        new = {"norm.mean": 0.9 * v["norm.mean"] + 0.1 * mean, "norm.var": 0.9 * v["norm.var"] + 0.1 * var, STREAM: key}
    return y @ v["head.weight"].T + v["head.bias"], new


PROGRAM = """
import sys
import jax, jax.export, jax.numpy as jnp, numpy as np

folder = sys.argv[1]
load = lambda name: dict(np.load(f"{folder}/{name}.npz"))
program = lambda name: jax.export.deserialize(bytearray(open(f"{folder}/{name}.bin", "rb").read()))
values, xs = load("values"), load("xs")
key = jax.random.wrap_key_data(values.pop("tether.random.default"))
results = {}
for n, x in xs.items():
    results["eval" + n] = program("eval").call(values, x)[0]
    out, new = program("train").call({**values, "tether.random.default": key}, x)
    results["train" + n] = out
    results |= {path + n: value for path, value in new.items() if value.dtype == jnp.float32}
    results["stream" + n] = jax.random.key_data(new["tether.random.default"])
assert "tether" not in sys.modules
np.savez(f"{folder}/results.npz", **results)
"""


def test_in_another_process(net, tmp_path):
    """Evaluation without a stream of keys, and training, which returns new statistics and stream; any batch size."""
    (batch,) = jax.export.symbolic_shape("batch", constraints=["batch >= 2"])
    x = jax.ShapeDtypeStruct((batch, 3), jnp.float32)
    values = tether.pure(net).values()
    without = {path: value for path, value in values.items() if path != STREAM}
    for name, model, given in (("eval", net.eval(), without), ("train", net, values)):
        exported = jax.export.export(jax.jit(tether.pure(model)))(given, x)
        (tmp_path / f"{name}.bin").write_bytes(exported.serialize())
    np.savez(tmp_path / "values.npz", **without, **{STREAM: jax.random.key_data(values[STREAM])})
    np.savez(tmp_path / "xs.npz", **{str(n): x for n, x in XS.items()})
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, timeout=300)
    with np.load(tmp_path / "results.npz") as file:
        results = dict(file)
    for n, x in XS.items():
        np.testing.assert_allclose(results[f"eval{n}"], forward(values, x, False)[0], rtol=1e-4, atol=1e-5)
        out, new = forward(values, x, True)
        np.testing.assert_allclose(results[f"train{n}"], out, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(results[f"norm.mean{n}"], new["norm.mean"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(results[f"norm.var{n}"], new["norm.var"], rtol=1e-4)
        np.testing.assert_array_equal(results[f"stream{n}"], jax.random.key_data(new[STREAM]))
        np.testing.assert_array_equal(results[f"head.weight{n}"], net.head.weight)


def test_a_training_step_with_its_gradient(net):
    """A step of gradient descent as one exported program; the model here stays as it was."""

    def step(x, y):
        loss = lambda net: ((net(x, training=False) - y) ** 2).mean()
        value, grads = tether.value_and_grad(loss)(net)
        net.head.weight = net.head.weight - 0.1 * grads.head.weight
        return value

    plain, x, y = tether.pure(step), XS[5], np.ones((5, 2), np.float32)
    values, before = plain.values(x, y), jax.tree.leaves(net)
    exported = jax.export.deserialize(bytearray(jax.export.export(jax.jit(plain))(values, x, y).serialize()))
    value, new = exported.call(values, x, y)
    v = {path.removeprefix("net."): value for path, value in values.items()}
    out, _ = forward(v, x, False)
    hidden = (x - np.float64(v["norm.mean"])) / np.sqrt(np.float64(v["norm.var"]) + 1e-5)
    hidden = hidden * np.float64(v["norm.weight"]) + np.float64(v["norm.bias"])
    np.testing.assert_allclose(value, ((out - y) ** 2).mean(), rtol=1e-4)
    right = np.float64(v["head.weight"]) - 0.1 * (2 * (out - y) / out.size).T @ hidden
    np.testing.assert_allclose(new["net.head.weight"], right, rtol=1e-4, atol=1e-6)
    assert all(a is b for a, b in zip(jax.tree.leaves(net), before, strict=True))


def test_a_stream_left_out_is_asked_for(net):
    values = tether.pure(net).values()
    del values[STREAM]
    with pytest.raises(tether.errors.LeakError, match=r"(?s)was not given.*tether\.random\.default"):
        jax.export.export(jax.jit(tether.pure(net)))(values, XS[5])
