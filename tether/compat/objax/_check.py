# SPDX-License-Identifier: Apache-2.0
"""Whether a value may be assigned to a variable.

| Objax | here | what differs |
| --- | --- | --- |
| assert_assigned_type_and_shape_match | the same rule | the error says what was there and what came |
"""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import numpy as np

from tether._core import frame as _frame
from tether._core import ref as _ref
from tether._core.variable import Variable
from tether.compat.objax._errors import MisuseError
from tether.errors import describe

__all__ = ["assert_assigned_type_and_shape_match"]


def assert_assigned_type_and_shape_match(existing_tensor: Any, new_tensor: Any) -> None:
    """Checks that a new value is a JAX array of the shape of the old one.

    A leading axis of devices may come or go, as ``VarCollection.replicate`` has it; in a trace any leading axes may.
    """
    if not isinstance(new_tensor, jax.Array):
        raise MisuseError(
            f"Assignments to variable must be an instance of JaxArray, but received {type(new_tensor)}.",
            got=describe(new_tensor),
            expected=describe(existing_tensor),
            fix="jnp.asarray(x)",
        )
    old, new = _own_shape(existing_tensor), _own_shape(new_tensor)
    if new == old or new_tensor.shape == existing_tensor.shape:
        return
    shorter = min(len(new_tensor.shape), len(existing_tensor.shape))
    is_traced = isinstance(new_tensor, jax.core.Tracer) or isinstance(existing_tensor, jax.core.Tracer)
    ends = {tensor.shape[tensor.ndim - shorter :] for tensor in (new_tensor, existing_tensor)}
    if is_traced and len(ends) == 1:
        return
    raise MisuseError(
        "Assign can not change shape of variable.",
        got=f"{describe(new_tensor)}, of shape {new}",
        expected=f"{describe(existing_tensor)}, of shape {old}",
        fix="assign an array of that shape, or make a new variable",
    )


def check_fits_ref(cell: Variable, value: Any) -> None:
    """Checks that a value keeps shape and dtype where a plain JAX transformation has the array in a ``jax.Ref``."""
    if _frame.thread.frames or not _ref.holds(cell):
        return
    old = _frame.held(cell)
    if (np.shape(value), getattr(value, "dtype", None)) != (old.shape, old.dtype):
        raise MisuseError(
            "A variable that a plain JAX transformation uses can't change its shape or dtype.",
            at=f"used at {_ref.where(cell)}",
            got=describe(value),
            expected=describe(old),
            fix=["objax.Jit, objax.functional.scan or tether's transformations, instead of JAX's", "a new variable"],
        )


def _own_shape(array: Any) -> tuple[int, ...]:
    """The shape, without a leading axis along which an array is split over devices."""
    sharding = None if isinstance(array, jax.core.Tracer) else getattr(array, "sharding", None)
    spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else ()
    return array.shape[1:] if tuple(spec)[:1] == ("device",) else array.shape
