# SPDX-License-Identifier: Apache-2.0
"""Equinox code: a Wasserstein GAN draws points from eight clusters on a ring, batch norm here, spectral norm there.

The generator's running statistics and the critic's singular vectors are implicit state: no function takes or returns
them. Equinox 0.9 itself has no derivative of SpectralNorm.
"""

import argparse

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax

import tether.compat.equinox as eqx
import tether.compat.equinox.experimental as eqxe

LATENT = 4
CENTERS = np.stack([np.cos(np.arange(8) * np.pi / 4), np.sin(np.arange(8) * np.pi / 4)], axis=-1)


def ring(random, count):
    """Points (count, 2) from eight narrow clusters on the unit circle."""
    points = CENTERS[random.integers(8, size=count)] + 0.05 * random.standard_normal((count, 2))
    return points.astype(np.float32)


def noise(random, count):
    return random.standard_normal((count, LATENT), dtype=np.float32)


class Generator(eqx.Module):
    layers: list

    def __init__(self, width, *, key):
        key1, key2, key3 = jr.split(key, 3)
        self.layers = [
            eqx.nn.Linear(LATENT, width, use_bias=False, key=key1),
            eqxe.BatchNorm(width, axis_name="batch", momentum=0.9),
            jax.nn.relu,
            eqx.nn.Linear(width, width, use_bias=False, key=key2),
            eqxe.BatchNorm(width, axis_name="batch", momentum=0.9),
            jax.nn.relu,
            eqx.nn.Linear(width, 2, key=key3),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def spectral(model, *, key):
    """The model with each linear weight divided by its largest singular value, so that no slope is above 1."""
    is_linear = lambda node: isinstance(node, eqx.nn.Linear)

    def normalized(node):
        return eqx.tree_at(lambda l: l.weight, node, replace_fn=eqxe.SpectralNorm.withkey(key))

    return jtu.tree_map(lambda node: normalized(node) if is_linear(node) else node, model, is_leaf=is_linear)


@eqx.filter_value_and_grad
def critic_loss(critic, real, fake):
    scores = jax.vmap(critic)(jnp.concatenate([real, fake]))
    return jnp.mean(scores[len(real) :]) - jnp.mean(scores[: len(real)])


@eqx.filter_grad
def generator_loss(generator, critic, z):
    fake = jax.vmap(generator, axis_name="batch")(z)
    return -jnp.mean(jax.vmap(critic)(fake))


@eqx.filter_jit
def draw(generator, z):
    return jax.vmap(generator, axis_name="batch")(z)


def distance(a, b):
    """The Wasserstein distance of two samples, averaged over their shadows on 32 lines."""
    angle = np.linspace(0, np.pi, 32, endpoint=False)
    lines = np.stack([np.cos(angle), np.sin(angle)])
    return np.abs(np.sort(a @ lines, axis=0) - np.sort(b @ lines, axis=0)).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator_key, critic_key, norm_key = jr.split(jr.PRNGKey(args.seed), 3)
    generator = Generator(64, key=generator_key)
    critic = spectral(eqx.nn.MLP(2, 1, width_size=64, depth=2, key=critic_key), key=norm_key)
    optim = optax.adam(2e-3, b1=0.0, b2=0.9)
    generator_state = optim.init(eqx.filter(generator, eqx.is_inexact_array))
    critic_state = optim.init(eqx.filter(critic, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_critic(critic, state, generator, real, z):
        loss, grads = critic_loss(critic, real, jax.vmap(generator, axis_name="batch")(z))
        updates, state = optim.update(grads, state)
        return -loss, eqx.apply_updates(critic, updates), state

    @eqx.filter_jit
    def train_generator(generator, state, critic, z):
        updates, state = optim.update(generator_loss(generator, critic, z), state)
        return eqx.apply_updates(generator, updates), state

    random, held = np.random.default_rng(args.seed), np.random.default_rng(args.seed + 1)
    real, other, z = ring(held, 2000), ring(held, 2000), noise(held, 2000)
    for step in range(1, args.steps + 1):
        for _ in range(3):
            batch = ring(random, args.batch), noise(random, args.batch)
            gap, critic, critic_state = train_critic(critic, critic_state, generator, *batch)
        generator, generator_state = train_generator(generator, generator_state, critic, noise(random, args.batch))
        if step == 1 or step % max(1, args.steps // 4) == 0:
            drawn = np.asarray(draw(eqx.tree_inference(generator, True), z))
            print(f"step {step}: the critic's gap {gap.item():.4f}, distance to the data {distance(drawn, real):.4f}")
    print(f"two samples of the data: distance {distance(other, real):.4f}")
    apart = np.linalg.norm(drawn[:, None] - CENTERS, axis=-1)
    shares = (apart < 0.2).mean(axis=0)
    print(f"drawn within 0.2 of a cluster: {shares.sum():.3f}, of the rarest one: {shares.min():.3f}")
    norms = [np.linalg.norm(np.asarray(jnp.asarray(layer.weight)), 2) for layer in critic.layers]
    print("largest singular values of the critic:", ", ".join(f"{norm:.3f}" for norm in norms))


if __name__ == "__main__":
    main()
