# SPDX-License-Identifier: Apache-2.0
"""Streams of random keys: the default one, seeds, scopes.

A layer that needs a key draws from the current stream: that of the call's ``key=``, else that of the
scope around, else the default stream, which ``tether.seed`` starts anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core.variable import Rng, as_key
from tether.errors import ArgumentError, describe
from tether.random._streams import draw as draw
from tether.random._streams import seed as seed

__all__ = ["draw", "keys", "scope", "seed"]


@contextlib.contextmanager
def scope(key: Any) -> Iterator[Rng]:
    """A block whose draws come from a stream of its own, begun with ``key``.

    Args:
        key: A typed or legacy key, or a seed.
    Example:
        >>> with tether.random.scope(0):
        ...     first = nn.Linear(2, 3)
        >>> with tether.random.scope(0):
        ...     second = nn.Linear(2, 3)
        >>> bool((first.weight == second.weight).all())
        True
    """
    outer, _frame.thread.stream = _frame.thread.stream, Rng(key)
    try:
        yield _frame.thread.stream
    finally:
        _frame.thread.stream = outer


def keys(key: Any, count: int) -> list[Any]:
    """``count`` keys: split from ``key``, or drawn from the current stream where it is None.

    Raises:
        DtypeError: ``key`` is no key.
        ArgumentError: ``key`` is several keys; map over them with vmap.
    """
    if key is None:
        return [draw() for _ in range(count)]
    key = as_key(key)
    if key.shape:
        raise ArgumentError(
            "random: one key was expected.",
            got=describe(key),
            expected="a key of shape []",
            fix="tether.vmap(lambda key: Layer(..., key=key))(keys) makes a module for each key",
        )
    return [key] if count == 1 else list(jax.random.split(key, count))
