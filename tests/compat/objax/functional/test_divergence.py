# SPDX-License-Identifier: Apache-2.0
"""The divergence against float64 NumPy."""

import jax.numpy as jnp
import numpy as np

import tether.compat.objax as objax


def test_kl_is_the_sum_over_outcomes():
    p, q = np.array([0.5, 0.25, 0.25, 0.0]), np.array([0.25, 0.25, 0.0, 0.5])
    for eps in (2**-17, 0.1):
        expected = (p * np.log((p + eps) / (q + eps))).sum()
        got = objax.functional.divergence.kl(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), eps)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert float(objax.functional.divergence.kl(jnp.asarray(p, jnp.float32), jnp.asarray(p, jnp.float32))) == 0
