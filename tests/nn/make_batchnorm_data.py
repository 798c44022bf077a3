# SPDX-License-Identifier: Apache-2.0
"""Makes data/batchnorm.npz: ten training steps and an evaluation of BatchNorm, as six other libraries do them.

The tests read that file alone. To make it anew, in an environment of its own:

    pip install torch==2.13.0 flax==0.12.7 dm-haiku==0.0.17 equinox==0.13.8 jax==0.10.2
    python tests/nn/make_batchnorm_data.py

Each run is the same program. At step t: y = norm(x[t]), loss = sum(c * y), then weight and bias go down their gradient
by 0.1. Kept for each step are y, the gradients of x, weight and bias, and the running statistics after it, as that
library's evaluation would use them; then y of the evaluation on x[10]. All run in float64, so that the numbers are
the libraries' formulas and not their rounding (Flax and Haiku take the variance as E[x^2] - E[x]^2), and are stored as
float32. Objax, which no longer runs, is its formulas. Arrays are channels first, x[t] is [6, 3, 2, 2].
"""

from __future__ import annotations

import pathlib

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

jax.config.update("jax_enable_x64", True)

STEPS, SIZE, RATE = 10, 3, 0.1
NAMES = ("y", "grad_x", "grad_weight", "grad_bias", "mean", "var")


def make_inputs() -> dict[str, np.ndarray]:
    """Draws inputs whose mean and spread differ from channel to channel and drift from step to step."""
    rng = np.random.default_rng(0)
    spread = np.array([1.0, 2.0, 0.5])[:, None, None]
    offset = np.array([0.0, 3.0, -1.0])[:, None, None]
    drift = np.linspace(0.5, 2.0, STEPS + 1)[:, None, None, None, None]
    x = (rng.normal(size=(STEPS + 1, 6, SIZE, 2, 2)) * spread + offset) * drift
    inputs = {
        "x": x,
        "c": rng.normal(size=x.shape[1:]),
        "weight": np.array([0.5, 1.0, 2.0]),
        "bias": np.arange(3.0) - 1,
    }
    return {name: value.astype(np.float32) for name, value in inputs.items()}


def record(inputs: dict[str, np.ndarray], step, evaluate) -> dict[str, np.ndarray]:
    """Runs ``step(weight, bias, x, c) -> NAMES`` ten times and ``evaluate(weight, bias, x) -> y`` once."""
    inputs = {name: value.astype(np.float64) for name, value in inputs.items()}
    weight, bias, rows = inputs["weight"], inputs["bias"], []
    for x in inputs["x"][:STEPS]:
        rows.append([np.asarray(value) for value in step(weight, bias, x, inputs["c"])])
        weight, bias = weight - RATE * rows[-1][2], bias - RATE * rows[-1][3]
    columns = {name: np.stack(values) for name, values in zip(NAMES, zip(*rows, strict=True), strict=True)}
    return columns | {"evaluated": np.asarray(evaluate(weight, bias, inputs["x"][STEPS]))}


def differentiated(forward):
    """Turns ``forward(weight, bias, x) -> y, (mean, var)`` into a step of ``record``."""

    def loss(weight, bias, x, c):
        y, statistics = forward(weight, bias, x)
        return jnp.sum(c * y), (y, statistics)

    def step(weight, bias, x, c):
        (d_weight, d_bias, d_x), (y, statistics) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(weight, bias, x, c)
        return y, d_x, d_weight, d_bias, *statistics

    return step


def run_torch(inputs):
    norm = torch.nn.BatchNorm2d(SIZE, dtype=torch.float64)

    def load(weight, bias):
        norm.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)}, strict=False)
        norm.zero_grad()

    def step(weight, bias, x, c):
        load(weight, bias)
        x = torch.tensor(x, requires_grad=True)
        y = norm(x)
        (torch.tensor(c) * y).sum().backward()
        gradients = x.grad, norm.weight.grad, norm.bias.grad
        return [value.detach().clone().numpy() for value in (y, *gradients, norm.running_mean, norm.running_var)]

    def evaluate(weight, bias, x):
        load(weight, bias)
        return norm.eval()(torch.tensor(x)).detach().numpy()

    return record(inputs, step, evaluate)


