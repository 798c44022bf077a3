# SPDX-License-Identifier: Apache-2.0
"""Equinox code: a convolutional network learns handwritten digits, one example at a time under a vmap.

Nothing but the import line would be different on Equinox 0.9 itself. The digits are scikit-learn's, in place of MNIST.
"""

import argparse

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from sklearn.datasets import load_digits

import tether.compat.equinox as eqx


def data():
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 8 - 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return (images[train], labels[train]), (images[test], labels[test])


class Block(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    pool: eqx.nn.MaxPool2d

    def __init__(self, nin, nout, *, key):
        self.conv = eqx.nn.Conv2d(nin, nout, kernel_size=3, padding=1, key=key)
        self.norm = eqx.nn.GroupNorm(groups=4, channels=nout)
        self.pool = eqx.nn.MaxPool2d(kernel_size=2, stride=2)

    def __call__(self, x):
        return self.pool(jax.nn.relu(self.norm(self.conv(x))))


class CNN(eqx.Module):
    blocks: list
    dropout: eqx.nn.Dropout
    head: eqx.nn.MLP

    def __init__(self, *, key):
        key1, key2, key3 = jr.split(key, 3)
        self.blocks = [Block(1, 16, key=key1), Block(16, 32, key=key2)]
        self.dropout = eqx.nn.Dropout(0.3)
        self.head = eqx.nn.MLP(32 * 2 * 2, 10, width_size=64, depth=1, key=key3)

    def __call__(self, x, *, key=None):
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.ravel(), key=key))


@eqx.filter_value_and_grad
def loss_and_grad(model, x, y, keys):
    logits = jax.vmap(lambda x, key: model(x, key=key))(x, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@eqx.filter_jit
def predict(model, x):
    return jax.vmap(model)(x).argmax(axis=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    (images, labels), (held_images, held_labels) = data()
    model_key, dropout_key = jr.split(jr.PRNGKey(args.seed))
    model = CNN(key=model_key)
    optim = optax.adam(2e-3)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, opt_state, x, y, key):
        loss, grads = loss_and_grad(model, x, y, jr.split(key, len(x)))
        updates, opt_state = optim.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    random = np.random.default_rng(args.seed)
    for step in range(1, args.steps + 1):
        batch = random.integers(0, len(images), args.batch)
        key = jr.fold_in(dropout_key, step)
        loss, model, opt_state = make_step(model, opt_state, images[batch], labels[batch], key)
        if step % max(1, args.steps // 4) == 0:
            guesses = predict(eqx.tree_inference(model, True), held_images)
            accuracy = float(jnp.mean(guesses == held_labels))
            print(f"step {step}: loss {loss.item():.4f}, held-out accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
