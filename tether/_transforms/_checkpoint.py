# SPDX-License-Identifier: Apache-2.0
"""checkpoint, also called remat: recompute in the backward pass instead of storing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tether._core.lift import Lifted
from tether._transforms import _arguments
from tether._transforms._call import is_stateful, own_streams


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: bool = True,
    policy: Callable[..., bool] | None = None,
    static_argnums: Any = (),
) -> Any:
    """Makes a function whose intermediate values are recomputed in the backward pass.

    State is written once, and random draws are the same, whatever is recomputed.

    Args:
        fun: The function or module.
        prevent_cse: As in ``jax.checkpoint``.
        policy: Which intermediate values are stored after all, of ``jax.checkpoint_policies``.
        static_argnums: Arguments that are handed through as they are; so is whatever is no array.
    Example:
        >>> layer = tether.checkpoint(nn.Linear(2, 1))
        >>> tether.grad(lambda x: layer(x).sum())(jnp.ones(2)).shape
        (2,)
    """
    options = {"prevent_cse": prevent_cse, "policy": policy}
    if fun is None:
        return functools.partial(checkpoint, **options, static_argnums=static_argnums)
    _arguments.checked_callable(fun, "checkpoint")

    @functools.wraps(fun, updated=())
    def checkpoint_fun(*args: Any, **kwargs: Any) -> Any:
        static = set(_arguments.positions(static_argnums, fun, len(args), "static_argnums"))
        dynamic = [None if place in static else arg for place, arg in enumerate(args)]
        parts, treedef = jax.tree.flatten((dynamic, kwargs), is_leaf=is_stateful)
        is_array = [isinstance(part, jax.Array | np.ndarray | np.generic | float | complex) for part in parts]
        own_streams(fun, args, kwargs)
        lifted = Lifted("checkpoint", fun)

        def inside(leaves: list[Any]) -> Any:
            new = iter(leaves)
            inner = [next(new) if flag else part for part, flag in zip(parts, is_array, strict=True)]
            inner_args, inner_kwargs = jax.tree.unflatten(treedef, inner)
            whole = [arg if place in static else inner_args[place] for place, arg in enumerate(args)]
            return lifted.inside({}, *whole, **inner_kwargs)

        arrays = [part for part, flag in zip(parts, is_array, strict=True) if flag]
        return lifted.outside(*jax.checkpoint(inside, **options)(arrays))

    return checkpoint_fun


remat = checkpoint
