# SPDX-License-Identifier: Apache-2.0
"""A gradient taken twice.

The report: with a model that holds state (BatchNorm), the first gradient of a function that closes over it left
traced values behind in the running statistics, and the second one died of them. Here it is taken four times, twice
by ``tether.grad`` and twice by plain ``jax.grad``, each time of a fresh transformed function. Everything is compared
with hand-written JAX and NumPy.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tether import nn

DECAY, EPS = 0.9, 1e-5  # of the running statistics, and in the normalization: what BatchNorm has by default


def check(what: str, holds: bool) -> None:
    print(f"  {'yes' if holds else 'NO'}  {what}")
    if not holds:
        sys.exit(f"{sys.argv[0]}: this should hold: {what}")


def convolved(x, weight, bias):
    """The convolution by hand: [batch, 2, 10, 10] -> [batch, 4, 8, 8]."""
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(x, np.float64), (3, 3), axis=(2, 3))
    return np.einsum("bihwuv,oiuv->bohw", windows, np.asarray(weight, np.float64)) + np.asarray(bias)[:, None, None]


def moved(mean, var, h):
    """The running statistics after one more batch, by hand."""
    return DECAY * mean + (1 - DECAY) * h.mean((0, 2, 3)), DECAY * var + (1 - DECAY) * h.var((0, 2, 3))


def loss_by_hand(x, c, weight, bias, scale, shift):
    """The sum of c * BatchNorm(Conv(x)), in plain JAX: what the gradients below must equal."""
    h = jax.lax.conv_general_dilated(x, weight, (1, 1), "VALID") + bias[:, None, None]
    mean, var = h.mean((0, 2, 3), keepdims=True), h.var((0, 2, 3), keepdims=True)
    y = (h - mean) / jnp.sqrt(var + EPS) * scale[:, None, None] + shift[:, None, None]
    return jnp.sum(c * y)


def take_four(ell, x):
    """The gradient four times; after each, its name and value. ``grad(ell)`` is made anew each time."""
    for name, grad in [("tether.grad", tether.grad)] * 2 + [("jax.grad", jax.grad)] * 2:
        yield name, grad(ell)(x)


def ones() -> None:
    print("1. The program of the report: x is 512 times 2x10x10 ones, in float64 of NumPy.")
    mod = nn.Sequential([nn.Conv2d(2, 4, 3), nn.BatchNorm(4)])
    ell = lambda x: jnp.sum(mod(x, training=True))
    x = np.ones((512, 2, 10, 10))

    h = convolved(x, mod[0].weight, mod[0].bias)
    mean, var = np.zeros(4), np.ones(4)
    for number, (name, g) in enumerate(take_four(ell, x), 1):
        mean, var = moved(mean, var, h)
        print(f"gradient {number}, {name}:")
        # The batch is normalized to mean 0, whatever x is: the sum of it is constant, and its gradient zero.
        check("its shape is that of x, and it is zero up to rounding", g.shape == x.shape and jnp.abs(g).max() < 1e-3)
        check("mean moved as by hand", np.allclose(mod[1].mean, mean, rtol=1e-5, atol=1e-6))
        check("var moved as by hand", np.allclose(mod[1].var, var, rtol=1e-5, atol=1e-6))
        plain = [isinstance(v, jax.Array) and not isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(mod)]
        check("every value in the model is a plain array", all(plain) and len(plain) == 6)
    # Equal ones have no variance: what var began at, 1, is all that is left of it.
    print(f"var after four batches is {DECAY}^4 = {DECAY**4:.4f}:", *(f"{v:.4f}" for v in mod[1].var))


def random() -> None:
    print("\n2. The same with numbers in it: x is random, and the output is weighted by a random c before the sum.")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(512, 2, 10, 10)), jnp.float32)
    c = jnp.asarray(rng.normal(size=(512, 4, 8, 8)), jnp.float32)
    mod = nn.Sequential([nn.Conv2d(2, 4, 3), nn.BatchNorm(4)])
    ell = lambda x: jnp.sum(c * mod(x, training=True))

    h = convolved(x, mod[0].weight, mod[0].bias)
    expected = jax.grad(loss_by_hand)(x, c, mod[0].weight, mod[0].bias, mod[1].weight, mod[1].bias)
    print(f"the largest entry of the gradient by hand is {jnp.abs(expected).max():.1f}")
    mean, var = np.zeros(4), np.ones(4)
    for number, (name, g) in enumerate(take_four(ell, x), 1):
        mean, var = moved(mean, var, h)
        print(f"gradient {number}, {name}:")
        check("no entry is further than 1e-5 from hand-written JAX", jnp.abs(g - expected).max() <= 1e-5)
        statistics = np.allclose(mod[1].mean, mean, rtol=0, atol=1e-5), np.allclose(mod[1].var, var, rtol=0, atol=1e-5)
        check("mean and var are within 1e-5 of those by hand", all(statistics))


if __name__ == "__main__":
    tether.seed(0)
    # JAX raises if a traced value is alive when its trace is over: 0.10.2 for jit and vmap, 0.12 for grad as well.
    # So every value is looked at above, too.
    with jax.checking_leaks():
        ones()
        random()
    print("\nNothing leaked: all of it ran under jax.checking_leaks().")
