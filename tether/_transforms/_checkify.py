# SPDX-License-Identifier: Apache-2.0
"""checkify: checks inside compiled functions, whose outcome is a value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental import checkify as _checkify

from tether._core.lift import Lifted
from tether._transforms import _arguments
from tether._transforms._call import own_streams


def checkify(fun: Callable[..., Any], errors: frozenset[Any] = _checkify.user_checks) -> Callable[..., Any]:
    """Makes a function that returns ``(error, result)`` and never raises for what is checked.

    Checks are ``jax.experimental.checkify.check`` in ``fun``, and those that ``errors`` asks for. Whether to raise is
    the caller's choice: ``error.throw()``, outside compiled functions. State is written as it was computed, also if a
    check failed: take a ``tether.snapshot`` before, to go back.

    Args:
        fun: The function or module; it may call compiled ones, and may be compiled: ``tether.jit(tether.checkify(f))``.
        errors: Of ``jax.experimental.checkify``: ``user_checks``, ``nan_checks``, ``div_checks``, ``index_checks``,
            ``float_checks``, ``automatic_checks``, ``all_checks``, or a union of them.
    Example:
        >>> from jax.experimental import checkify
        >>> steps = tether.State(0)
        >>> def step(x):
        ...     steps.value = steps.value + 1
        ...     checkify.check(x > 0, "x is {}", x)
        ...     return jnp.log(x)
        >>> error, _ = tether.jit(tether.checkify(step))(-1.0)
        >>> error.get().splitlines()[0], int(steps.value)
        ('x is -1.0 (`check` failed)', 1)
    """
    _arguments.checked_callable(fun, "checkify")

    @functools.wraps(fun, updated=())
    def checkify_fun(*args: Any, **kwargs: Any) -> Any:
        own_streams(fun, args, kwargs)
        lifted = Lifted("checkify", fun)
        inside = lambda: lifted.inside({}, *args, **kwargs)
        error, (leaves, new) = _checkify.checkify(inside, errors=errors)()
        return error, lifted.outside(leaves, new)

    return checkify_fun
