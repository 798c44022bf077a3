# SPDX-License-Identifier: Apache-2.0
"""A whole program that says ``import equinox``, run unchanged; what all homes share is tested with Objax's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import equinox as eqx
import equinox.experimental as eqxe
from equinox import nn
import jax, jax.numpy as jnp

norm = eqxe.BatchNorm(1, axis_name="batch")
layer = nn.Linear(1, 1, key=jax.random.PRNGKey(0))
layer = eqx.tree_at(lambda l: (l.weight, l.bias), layer, (jnp.ones((1, 1)), jnp.ones(1)))

@eqx.filter_jit
@eqx.filter_value_and_grad
def loss(layer, x):
    return (jax.vmap(lambda x: norm(layer(x)), axis_name="batch")(x) ** 2).mean()

print(loss(layer, jnp.array([[0.0], [2.0]]))[0].round(3), norm.state_index.unsafe_get()[0][0])
print(eqx.__version__, layer, nn.Linear.__module__)
"""


def test_a_program(tmp_path: Path):
    (tmp_path / "p.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "tether.compat.equinox", "p.py"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    # The layer gives 1 and 3: their mean is 2, and they are normalized to -1 and 1.
    assert done.stdout.splitlines()[0] == "1.0 [2.]"
    assert done.stdout.splitlines()[1].startswith("0.9.2 Linear(")
    assert done.stdout.rstrip().endswith("tether.compat.equinox.nn.linear")
