# SPDX-License-Identifier: Apache-2.0
"""The tools together, as one uses them: a NaN that only the way back makes, in a step that compiles once."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import tether
from tether import debug
from tether.errors import CheckError


def test_nan_of_a_training_step_is_found(capsys):
    class Norm(tether.Module):
        def __init__(self):
            self.scale, self.calls = tether.Param(1.0), tether.State(0)

        def __call__(self, x):
            self.calls = self.calls + 1
            x = debug.announce_transform(debug.backward_nan(self.scale * x, "scaled"), "x")
            return jnp.sqrt((x**2).sum())

    norm = Norm()

    @tether.jit
    @debug.assert_max_traces(max_traces=1)
    def step(x):
        return tether.grad(lambda norm: norm(x))(norm).scale

    assert float(step(jnp.asarray([3.0, 4.0]))) == 5.0
    with pytest.raises(CheckError, match=r"of scaled has a NaN\.\n  at:       the module itself  \(Norm\)"):
        step(jnp.zeros(2))  # the slope of the root at 0
    assert int(norm.calls) == debug.get_num_traces(step) == 1
    announced, *_, value, gradient = capsys.readouterr().out.splitlines()
    assert announced == "x: float32[2] in tether.jit, tether.grad"
    assert "[0., 0.]" in value and "[nan, nan]" in gradient
