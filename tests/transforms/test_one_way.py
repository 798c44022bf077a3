# SPDX-License-Identifier: Apache-2.0
"""Arrays that refuse one direction, in every way in which JAX differentiates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tether._transforms._one_way import forward_only, reverse_only


class Refused(Exception):
    pass


def error() -> Refused:
    return Refused("this way")


def cubed(mark):
    """x^3 + n, of an integer n; x is marked on the way."""

    def fun(x, n=2):
        x, n = mark([x, n], error)
        return x**3 + n

    return fun


REVERSE, FORWARD = cubed(reverse_only), cubed(forward_only)
X = jnp.arange(1.0, 4.0)

ALLOWED = {
    "value": (lambda: REVERSE(2.0), 10.0),
    "grad": (lambda: jax.grad(REVERSE)(2.0), 12.0),
    "grad of jit": (lambda: jax.grad(jax.jit(REVERSE))(2.0), 12.0),
    "vmap of grad": (lambda: jax.jit(jax.vmap(jax.grad(REVERSE)))(X), 3 * X**2),
    "grad of vmap": (lambda: jax.grad(lambda x: jax.vmap(REVERSE)(x).sum())(X), 3 * X**2),
    "grad in scan": (
        lambda: jax.grad(lambda x: jax.lax.scan(lambda c, _: (REVERSE(c, 0), None), x, length=2)[0])(2.0),
        9 * 2.0**8,
    ),
    "jacrev": (lambda: jax.jacrev(jax.vmap(REVERSE))(X), jnp.diag(3 * X**2)),
    "jvp": (lambda: jax.jvp(FORWARD, (2.0,), (1.0,))[1], 12.0),
    "jvp in jit": (lambda: jax.jit(lambda x: jax.jvp(FORWARD, (x,), (x,))[1])(2.0), 24.0),
    "jacfwd": (lambda: jax.jit(jax.jacfwd(jax.vmap(FORWARD)))(X), jnp.diag(3 * X**2)),
    "jvp of jvp": (lambda: jax.jacfwd(jax.jacfwd(FORWARD))(2.0), 12.0),
    "another argument": (lambda: jax.jvp(lambda y: y * REVERSE(2.0), (2.0,), (1.0,))[1], 10.0),
    "stopped": (lambda: jax.grad(lambda x: jax.lax.stop_gradient(FORWARD(x)) * x)(2.0), 10.0),
}

REFUSED = {
    "jvp": lambda: jax.jvp(REVERSE, (2.0,), (1.0,)),
    "jvp in jit": lambda: jax.jit(lambda x: jax.jvp(REVERSE, (x,), (x,))[1])(2.0),
    "jvp of jit": lambda: jax.jvp(jax.jit(REVERSE), (2.0,), (1.0,)),
    "jacfwd in jit": lambda: jax.jit(jax.jacfwd(jax.vmap(REVERSE)))(X),
    "linearize": lambda: jax.linearize(REVERSE, 2.0)[1](1.0),
    "grad": lambda: jax.grad(FORWARD)(2.0),
    "grad in jit": lambda: jax.jit(jax.grad(jax.jit(FORWARD)))(2.0),
    "vmap of grad": lambda: jax.vmap(jax.grad(FORWARD))(X),
    "grad of jvp": lambda: jax.grad(lambda x: jax.jvp(FORWARD, (x,), (1.0,))[1])(2.0),
}


@pytest.mark.parametrize("case", list(ALLOWED))
def test_allowed(case):
    call, expected = ALLOWED[case]
    np.testing.assert_allclose(call(), expected, rtol=1e-6)


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused(case):
    with pytest.raises(Refused, match="this way"):
        REFUSED[case]()
