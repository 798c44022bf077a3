# SPDX-License-Identifier: Apache-2.0
"""Sums and the like over the devices of ``Parallel``; trees of arrays, too.

| Objax | here | what differs |
| --- | --- | --- |
| pmax, pmean, pmin, psum | ``jax.lax`` | nothing |
| partial | ``functools.partial`` | nothing |
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jax import lax

__all__ = ["partial", "pmax", "pmean", "pmin", "psum"]


def pmax(x: Any, axis_name: str = "device") -> Any:
    """The maximum over the devices."""
    return lax.pmax(x, axis_name)


def pmean(x: Any, axis_name: str = "device") -> Any:
    """The mean over the devices."""
    return lax.pmean(x, axis_name)


def pmin(x: Any, axis_name: str = "device") -> Any:
    """The minimum over the devices."""
    return lax.pmin(x, axis_name)


def psum(x: Any, axis_name: str = "device") -> Any:
    """The sum over the devices."""
    return lax.psum(x, axis_name)
