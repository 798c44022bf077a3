# SPDX-License-Identifier: Apache-2.0
"""The training steps in Flax NNX, images channels last, as that library has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.peers import setup


class Block(nnx.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs):
        conv = lambda a, b, k, s, pad: nnx.Conv(a, b, (k, k), strides=s, padding=pad, use_bias=False, rngs=rngs)
        norm = lambda: nnx.BatchNorm(outputs, momentum=0.9, epsilon=1e-5, rngs=rngs)
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride, 1), norm()
        self.conv2, self.bn2 = conv(outputs, outputs, 3, 1, 1), norm()
        self.down = nnx.Sequential(conv(inputs, outputs, 1, stride, 0), norm()) if stride > 1 else None

    def __call__(self, x: Any) -> Any:
        h = nnx.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return nnx.relu(h + (x if self.down is None else self.down(x)))


class ResNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(3, 64, (7, 7), strides=2, padding=3, use_bias=False, rngs=rngs)
        self.bn1 = nnx.BatchNorm(64, momentum=0.9, epsilon=1e-5, rngs=rngs)
        widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        widths += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
        self.blocks = nnx.List([Block(*width, rngs) for width in widths])
        self.fc = nnx.Linear(512, setup.CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((1, 2)))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        width = setup.WIDTH
        self.ln_1, self.ln_2 = (nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.attn = nnx.MultiHeadAttention(setup.HEADS, width, decode=False, deterministic=True, rngs=rngs)
        self.c_fc, self.c_proj = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: Any, mask: Any) -> Any:
        x = x + self.attn(self.ln_1(x), mask=mask)
        return x + self.c_proj(nnx.gelu(self.c_fc(self.ln_2(x))))


class GPT2(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.wte, self.wpe = (nnx.Embed(size, setup.WIDTH, rngs=rngs) for size in (setup.VOCABULARY, setup.LENGTH))
        self.h = nnx.List([Layer(rngs) for _ in range(setup.LAYERS)])
        self.ln_f = nnx.LayerNorm(setup.WIDTH, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        x = self.wte(ids) + self.wpe(jnp.arange(ids.shape[1]))
        mask = nnx.make_causal_mask(ids)
        for layer in self.h:
            x = layer(x, mask)
        return self.wte.attend(self.ln_f(x))


class LSTM(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(setup.FEATURES, setup.HIDDEN, rngs=rngs))
        self.head = nnx.Linear(setup.HIDDEN, setup.CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.rnn(x)[:, -1])


def step(name: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A training step, and what compiles it."""
    model = {"ResNet-18": ResNet, "GPT-2": GPT2, "LSTM": LSTM}[name](nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    x, y = setup.data(name)
    x = jnp.moveaxis(x, 1, -1) if name == "ResNet-18" else x

    def train(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda model: setup.loss(model(x), y))(model)
        optimizer.update(model, grads)
        return value

    compiled = nnx.jit(train)
    return lambda: compiled(model, optimizer, x, y), lambda: compiled.lower(model, optimizer, x, y).compile()
