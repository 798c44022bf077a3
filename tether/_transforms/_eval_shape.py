# SPDX-License-Identifier: Apache-2.0
"""eval_shape: shapes and dtypes of a result, without computing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core.lift import Lifted
from tether._modules.module import Module, variables_of
from tether._transforms import _arguments
from tether._transforms._call import is_stateful, own_streams


def eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The shapes and dtypes of ``fun(*args, **kwargs)``; nothing is computed, nothing is written.

    Arrays in the arguments may be ``jax.ShapeDtypeStruct``, also in the cells of a module. A module in the result
    holds ShapeDtypeStructs.

    Example:
        >>> tether.eval_shape(nn.Linear(2, 3), jax.ShapeDtypeStruct((5, 2), jnp.float32)).shape
        (5, 3)
        >>> tether.eval_shape(lambda: nn.Linear(20_000, 30_000)).weight.shape
        (30000, 20000)
    """
    _arguments.checked_callable(fun, "eval_shape")
    lifted, leaves = abstract_run(fun, args, kwargs)
    lifted.written = []
    return lifted.outside(leaves, [])


def abstract_run(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Lifted, list[Any]]:
    """Runs a function on shapes alone: what was lifted, and the leaves of the result."""
    parts, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_stateful)
    is_array = [hasattr(part, "shape") and hasattr(part, "dtype") and not is_stateful(part) for part in parts]
    modules = [part for part in parts if isinstance(part, Module)]
    held = {variable: _frame.peek(variable) for module in modules for variable in variables_of(module)}
    held = {variable: value for variable, value in held.items() if hasattr(value, "dtype")}
    own_streams(fun, args, kwargs)
    lifted = Lifted("eval_shape", fun)

    def inside(values: list[Any], leaves: list[Any]) -> Any:
        new = iter(leaves)
        inner = [next(new) if flag else part for part, flag in zip(parts, is_array, strict=True)]
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, inner)
        return lifted.inside(dict(zip(held, values, strict=True)), *inner_args, **inner_kwargs)

    arrays = [part for part, flag in zip(parts, is_array, strict=True) if flag]
    leaves, _ = jax.eval_shape(inside, list(held.values()), arrays)
    return lifted, leaves
