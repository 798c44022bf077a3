# SPDX-License-Identifier: Apache-2.0
"""The training steps in Tether, of its own models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

import tether
from benchmarks.peers import setup
from tether import nn, zoo


class LSTM(tether.Module):
    def __init__(self, key: jax.Array):
        keys = jax.random.split(key)
        self.rnn = nn.RNN(nn.LSTMCell(setup.FEATURES, setup.HIDDEN, key=keys[0]))
        self.head = nn.Linear(setup.HIDDEN, setup.CLASSES, key=keys[1])

    def __call__(self, x: Any) -> Any:
        return self.head(self.rnn(x)[..., -1, :])


def make(name: str) -> Any:
    key = jax.random.key(0)
    if name == "ResNet-18":
        return zoo.resnet18(num_classes=setup.CLASSES, key=key)
    if name == "LSTM":
        return LSTM(key)
    sizes = (setup.VOCABULARY, setup.LENGTH, setup.WIDTH, setup.LAYERS, setup.HEADS)
    return zoo.GPT2(*sizes, dropout=0.0, key=key)


def step(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A training step, and what compiles it."""
    model = make(name)
    optimizer = tether.Optimizer(model, optax.adam(1e-3))
    x, y = setup.data(name)

    @tether.jit
    def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = tether.value_and_grad(lambda model: setup.loss(model(x), y))(model)
        optimizer.update(grads)
        return value

    return lambda: train(model, optimizer, x, y), lambda: train.lower(model, optimizer, x, y).compile()
