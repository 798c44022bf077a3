# SPDX-License-Identifier: Apache-2.0
"""jit and JAX's persistent compilation cache: another process finds the compiled program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import tether

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))


class Net(tether.Module):
    def __init__(self):
        self.parts = {name: tether.State(jnp.ones(3)) for name in "abc"}
        self.scale = lambda x: x * 2.0

    def __call__(self, x):
        self.parts = {name: part + x for name, part in self.parts.items()}
        return jax.lax.cond(x.sum() > 0, self.scale, lambda v: v, x)


@tether.jit(donate_state=True)
def step(model, x):
    return model(x).sum()


model, x = Net(), jnp.ones(3)
lowered = step.lower(model, x)
events.clear()
lowered.compile()
print(events.count("cache_hits"), events.count("cache_misses"))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    printed = []
    for seed in ("1", "2"):  # the order of a set of strings must not be in the program
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.split())
    assert printed == [["0", "1"], ["1", "0"]]
