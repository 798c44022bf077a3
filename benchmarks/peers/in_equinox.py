# SPDX-License-Identifier: Apache-2.0
"""The training steps in Equinox: models of one example, mapped over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.peers import setup


class Block(eqx.Module):
    conv1: Any
    bn1: Any
    conv2: Any
    bn2: Any
    down: Any

    def __init__(self, inputs: int, outputs: int, stride: int, key: Any):
        keys = jax.random.split(key, 3)
        norm = lambda: eqx.nn.BatchNorm(outputs, "batch", mode="batch", momentum=0.9)
        self.conv1 = eqx.nn.Conv2d(inputs, outputs, 3, stride, 1, use_bias=False, key=keys[0])
        self.conv2 = eqx.nn.Conv2d(outputs, outputs, 3, 1, 1, use_bias=False, key=keys[1])
        self.bn1, self.bn2 = norm(), norm()
        conv = lambda: eqx.nn.Conv2d(inputs, outputs, 1, stride, use_bias=False, key=keys[2])
        self.down = (conv(), norm()) if stride > 1 else None

    def __call__(self, x: Any, state: Any) -> Any:
        h, state = self.bn1(self.conv1(x), state)
        h, state = self.bn2(self.conv2(jax.nn.relu(h)), state)
        if self.down is not None:
            x, state = self.down[1](self.down[0](x), state)
        return jax.nn.relu(h + x), state


class ResNet(eqx.Module):
    conv1: Any
    bn1: Any
    pool: Any
    blocks: list
    fc: Any

    def __init__(self, key: Any):
        keys = jax.random.split(key, 10)
        self.conv1 = eqx.nn.Conv2d(3, 64, 7, 2, 3, use_bias=False, key=keys[8])
        self.bn1, self.pool = eqx.nn.BatchNorm(64, "batch", mode="batch", momentum=0.9), eqx.nn.MaxPool2d(3, 2, 1)
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = [Block(*width, key) for width, key in zip(widths, keys, strict=False)]
        self.fc = eqx.nn.Linear(512, setup.CLASSES, key=keys[9])

    def __call__(self, x: Any, state: Any) -> Any:
        x, state = self.bn1(self.conv1(x), state)
        x = self.pool(jax.nn.relu(x))
        for block in self.blocks:
            x, state = block(x, state)
        return self.fc(x.mean((1, 2))), state


class Layer(eqx.Module):
    ln_1: Any
    attn: Any
    ln_2: Any
    c_fc: Any
    c_proj: Any

    def __init__(self, key: Any):
        width, keys = setup.WIDTH, jax.random.split(key, 3)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attn = eqx.nn.MultiheadAttention(setup.HEADS, width, **biases, key=keys[0])
        self.ln_1, self.ln_2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.c_fc = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.c_proj = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x: Any, mask: Any) -> Any:
        h = jax.vmap(self.ln_1)(x)
        x = x + self.attn(h, h, h, mask)
        return x + jax.vmap(lambda row: self.c_proj(jax.nn.gelu(self.c_fc(self.ln_2(row)))))(x)


class GPT2(eqx.Module):
    wte: Any
    wpe: Any
    h: list
    ln_f: Any

    def __init__(self, key: Any):
        keys = jax.random.split(key, setup.LAYERS + 2)
        self.wte = eqx.nn.Embedding(setup.VOCABULARY, setup.WIDTH, key=keys[-1])
        self.wpe = eqx.nn.Embedding(setup.LENGTH, setup.WIDTH, key=keys[-2])
        self.h = [Layer(key) for key in keys[:-2]]
        self.ln_f = eqx.nn.LayerNorm(setup.WIDTH)

    def __call__(self, ids: Any, state: Any) -> Any:
        x = self.wte.weight[ids] + self.wpe.weight[: ids.size]
        mask = jnp.tril(jnp.ones((ids.size, ids.size), bool))
        for layer in self.h:
            x = layer(x, mask)
        return jax.vmap(self.ln_f)(x) @ self.wte.weight.T, state


class LSTM(eqx.Module):
    cell: Any
    head: Any

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        self.cell = eqx.nn.LSTMCell(setup.FEATURES, setup.HIDDEN, key=keys[0])
        self.head = eqx.nn.Linear(setup.HIDDEN, setup.CLASSES, key=keys[1])

    def __call__(self, x: Any, state: Any) -> Any:
        begin = (jnp.zeros(setup.HIDDEN), jnp.zeros(setup.HIDDEN))
        (h, _), _ = jax.lax.scan(lambda carry, row: (self.cell(row, carry), None), begin, x)
        return self.head(h), state


def step(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A training step, and what compiles it."""
    make = {"ResNet-18": ResNet, "GPT-2": GPT2, "LSTM": LSTM}[name]
    model, state = eqx.nn.make_with_state(make)(jax.random.key(0))
    tx = optax.adam(1e-3)
    x, y = setup.data(name)

    def loss(model: Any, state: Any, x: Any, y: Any) -> Any:
        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return setup.loss(out, y), state

    @eqx.filter_jit
    def train(model: Any, state: Any, opt_state: Any, x: Any, y: Any) -> Any:
        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state, x, y)
        updates, opt_state = tx.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), state, opt_state, value

    held = [model, state, tx.init(eqx.filter(model, eqx.is_inexact_array))]

    def run() -> Any:
        *held[:], value = train(*held, x, y)
        return value

    return run, lambda: train.lower(*held, x, y).compile()
