# SPDX-License-Identifier: Apache-2.0
"""Objax code: weights from which one step of gradient descent fits a new sine; the gradient of a gradient (MAML)."""

import argparse

import jax.numpy as jn
import numpy as np

import tether.compat.objax as objax


def tasks(random, outer, inner):
    """Points (x, y) of ``outer`` sines, twice ``inner`` of each."""
    amplitude = random.uniform(0.1, 0.5, (outer, 1, 1))
    phase = random.uniform(0, np.pi, (outer, 1, 1))
    for _ in range(2):
        x = random.uniform(-5, 5, (outer, inner, 1)).astype(np.float32)
        yield x
        yield (amplitude * np.sin(x + phase)).astype(np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    objax.random.DEFAULT_GENERATOR.seed(0)
    relu = objax.functional.relu
    net = objax.nn.Sequential([objax.nn.Linear(1, 40), relu, objax.nn.Linear(40, 40), relu, objax.nn.Linear(40, 1)])
    adam = objax.optimizer.Adam(net.vars())

    @objax.Function.with_vars(net.vars())
    def loss(x, y):
        return ((y - net(x)) ** 2).mean()

    gradient = objax.GradValues(loss, net.vars())

    @objax.Function.with_vars(net.vars())
    def maml_loss(x1, y1, x2, y2, alpha=0.1):
        weights = net.vars()
        before = weights.tensors()
        weights.assign([w - alpha * g for w, g in zip(before, gradient(x1, y1)[0], strict=True)])
        after = loss(x2, y2)
        weights.assign(before)
        return after

    each_task = objax.Vectorize(maml_loss, batch_axis=(0, 0, 0, 0, None))

    @objax.Function.with_vars(each_task.vars())
    def batch_loss(x1, y1, x2, y2, alpha=0.1):
        return each_task(x1, y1, x2, y2, alpha).mean()

    maml_gradient = objax.GradValues(batch_loss, net.vars())

    @objax.Function.with_vars(net.vars() + adam.vars())
    def train_op(x1, y1, x2, y2):
        gradients, values = maml_gradient(x1, y1, x2, y2)
        adam(1e-3, gradients)
        return values[0]

    train_op = objax.Jit(train_op)
    random = np.random.default_rng(0)
    for step in range(1, args.steps + 1):
        value = train_op(*tasks(random, outer=8, inner=20))
        if step % (args.steps // 4) == 0:
            print(f"step {step}: loss after one step on a new task {float(value):.5f}")

    # A task that it has not met: a sine of amplitude 0.5, from 20 points.
    x = jn.linspace(-5, 5, 20).reshape((20, 1))
    y = 0.5 * jn.sin(x + 1)
    sgd = objax.optimizer.SGD(net.vars())
    losses = [float(loss(x, y))]
    for _ in range(3):
        sgd(0.1, gradient(x, y)[0])
        losses.append(float(loss(x, y)))
    print("a new task, before and after each step:", ", ".join(f"{value:.4f}" for value in losses))


if __name__ == "__main__":
    main()
