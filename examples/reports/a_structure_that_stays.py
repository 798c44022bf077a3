# SPDX-License-Identifier: Apache-2.0
"""A structure that stays.

The report: stages placed on devices by hand, each mapped by ``jax.vmap`` with a named axis; the first call of a stage
replaced what its state held, so that the tree had another structure than before, and no two steps could be compared
or subtracted. And two questions: why does the output move although no parameter does, and which leaves are the
trainable parameters? Here two stages run ten times, the second one from the third time on, in both modes of
BatchNorm. Outputs and statistics are compared with NumPy.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tether import nn

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)  # two devices on one host; JAX makes them at their first use, below

DECAY, EPS = 0.9, 1e-5  # BatchNorm's defaults


def check(what: str, holds: bool) -> None:
    print(f"  {'yes' if holds else 'NO'}  {what}")
    if not holds:
        sys.exit(f"{sys.argv[0]}: this should hold: {what}")


class StageByHand:
    """Linear and BatchNorm in NumPy: the same sums, and statistics that are two arrays and a counter."""

    def __init__(self, stage, mode):
        self.mode, self.seen = mode, 0
        self.weight, self.bias = (np.asarray(p, np.float64) for p in (stage[0].weight, stage[0].bias))
        self.mean, self.var = np.zeros(4), np.ones(4)

    def __call__(self, x):
        h = np.asarray(x, np.float64) @ self.weight.T + self.bias
        old = 0 if self.mode == "ema" and self.seen == 0 else DECAY  # the first batch of "ema" initializes
        self.mean = old * self.mean + (1 - old) * h.mean(0)
        self.var = old * self.var + (1 - old) * h.var(0)
        self.seen += 1
        mean, var = (self.mean, self.var) if self.mode == "ema" else (h.mean(0), h.var(0))
        return (h - mean) / np.sqrt(var + EPS)


def anatomy(stage):
    """All that must not change: number, order, shapes and dtypes of the leaves, and the treedef."""
    leaves, treedef = jax.tree.flatten(stage)
    return [(leaf.shape, leaf.dtype) for leaf in leaves], treedef


def same_statistics(stage, by_hand):
    pairs = (stage[1].mean, by_hand.mean), (stage[1].var, by_hand.var)
    return all(np.allclose(*pair, atol=1e-5) for pair in pairs)


def make(mode, devices):
    k1, k2 = jax.random.split(jax.random.key(0))
    first = nn.Sequential([nn.Linear(3, 4, key=k1), nn.BatchNorm(4, axis_name="batch", mode=mode)])
    second = nn.Sequential([nn.Linear(4, 4, key=k2), nn.BatchNorm(4, axis_name="batch", mode=mode)])
    tether.place(first, devices[0])
    tether.place(second, devices[1])
    return first, second


def ten_times(mode, devices):
    """The stages run ten times on one batch, the second from the third time on."""
    print(f'\nmode="{mode}": ten times the same batch, the second stage from the third time on')
    x = jax.random.normal(jax.random.key(1), (32, 3))
    stages = make(mode, devices)
    by_hand = [StageByHand(stage, mode) for stage in stages]
    born = [anatomy(stage) for stage in stages]
    born_params = tether.snapshot([tether.filter(stage, tether.Param) for stage in stages])
    outputs, close, whole, subtracted, at_home = [], [], [], [], []
    for time in range(1, 11):
        before = tether.snapshot(stages)
        hidden = jax.vmap(stages[0], axis_name="batch")(jax.device_put(x, devices[0]))
        hidden_by_hand = by_hand[0](x)
        close.append(np.allclose(hidden, hidden_by_hand, atol=1e-5))
        if time >= 3:
            y = jax.vmap(stages[1], axis_name="batch")(jax.device_put(hidden, devices[1]))
            close.append(np.allclose(y, by_hand[1](hidden_by_hand), atol=1e-4))
            outputs.append(np.asarray(y))
        whole += [anatomy(stage) == shape for stage, shape in zip(stages, born, strict=True)]
        moved = [jax.tree.map(jnp.subtract, now, then) for now, then in zip(stages, before, strict=True)]
        subtracted += [anatomy(change) == shape for change, shape in zip(moved, born, strict=True)]
        for stage, device in zip(stages, devices, strict=True):
            at_home += [leaf.devices() == {device} for leaf in jax.tree.leaves(stage)]
        if time in (1, 2, 3, 10):
            largest = [float(max(jnp.abs(c[1].mean).max(), jnp.abs(c[1].var).max())) for c in moved]
            print(f"  time {time:2d}: the statistics moved by up to {largest[0]:.4f} and {largest[1]:.4f}")

    check("leaves (number, order, shapes, dtypes) and treedefs never changed", all(whole))
    check("jax.tree.map(jnp.subtract, now, before) worked each time, and has that structure too", all(subtracted))
    check("every value of a stage stayed on its device", all(at_home))
    check("every output is that of NumPy", all(close))
    check("so are the statistics", all(same_statistics(*pair) for pair in zip(stages, by_hand, strict=True)))
    if mode == "batch":
        check("the same batch gave the same output every time", all((y == outputs[0]).all() for y in outputs))
    params = [tether.filter(stage, tether.Param) for stage in stages]
    same = tether.tree_equal(params, born_params)
    check("the trainable parameters, tether.filter(stage, tether.Param), never changed", same)
    names = [f"{path} {variable.value.shape}" for path, variable in tether.variables(stages[0], tether.Param).items()]
    print("  in the first stage they are", ", ".join(names))


def why_the_output_moves(devices):
    print('\nmode="ema", and the batch changes: a, then b, then a again')
    stage = make("ema", devices)[0]
    run = jax.vmap(stage, axis_name="batch")
    a = jax.device_put(jax.random.normal(jax.random.key(2), (32, 3)), devices[0])
    b = 3 * jax.device_put(jax.random.normal(jax.random.key(3), (32, 3)), devices[0]) + 1
    h = np.asarray(jax.vmap(stage[0])(a))

    first = run(a)
    mean, var = np.asarray(stage[1].mean), np.asarray(stage[1].var)
    initialized = np.allclose(mean, h.mean(0), atol=1e-5) and np.allclose(var, h.var(0), atol=1e-5)
    check("the first batch initializes the statistics: they are those of a alone", initialized)
    check("the same batch again leaves the output as it was", np.allclose(first, run(a), atol=1e-5))
    params = tether.snapshot(tether.filter(stage, tether.Param))
    run(b)
    third = run(a)
    check("after b, the output of a is another", jnp.abs(third - first).max() > 0.1)
    check("no parameter changed", tether.tree_equal(tether.filter(stage, tether.Param), params))
    print("  Why: this mode normalizes a batch by the running statistics, and those remember b:")
    print(f"  each is {DECAY} times what it was, and {1 - DECAY:.1f} times the batch's own.")
    print(
        f"  In the first channel the variance of a is {h.var(0)[0]:.2f}. Then a was normalized by {var[0]:.2f}, now by"
    )
    print(f"  {stage[1].var[0]:.2f}, and so its output moved by up to {jnp.abs(third - first).max():.2f}.")
    print('  Where earlier batches should not count, take mode="batch"; or evaluate, which changes nothing:')
    evaluating = jax.vmap(stage.eval(), axis_name="batch")
    check("in evaluation a gives the same output twice", bool((evaluating(a) == evaluating(a)).all()))


if __name__ == "__main__":
    devices = jax.devices()
    print(f'{len(devices)} devices; each stage is a Linear and a BatchNorm(4, axis_name="batch")')
    for mode in ("batch", "ema"):
        ten_times(mode, devices)
    why_the_output_moves(devices)