def run_flax(inputs):
    norm = nnx.BatchNorm(SIZE, param_dtype=jnp.float64, rngs=nnx.Rngs(0))

    def step(weight, bias, x, c):
        norm.scale[...], norm.bias[...] = jnp.asarray(weight), jnp.asarray(bias)

        def loss(norm, x):
            y = jnp.moveaxis(norm(jnp.moveaxis(x, 1, -1)), -1, 1)
            return jnp.sum(c * y), y

        (gradient, d_x), y = nnx.grad(loss, argnums=(0, 1), has_aux=True)(norm, jnp.asarray(x))
        return y, d_x, gradient.scale[...], gradient.bias[...], norm.mean[...], norm.var[...]

    def evaluate(weight, bias, x):
        norm.scale[...], norm.bias[...] = jnp.asarray(weight), jnp.asarray(bias)
        return jnp.moveaxis(norm(jnp.moveaxis(x, 1, -1), use_running_average=True), -1, 1)

    return record(inputs, step, evaluate)


def run_haiku(inputs):
    def network(x, training):
        norm = hk.BatchNorm(True, True, decay_rate=0.99, data_format="NC...", name="norm")
        return norm(x, is_training=training)

    network = hk.without_apply_rng(hk.transform_with_state(network))
    state = network.init(None, inputs["x"][0].astype(np.float64), True)[1]

    def parameters(weight, bias):
        return {"norm": {"scale": jnp.reshape(weight, (1, -1, 1, 1)), "offset": jnp.reshape(bias, (1, -1, 1, 1))}}

    def forward(weight, bias, x):
        y, new = network.apply(parameters(weight, bias), state, x, True)
        return y, new

    def step(weight, bias, x, c):
        nonlocal state
        *gradients, state = differentiated(lambda *a: (lambda y, new: (y, (new,)))(*forward(*a)))(weight, bias, x, c)
        return *gradients, *(state[f"norm/~/{name}_ema"]["average"].ravel() for name in ("mean", "var"))

    return record(inputs, step, lambda w, b, x: network.apply(parameters(w, b), state, x, False)[0])


def run_equinox(inputs, mode):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(SIZE, "batch", mode=mode)

    def call(weight, bias, x, **options):
        with_parameters = eqx.tree_at(lambda n: (n.weight, n.bias), norm, (jnp.asarray(weight), jnp.asarray(bias)))
        mapped = jax.vmap(
            lambda x, s: with_parameters(x, s, **options), axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        return mapped(x, state)

    def statistics(new):
        if mode == "ema":
            return new.get(norm.ema_state_index)
        scale = 1 - norm.momentum ** new.get(norm.batch_counter)
        return tuple(hidden / scale for hidden in new.get(norm.batch_state_index))

    def step(weight, bias, x, c):
        nonlocal state
        *gradients, state = differentiated(lambda *a: (lambda y, new: (y, (new,)))(*call(*a)))(weight, bias, x, c)
        return *gradients, *statistics(state)

    return record(inputs, step, lambda w, b, x: call(w, b, x, inference=True)[0])


def run_objax(inputs):
    """Objax 1.8: momentum 0.999, eps 1e-6, biased variance, running += (1 - momentum) * (batch - running)."""
    axes, momentum, eps = (0, 2, 3), 0.999, 1e-6
    running = {"mean": np.zeros(SIZE), "var": np.ones(SIZE)}

    def wide(v):
        return np.reshape(v, (1, -1, 1, 1))

    def step(weight, bias, x, c):
        mean = x.mean(axes)
        var = ((x - wide(mean)) ** 2).mean(axes)
        for name, batch in (("mean", mean), ("var", var)):
            running[name] = running[name] + (1 - momentum) * (batch - running[name])
        inverse = 1 / np.sqrt(wide(var) + eps)
        z = (x - wide(mean)) * inverse
        d_z = c * wide(weight)
        d_x = inverse * (d_z - d_z.mean(axes, keepdims=True) - z * (d_z * z).mean(axes, keepdims=True))
        return z * wide(weight) + wide(bias), d_x, (c * z).sum(axes), c.sum(axes), running["mean"], running["var"]

    def evaluate(weight, bias, x):
        return (x - wide(running["mean"])) / np.sqrt(wide(running["var"]) + eps) * wide(weight) + wide(bias)

    return record(inputs, step, evaluate)


def main() -> None:
    inputs = make_inputs()
    runs = {
        "torch": run_torch(inputs),
        "flax": run_flax(inputs),
        "haiku": run_haiku(inputs),
        "objax": run_objax(inputs),
        "equinox-ema": run_equinox(inputs, "ema"),
        "equinox-batch": run_equinox(inputs, "batch"),
    }
    arrays = inputs | {f"{peer}/{name}": value for peer, run in runs.items() for name, value in run.items()}
    target = pathlib.Path(__file__).parent / "data" / "batchnorm.npz"
    target.parent.mkdir(exist_ok=True)
    np.savez_compressed(target, **{name: value.astype(np.float32) for name, value in arrays.items()})
    print(target, target.stat().st_size, "bytes,", len(arrays), "arrays")


if __name__ == "__main__":
    main()
