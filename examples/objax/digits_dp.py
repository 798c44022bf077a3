# SPDX-License-Identifier: Apache-2.0
"""Objax code: training with differential privacy, each example's gradient clipped and noise added to their mean."""

import argparse

import numpy as np
from sklearn.datasets import load_digits

import tether.compat.objax as objax


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--noise", type=float, default=1.1)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 8 - 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]

    objax.random.DEFAULT_GENERATOR.seed(0)
    model = objax.nn.Sequential(
        [
            objax.nn.Conv2D(1, 8, 3),
            objax.functional.tanh,
            objax.functional.average_pool_2d,
            objax.functional.flatten,
            objax.nn.Linear(128, 10),
        ]
    )
    sgd = objax.optimizer.SGD(model.vars())

    @objax.Function.with_vars(model.vars())
    def loss(x, label):
        return objax.functional.loss.cross_entropy_logits(model(x), label).mean()

    private = objax.privacy.dpsgd.PrivateGradValues(
        loss, model.vars(), args.noise, args.clip, microbatch=1, batch_axis=(0, 0)
    )

    @objax.Function.with_vars(model.vars() + private.vars() + sgd.vars())
    def train_op(x, label):
        gradients, values = private(x, label)
        sgd(0.5, gradients)
        return values

    train_op, predict = objax.Jit(train_op), objax.Jit(model)
    random = np.random.default_rng(1)
    for step in range(1, args.steps + 1):
        batch = train[random.integers(0, len(train), args.batch)]
        value = train_op(images[batch], np.asarray(objax.functional.one_hot(labels[batch], 10)))[0]
        if step % (args.steps // 4) == 0:
            accuracy = (np.asarray(predict(images[test])).argmax(1) == labels[test]).mean()
            epsilon = objax.privacy.dpsgd.analyze_dp(args.batch / len(train), args.noise, step, delta=1e-5)
            print(f"step {step}: loss {float(value):.4f}, held-out accuracy {accuracy:.4f}, epsilon {epsilon:.3f}")


if __name__ == "__main__":
    main()
