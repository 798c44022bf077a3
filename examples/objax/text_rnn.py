# SPDX-License-Identifier: Apache-2.0
"""Objax code: a recurrent network learns to write like a text, letter by letter: the license of this project."""

import argparse
from pathlib import Path

import jax.numpy as jn
import numpy as np

import tether.compat.objax as objax
from tether.compat.objax.functional import one_hot
from tether.compat.objax.zoo.rnn import RNN

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=24)
    args = parser.parse_args()
    text = " ".join(TEXT.read_text(encoding="utf-8").lower().split())
    letters = sorted(set(text))
    corpus = np.array([letters.index(letter) for letter in text], np.int32)

    objax.random.DEFAULT_GENERATOR.seed(0)
    model = RNN(128, len(letters), len(letters))
    model.init_state(args.batch)
    adam = objax.optimizer.Adam(model.vars())

    def loss(x, y):  # both of (batch, time)
        logits = model(one_hot(x.T, len(letters)))  # (time * batch, letters)
        return objax.functional.loss.cross_entropy_logits_sparse(logits, y.T.reshape((-1,))).mean()

    gradient = objax.GradValues(loss, model.vars())

    @objax.Function.with_vars(model.vars() + adam.vars())
    def train_op(x, y):
        model.init_state(args.batch)
        gradients, values = gradient(x, y)
        adam(2e-3, [jn.clip(g, -1, 1) for g in gradients])
        return values[0]

    train_op = objax.Jit(train_op)
    random = np.random.default_rng(0)
    for epoch in range(1, args.epochs + 1):
        starts = random.permutation(np.arange(random.integers(args.length), len(corpus) - args.length - 1, args.length))
        losses = []
        for first in range(0, len(starts) - args.batch + 1, args.batch):
            rows = starts[first : first + args.batch, None] + np.arange(args.length)
            losses.append(float(train_op(corpus[rows], corpus[rows + 1])))
        if epoch % max(1, args.epochs // 4) == 0:
            print(f"epoch {epoch}: {np.mean(losses):.4f} nats a letter, of {np.log(len(letters)):.4f} by chance")

    written = "the work"
    model.init_state(1)
    read = objax.Jit(
        lambda letter: model(one_hot(letter[None, None], len(letters)), only_return_final=True)[0].argmax()
    )
    for letter in written:
        following = read(jn.array(letters.index(letter)))
    for _ in range(60):
        written += letters[int(following)]
        following = read(following)
    print(written)


if __name__ == "__main__":
    main()
