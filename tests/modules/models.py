# SPDX-License-Identifier: Apache-2.0
"""Small modules that several test files share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

import tether
from tether import nn


class Counter(tether.Module):
    def __init__(self):
        self.calls = tether.State(0)

    def __call__(self, x: Any) -> Any:
        self.calls = self.calls + 1
        return x


class Net(tether.Module):
    def __init__(self):
        self.scale = tether.Param(jnp.full((2,), 2.0))
        self.layers = [Counter(), nn.Linear(2, 2)]
        self.by_name = {"b": Counter(), "a": tether.Param(jnp.ones(3))}
        self.power = 2

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale) ** self.power


class Held(tether.Module):
    """Holds whatever it is given."""

    def __init__(self, part: Any):
        self.part = part
