# SPDX-License-Identifier: Apache-2.0
"""Equinox code: layers that learned to read digits are kept, and a new last layer learns odd and even, in two ways.

Nothing but the import line would be different on Equinox 0.9 itself.
"""

import argparse
import functools as ft

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
from sklearn.datasets import load_digits

import tether.compat.equinox as eqx


def data():
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return (images[train], labels[train]), (images[test], labels[test])


def batches(images, labels, steps, seed):
    random = np.random.default_rng(seed)
    for _ in range(steps):
        batch = random.integers(0, len(images), 64)
        yield images[batch], labels[batch]


def loss(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


@eqx.filter_jit
def accuracy(model, x, y):
    return jnp.mean(jax.vmap(model)(x).argmax(axis=1) == y)


def train(model, spec, stream):
    """Trains where ``spec`` is true: only there are gradients, and only of that does the optimizer keep moments."""
    optim = optax.adam(3e-3)
    state = optim.init(eqx.filter(model, spec))

    @eqx.filter_jit
    def make_step(model, state, x, y):
        grads = eqx.filter_grad(loss, arg=spec)(model, x, y)
        updates, state = optim.update(grads, state)
        return eqx.apply_updates(model, updates), state

    for x, y in stream:
        model, state = make_step(model, state, x, y)
    return model


def train_part(model, spec, stream):
    """The same, with the model in two parts: the loss is a function of the one, and closes over the other."""
    optim = optax.adam(3e-3)
    trained, frozen = eqx.partition(model, spec)
    state = optim.init(trained)

    @eqx.filter_jit
    def make_step(trained, frozen, state, x, y):
        @jax.grad
        def gradient(trained):
            return loss(eqx.combine(trained, frozen), x, y)

        updates, state = optim.update(gradient(trained), state)
        return eqx.apply_updates(trained, updates), state

    for x, y in stream:
        trained, state = make_step(trained, frozen, state, x, y)
    return eqx.combine(trained, frozen)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model_key, layer_key = jr.split(jr.PRNGKey(args.seed))
    (images, labels), (held_images, held_labels) = data()

    untrained = eqx.nn.MLP(64, 10, width_size=64, depth=2, key=model_key)
    everything = jtu.tree_map(eqx.is_inexact_array, untrained)
    reader = train(untrained, everything, batches(images, labels, args.steps, args.seed))
    print(f"ten digits, all layers trained: held-out accuracy {accuracy(reader, held_images, held_labels).item():.4f}")

    # A new last layer, and a specification that is true for its arrays alone.
    last = lambda model: model.layers[-1]
    with_new_layer = ft.partial(eqx.tree_at, last, replace=eqx.nn.Linear(64, 2, key=layer_key))
    model = with_new_layer(reader)
    nothing = jtu.tree_map(lambda _: False, model)
    spec = eqx.tree_at(lambda spec: (last(spec).weight, last(spec).bias), nothing, replace=(True, True))
    odd = lambda model: accuracy(model, held_images, held_labels % 2).item()
    print(f"odd or even, a new last layer: held-out accuracy {odd(model):.4f}")

    few = list(batches(images[:100], labels[:100] % 2, args.steps, args.seed + 1))
    by_spec, by_parts = train(model, spec, few), train_part(model, spec, few)
    for way, trained in {"filter_grad(arg=spec)": by_spec, "partition(model, spec)": by_parts}.items():
        kept = eqx.tree_equal(eqx.filter(trained, spec, inverse=True), eqx.filter(model, spec, inverse=True))
        print(f"  trained by {way}: {odd(trained):.4f}, all else as it was: {bool(kept)}")
    print("  both ways the same, bit for bit:", bool(eqx.tree_equal(by_spec, by_parts)))
    print(f"  on layers that never learned: {odd(train(with_new_layer(untrained), spec, few)):.4f}")


if __name__ == "__main__":
    main()
