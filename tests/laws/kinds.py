# SPDX-License-Identifier: Apache-2.0
"""The kinds of state that the laws are proved for: each as a module, and as plain JAX written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tether
from tether import nn

RNG = np.random.default_rng(3)
X, XS = RNG.normal(size=(4, 3)).astype(np.float32), RNG.normal(size=(2, 4, 3)).astype(np.float32)
OTHER, OTHERS = RNG.normal(size=(5, 3)).astype(np.float32), RNG.normal(size=(2, 5, 3)).astype(np.float32)
WEIGHTS = RNG.normal(size=(5, 3)).astype(np.float32)  # of the loss, else BatchNorm's gradient is zero
K = RNG.normal(size=(3, 3)).astype(np.float32)
EPS, DECAY, LANES = 1e-5, 0.9, 2

Values = dict[str, Any]


class Boom(Exception):
    pass


# The models, of the library.


class Task(tether.Module):
    """loss = sum(weights * net(x * scale)); counts its calls."""

    def __init__(self, net: tether.Module, scale: float = 1.0):
        self.net = net
        self.scale = tether.Param(scale * jnp.array([1.0, 0.5, 2.0]))
        self.calls = tether.State(0)

    def loss(self, x):
        self.calls = self.calls + 1
        y = (jnp.asarray(WEIGHTS[: x.shape[0]]) * self.net(x * self.scale[None])).sum()
        LOG.append("run")
        if LOG[0] == "fail":
            raise Boom
        return y


class Count(tether.Module):
    def __init__(self):
        self.count = tether.State(0)

    def __call__(self, h):
        self.count = self.count + 1
        return h * self.count.astype(h.dtype)


class Average(tether.Module):
    """Reads what it has just written: gradients flow through it."""

    def __init__(self):
        self.mean = tether.State(jnp.ones(3), reduce="mean")

    def __call__(self, h):
        self.mean = DECAY * self.mean + (1 - DECAY) * h.mean(0)
        return (h - self.mean[None]) ** 2


class Tied(tether.Module):
    def __init__(self):
        self.encoder = nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
        self.decoder = nn.Linear(3, 3, use_bias=False, key=jax.random.key(1))
        self.decoder.weight = tether.cell(self.encoder, "weight")
        self.encoder.weight = jnp.asarray(K)

    def __call__(self, h):
        return self.decoder(self.encoder(h))


LOG: list[str] = ["go"]  # whether the body fails, then one entry for each time it ran


# The same by hand. h is [batch, 3], for BatchNorm under vmap [lanes, batch, 3].


def batch_by_hand(state: Values, h: Any) -> tuple[Any, Values]:
    axes = tuple(range(h.ndim - 1))
    mean, var = h.mean(axes), h.var(axes)
    moved = [
        DECAY * state[f"net.{name}"] + (1 - DECAY) * jax.lax.stop_gradient(value)
        for name, value in (("mean", mean), ("var", var))
    ]
    y = (h - spread(mean, h)) / jnp.sqrt(spread(var, h) + EPS)
    y = y * spread(state["net.weight"], h) + spread(state["net.bias"], h)
    return y, {"net.mean": moved[0], "net.var": moved[1]}


def ema_by_hand(state: Values, h: Any) -> tuple[Any, Values]:
    axes = tuple(range(h.ndim - 1))
    first = state["net.count"] == 0
    mean, var = (
        jnp.where(first, new, DECAY * state[f"net.{name}"] + (1 - DECAY) * new)
        for name, new in (("mean", h.mean(axes)), ("var", h.var(axes)))
    )
    y = (h - spread(mean, h)) / jnp.sqrt(spread(var, h) + EPS)
    y = y * spread(state["net.weight"], h) + spread(state["net.bias"], h)
    kept = {"net.mean": jax.lax.stop_gradient(mean), "net.var": jax.lax.stop_gradient(var)}
    return y, {**kept, "net.count": state["net.count"] + 1}


def dropout_by_hand(state: Values, h: Any) -> tuple[Any, Values]:
    kept, drawn = jax.random.split(state["rng"])
    return jnp.where(jax.random.bernoulli(drawn, 0.5, h.shape), h / 0.5, 0.0), {"rng": kept}


def count_by_hand(state: Values, h: Any) -> tuple[Any, Values]:
    count = state["net.count"] + 1
    return h * count.astype(h.dtype), {"net.count": count}


def average_by_hand(state: Values, h: Any) -> tuple[Any, Values]:
    mean = DECAY * state["net.mean"] + (1 - DECAY) * h.mean(0)
    return (h - spread(mean, h)) ** 2, {"net.mean": mean}


def tied_by_hand(state: Values, h: Any) -> tuple[Any, Values]:
    return h @ state["net.encoder.weight"].T @ state["net.encoder.weight"].T, {}


def spread(value: Any, h: Any) -> Any:
    return value.reshape((1,) * (h.ndim - 1) + (3,))


@dataclass(frozen=True)
class Kind:
    """A kind of state.

    Args:
        make: Gives the network; for BatchNorm under vmap, the lanes are one batch.
        by_hand: The same as a function of its values.
        joint: Whether the lanes of a vmap over a shared model are one batch.
    """

    make: Callable[..., tether.Module]
    by_hand: Callable[[Values, Any], tuple[Any, Values]]
    joint: bool = False


def norm(mode: str) -> Callable[..., tether.Module]:
    return lambda axis=None: nn.BatchNorm(3, mode=mode, axis_name=axis, channel_axis=1)


KINDS = {
    "batchnorm": Kind(norm("batch"), batch_by_hand, joint=True),
    "batchnorm-ema": Kind(norm("ema"), ema_by_hand, joint=True),
    "dropout": Kind(lambda axis=None: nn.Dropout(0.5), dropout_by_hand),
    "counter": Kind(lambda axis=None: Count(), count_by_hand),
    "average": Kind(lambda axis=None: Average(), average_by_hand),
    "tied": Kind(lambda axis=None: Tied(), tied_by_hand),
}


def loss_by_hand(kind: Kind, state: Values, x: Any) -> tuple[Any, Values]:
    """The loss, one for each lane where x has lanes, and the state after it."""
    h = x * spread(state["scale"], x)
    y, new = kind.by_hand(state, h)
    weights = jnp.asarray(WEIGHTS[: x.shape[-2]]).reshape((1,) * (x.ndim - 2) + (-1, 3))
    return (y * weights).sum((-2, -1)), {**state, **new, "calls": state["calls"] + 1}


def lane(state: Values, index: int) -> Values:
    """The state that one lane begins with: its random stream is its own."""
    return {**state, "rng": jax.random.fold_in(jax.random.split(state["rng"])[1], index)}


# Transformations of the oracle: (kind, state, x) -> (result, state).
