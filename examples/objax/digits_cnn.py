# SPDX-License-Identifier: Apache-2.0
"""Objax code: a small convolutional network learns handwritten digits, with averaged weights and checkpoints.

Nothing but the import line and the source of the data would be different on Objax itself.
"""

import argparse
import tempfile

import numpy as np
from sklearn.datasets import load_digits

import tether.compat.objax as objax
from tether.compat.objax.functional.loss import cross_entropy_logits_sparse
from tether.compat.objax.util import EasyDict


def data():
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 8 - 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return EasyDict(image=images[train], label=labels[train]), EasyDict(image=images[test], label=labels[test])


class Net(objax.Module):
    def __init__(self, nclass, n):
        conv = lambda nin, nout: [objax.nn.Conv2D(nin, nout, k=3), objax.nn.BatchNorm2D(nout, momentum=0.9)]
        self.block1 = objax.nn.Sequential([*conv(1, n), objax.functional.leaky_relu, objax.functional.max_pool_2d])
        self.block2 = objax.nn.Sequential([*conv(n, 2 * n), objax.functional.leaky_relu, objax.nn.Dropout(0.8)])
        self.last = objax.nn.Conv2D(2 * n, nclass, k=3)

    def __call__(self, x, training):
        y = self.block2(self.block1(x, training=training), training=training)
        return self.last(y).mean((2, 3))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    train, test = data()
    objax.random.DEFAULT_GENERATOR.seed(0)
    model = Net(nclass=10, n=16)
    average = objax.optimizer.ExponentialMovingAverage(model.vars(), momentum=0.95, debias=True)
    adam = objax.optimizer.Adam(model.vars())

    def loss(x, y):
        cross_entropy = cross_entropy_logits_sparse(model(x, training=True), y).mean()
        decay = 0.5 * sum((v.value**2).sum() for name, v in model.vars().items() if name.endswith(".w"))
        return cross_entropy + 1e-4 * decay, {"cross entropy": cross_entropy, "decay": decay}

    gradient = objax.GradValues(loss, model.vars())

    @objax.Function.with_vars(model.vars() + gradient.vars() + adam.vars() + average.vars())
    def train_op(x, y):
        gradients, values = gradient(x, y)
        adam(2e-3, gradients)
        average()
        return values

    train_op = objax.Jit(train_op)
    predict = objax.Jit(average.replace_vars(lambda x: model(x, training=False)), model.vars() + average.vars())

    def accuracy(part):
        return float((np.asarray(predict(part.image)).argmax(1) == part.label).mean())

    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = objax.io.Checkpoint(folder, keep_ckpts=2)
        for epoch in range(1, args.epochs + 1):
            order = random.permutation(len(train.image))
            for start in range(0, len(order) - args.batch + 1, args.batch):
                batch = order[start : start + args.batch]
                values = train_op(train.image[batch], train.label[batch])
            print(f"epoch {epoch}: loss {float(values[0]):.4f}, held-out accuracy {accuracy(test):.4f}")
            checkpoint.save(model.vars() + average.vars(), epoch)
        before = accuracy(test)
        for variable in model.vars():
            variable.assign(variable.value * 0)
        checkpoint.restore(model.vars() + average.vars())
        print("restored:", accuracy(test) == before)


if __name__ == "__main__":
    main()
