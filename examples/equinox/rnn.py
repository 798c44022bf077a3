# SPDX-License-Identifier: Apache-2.0
"""Equinox code: a recurrent network tells clockwise spirals from anticlockwise ones.

Nothing but the import line would be different on Equinox 0.9 itself.
"""

import argparse

import jax
import jax.numpy as jnp
import jax.random as jr
import optax

import tether.compat.equinox as eqx


def spirals(count, length, *, key):
    """Noisy walks (count, length, 2) inward from anywhere on a circle, and which way each turns: 1 is clockwise."""
    start_key, way_key, noise_key = jr.split(key, 3)
    clockwise = jr.bernoulli(way_key, shape=(count, 1)).astype(jnp.float32)
    turned = jnp.linspace(0, 2 * jnp.pi, length)[None] * (1 - 2 * clockwise)
    angle = turned + jr.uniform(start_key, (count, 1), maxval=2 * jnp.pi)
    radius = jnp.linspace(1, 0.1, length)[None]
    walk = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], axis=-1)
    return walk + 0.1 * jr.normal(noise_key, walk.shape), clockwise[:, 0]


class Reader(eqx.Module):
    cell: eqx.nn.GRUCell
    readout: eqx.nn.Linear
    start: jnp.ndarray  # the first hidden state is learned, too

    def __init__(self, hidden_size, *, key):
        cell_key, readout_key = jr.split(key)
        self.cell = eqx.nn.GRUCell(2, hidden_size, key=cell_key)
        self.readout = eqx.nn.Linear(hidden_size, 1, key=readout_key)
        self.start = jnp.zeros(hidden_size)

    def __call__(self, walk):
        hidden, _ = jax.lax.scan(lambda hidden, point: (self.cell(point, hidden), None), self.start, walk)
        return self.readout(hidden)[0]


@eqx.filter_value_and_grad
def loss_and_grad(model, walks, clockwise):
    return optax.sigmoid_binary_cross_entropy(jax.vmap(model)(walks), clockwise).mean()


@eqx.filter_jit
def accuracy(model, walks, clockwise):
    return jnp.mean((jax.vmap(model)(walks) > 0) == (clockwise > 0))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model_key, data_key, held_key = jr.split(jr.PRNGKey(args.seed), 3)
    model = Reader(hidden_size=16, key=model_key)
    held = spirals(1000, args.length, key=held_key)
    optim = optax.adam(1e-2)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, opt_state, key):
        loss, grads = loss_and_grad(model, *spirals(args.batch, args.length, key=key))
        updates, opt_state = optim.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    for step in range(1, args.steps + 1):
        loss, model, opt_state = make_step(model, opt_state, jr.fold_in(data_key, step))
        if step % max(1, args.steps // 4) == 0:
            right = accuracy(model, *held).item()
            print(f"step {step}: loss {loss.item():.4f}, held-out accuracy {right:.4f}")


if __name__ == "__main__":
    main()
