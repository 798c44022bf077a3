# SPDX-License-Identifier: Apache-2.0
"""Equinox code: implicit state, of a layer of one's own and of BatchNorm, through a vmap, a gradient, a scan and a jit.

The state is never a leaf of the model, so the number of leaves stays; on Equinox 0.9 itself it grows with the first
call, and the second call of ``train`` fails on the structure of the moments.
"""

import argparse

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax

import tether.compat.equinox as eqx
import tether.compat.equinox.experimental as eqxe


class Center(eqx.Module):
    """Subtracts the mean of all batches that it has seen in training."""

    index: eqxe.StateIndex
    inference: bool

    def __init__(self, size):
        self.index = eqxe.StateIndex()
        self.inference = False
        eqxe.set_state(self.index, (jnp.array(0.0), jnp.zeros(size)))

    def __call__(self, x):
        batch_mean = jax.lax.stop_gradient(jax.lax.pmean(x, "batch"))
        count, mean = eqxe.get_state(self.index, like=(jnp.array(0.0), batch_mean))
        if not self.inference:
            count = count + 1
            mean = mean + (batch_mean - mean) / count
            eqxe.set_state(self.index, (count, mean))
        return x - mean


class Net(eqx.Module):
    center: Center
    hidden: eqx.nn.Linear
    norm: eqxe.BatchNorm
    out: eqx.nn.Linear

    def __init__(self, *, key):
        hidden_key, out_key = jr.split(key)
        self.center = Center(2)
        self.hidden = eqx.nn.Linear(2, 32, key=hidden_key)
        self.norm = eqxe.BatchNorm(32, axis_name="batch", momentum=0.9)
        self.out = eqx.nn.Linear(32, 1, key=out_key)

    def __call__(self, x):
        return self.out(jax.nn.relu(self.norm(self.hidden(self.center(x)))))[0]


def examples(shape, *, key):
    """Points far from the origin, and the squares of their distances from where they lie around."""
    around = jnp.array([20.0, -7.0]).reshape((1,) * len(shape) + (2,))
    x = around + jr.normal(key, (*shape, 2))
    return x, ((x - around) ** 2).sum(axis=-1)


def batched(model, x):
    return jax.vmap(model, axis_name="batch")(x)


@eqx.filter_value_and_grad
def loss_and_grad(model, x, y):
    return jnp.mean((batched(model, x) - y) ** 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model_key, data_key, held_key = jr.split(jr.PRNGKey(args.seed), 3)
    model = Net(key=model_key)
    optim = optax.adam(1e-2)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    leaves = len(jtu.tree_leaves(model))

    @eqx.filter_jit
    def train(model, opt_state, xs, ys):
        """One step for each batch, in a scan that carries weights and moments; the state goes by itself."""
        weights, rest = eqx.partition(model, eqx.is_inexact_array)

        def step(carry, batch):
            weights, opt_state = carry
            loss, grads = loss_and_grad(eqx.combine(weights, rest), *batch)
            updates, opt_state = optim.update(grads, opt_state)
            return (eqx.apply_updates(weights, updates), opt_state), loss

        (weights, opt_state), losses = jax.lax.scan(step, (weights, opt_state), (xs, ys))
        return eqx.combine(weights, rest), opt_state, losses

    xs, ys = examples((args.steps, 64), key=data_key)
    half = args.steps // 2
    model, opt_state, early = train(model, opt_state, xs[:half], ys[:half])
    model, opt_state, late = train(model, opt_state, xs[half:], ys[half:])
    print(f"loss: {early[0]:.3f} at first, {late[-20:].mean():.3f} in the last steps")
    print(f"leaves: {leaves} before, {len(jtu.tree_leaves(model))} after")

    count, mean = eqxe.get_state(model.center.index, like=(jnp.array(0.0), jnp.zeros(2)))
    off = jnp.abs(mean - xs.reshape(-1, 2).mean(axis=0)).max()
    print(f"batches counted: {count:.0f}, mean {mean[0]:.3f} {mean[1]:.3f}, off by less than 0.001: {off < 1e-3}")

    x, y = examples((500,), key=held_key)
    predict = eqx.filter_jit(batched)
    inference = eqx.tree_inference(model, True)
    together = predict(inference, x)
    alone = jnp.concatenate([predict(inference, x[n : n + 1]) for n in range(5)])
    variance = jnp.mean((y - y.mean()) ** 2)
    print(f"held-out error: {jnp.mean((together - y) ** 2) / variance:.4f} of the variance")
    print("in inference an example has the same answer alone:", bool(jnp.allclose(alone, together[:5], rtol=1e-4)))
    predict(model, x + 100)  # in training, which moves what the next inference goes by
    print("a batch in training moves the state:", not jnp.allclose(predict(inference, x), together, rtol=1e-1))


if __name__ == "__main__":
    main()
