# SPDX-License-Identifier: Apache-2.0
"""Equinox code: training stops halfway, goes to a file with its settings, and goes on from there bit for bit.

On Equinox 0.9 itself the skeleton has to be a model, because a shape is left as it is, and BatchNorm's states count
among the moments.
"""

import argparse
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
from sklearn.datasets import load_digits

import tether.compat.equinox as eqx


class Net(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.experimental.BatchNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, width, rate, *, key):
        hidden_key, out_key = jr.split(key)
        self.hidden = eqx.nn.Linear(64, width, key=hidden_key)
        self.norm = eqx.experimental.BatchNorm(width, axis_name="batch")
        self.dropout = eqx.nn.Dropout(rate)
        self.out = eqx.nn.Linear(width, 10, key=out_key)

    def __call__(self, x, *, key=None):
        return self.out(self.dropout(jax.nn.relu(self.norm(self.hidden(x))), key=key))


optim = optax.adamw(2e-3)


def start(settings):
    """All that training is made of: the model, the optimizer's state, the steps taken."""
    model = Net(settings["width"], settings["dropout"], key=jr.PRNGKey(settings["seed"]))
    return model, optim.init(eqx.filter(model, eqx.is_inexact_array)), 0


def save(path, settings, training):
    model, opt_state, step = training
    with open(path, "wb") as file:
        file.write(json.dumps(settings).encode() + b"\n")
        eqx.tree_serialise_leaves(file, (model, jtu.tree_leaves(opt_state), step))


def load(path):
    with open(path, "rb") as file:
        settings = json.loads(file.readline())
        model, opt_state, step = eqx.filter_eval_shape(start, settings)  # shapes, which take no time and no memory
        like = model, jtu.tree_leaves(opt_state), step
        model, moments, step = eqx.tree_deserialise_leaves(file, like)
    # A loaded BatchNorm has a StateIndex of its own, which belongs to the structure of what is made for the model.
    structure = jtu.tree_structure(optim.init(eqx.filter(model, eqx.is_inexact_array)))
    return settings, (model, jtu.tree_unflatten(structure, moments), step)


@eqx.filter_value_and_grad
def loss_and_grad(model, x, y, keys):
    logits = jax.vmap(lambda x, key: model(x, key=key), axis_name="batch")(x, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@eqx.filter_jit
def make_step(model, opt_state, x, y, key):
    loss, grads = loss_and_grad(model, x, y, jr.split(key, len(x)))
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return loss, eqx.apply_updates(model, updates), opt_state


@eqx.filter_jit
def logits(model, x):
    return jax.vmap(model, axis_name="batch")(x)


def train(training, settings, images, labels, until):
    """Goes on from where ``training`` is; each step's batch and dropout are functions of its number."""
    model, opt_state, step = training
    loss = None
    while step < until:
        key = jr.fold_in(jr.PRNGKey(settings["seed"]), step)
        batch = np.random.default_rng((settings["seed"], step)).integers(0, len(images), 64)
        loss, model, opt_state = make_step(model, opt_state, images[batch], labels[batch], key)
        step += 1
    print(f"step {step}: loss {loss.item():.4f}")
    return model, opt_state, step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="the file to write; otherwise one in a temporary folder")
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train_part, held = order[:1437], order[1437:]
    data = images[train_part], labels[train_part]

    settings = {"width": 64, "dropout": 0.2, "seed": args.seed}
    training = train(start(settings), settings, *data, until=args.steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        path = args.path or Path(folder) / "training.eqx"
        save(path, settings, training)
        print(f"written: {path.stat().st_size} bytes")
        settings, loaded = load(path)
    print(f"loaded at step {loaded[2]}, settings {settings}")

    straight = train(training, settings, *data, until=args.steps)
    resumed = train(loaded, settings, *data, until=args.steps)
    same = eqx.tree_equal(jtu.tree_leaves(straight), jtu.tree_leaves(resumed))
    one, two = (logits(eqx.tree_inference(model, True), images[held]) for model, *_ in (straight, resumed))
    print(f"held-out accuracy {jnp.mean(two.argmax(axis=1) == labels[held]).item():.4f}")
    print("went on bit for bit: weights and moments", bool(same), "and running statistics", bool((one == two).all()))


if __name__ == "__main__":
    main()
