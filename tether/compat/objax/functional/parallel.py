# SPDX-License-Identifier: Apache-2.0
"""Sums and the like over the devices of ``Parallel``; trees of arrays, too.

| Objax | here | what differs |
| --- | --- | --- |
| pmax, pmean, pmin, psum | ``jax.lax`` | outside of ``Parallel`` the error says so; it is a NameError still |
| partial | ``functools.partial`` | nothing |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import lax

from tether.compat.objax._errors import NoAxisError

__all__ = ["partial", "pmax", "pmean", "pmin", "psum"]


def pmax(x: Any, axis_name: str = "device") -> Any:
    """The maximum over the devices."""
    return _over(lax.pmax, x, axis_name)


def pmean(x: Any, axis_name: str = "device") -> Any:
    """The mean over the devices."""
    return _over(lax.pmean, x, axis_name)


def pmin(x: Any, axis_name: str = "device") -> Any:
    """The minimum over the devices."""
    return _over(lax.pmin, x, axis_name)


def psum(x: Any, axis_name: str = "device") -> Any:
    """The sum over the devices."""
    return _over(lax.psum, x, axis_name)


def _over(collective: Callable[[Any, str], Any], x: Any, axis_name: str) -> Any:
    try:
        return collective(x, axis_name)
    except NameError as error:
        raise NoAxisError(
            f"{collective.__name__}: there is no axis of devices here.",
            got=f"axis_name={axis_name!r}, and no such axis around this call",
            expected="a call within objax.Parallel",
            fix=["objax.Parallel(f)(x)", "BatchNorm in place of SyncedBatchNorm, or training=False, on one device"],
        ) from error
