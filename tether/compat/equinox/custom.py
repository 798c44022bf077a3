# SPDX-License-Identifier: Apache-2.0
"""Derivative rules of one's own, for functions of anything.

| Equinox | here | what differs |
| --- | --- | --- |
| filter_custom_jvp, filter_custom_vjp | JAX's, of the arrays | integer arrays may be traced |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.equinox._errors import StateError
from tether.compat.equinox.module import Static
from tether.tree import combine, is_array, is_inexact_array, is_inexact_array_like, partition

__all__ = ["filter_custom_jvp", "filter_custom_vjp"]


def _is_traced(leaf: Any) -> bool:
    return is_array(leaf) or is_inexact_array_like(leaf)


class filter_custom_jvp:
    """A function with a rule for its derivative in a direction, set by ``defjvp``.

    The rule gets the arguments and their tangents, None for what isn't differentiated; it returns the result and its
    tangents. The function returns arrays.

    Args:
        fn: The function, of positional arguments.
    Example:
        >>> @eqx.filter_custom_jvp
        ... def call(fn, x):
        ...     return fn(x)
        >>> @call.defjvp
        ... def rule(primals, tangents):
        ...     return call(*primals), 10 * tangents[1]
        >>> float(jax.grad(lambda x: call(jnp.sin, x))(0.0))
        10.0
    """

    def __init__(self, fn: Callable[..., Any]):
        self.fn = jax.custom_jvp(lambda rest, arrays: fn(*combine(arrays, rest)), nondiff_argnums=(0,))

    def defjvp(self, fn_jvp: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the rule: ``fn_jvp(primals, tangents)`` returns ``(result, tangents of it)``."""

        def rule(rest: Any, arrays: Any, tangents: Any) -> Any:
            tangents = jax.tree.map(lambda t: None if jnp.result_type(t) == jax.dtypes.float0 else t, tangents[0])
            return fn_jvp(combine(arrays[0], rest), tangents)

        self.fn.defjvp(rule)
        return fn_jvp

    def defjvps(self, *args: Any, **kwargs: Any) -> None:
        """Isn't there: use ``defjvp``."""
        raise NotImplementedError("filter_custom_jvp has no defjvps: use defjvp, with one rule for all arguments")

    def __call__(self, *args: Any) -> Any:
        arrays, rest = partition(args, _is_traced)
        return self.fn(rest, arrays)


class filter_custom_vjp:
    """A function with rules for its gradient by the first argument, set by ``defvjp``.

    Args:
        fn: ``fn(vjp_arg, *args, **kwargs)``; takes and returns anything.
    Example:
        >>> clipped = eqx.filter_custom_vjp(lambda x, limit: x)
        >>> clipped.defvjp(lambda x, limit: (x, None), lambda _, g, x, limit: jnp.clip(g, -limit, limit))
        >>> float(jax.grad(lambda x: 5 * clipped(x, 1.0))(2.0))
        1.0
    """

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self._with_rules: Any = None

    def defvjp(self, fn_fwd: Callable[..., Any], fn_bwd: Callable[..., Any]) -> None:
        """Sets both rules.

        Args:
            fn_fwd: ``fn_fwd(vjp_arg, *args, **kwargs)`` returns ``(result, residuals)``.
            fn_bwd: ``fn_bwd(residuals, cotangents, vjp_arg, *args, **kwargs)`` returns the gradient by the floating
                arrays of ``vjp_arg``, None for its other leaves.
        """

        def value(rest: Any, chosen: Any, arrays: Any) -> Any:
            vjp_arg, args, kwargs = _whole(rest, chosen, arrays)
            return _parts(self.fn(vjp_arg, *args, **kwargs))

        def forward(rest: Any, chosen: Any, arrays: Any) -> Any:
            vjp_arg, args, kwargs = _whole(rest, chosen, arrays)
            out, residuals = fn_fwd(vjp_arg, *args, **kwargs)
            return _parts(out), (residuals, chosen, arrays)

        def backward(rest: Any, kept: Any, cotangents: Any) -> Any:
            residuals, chosen, arrays = kept
            vjp_arg, args, kwargs = _whole(rest, chosen, arrays)
            gradient = fn_bwd(residuals, cotangents[0], vjp_arg, *args, **kwargs)
            if jax.tree.structure(gradient) != jax.tree.structure(chosen):
                raise StateError(
                    "filter_custom_vjp: the backward rule returns a gradient of another structure.",
                    got=str(jax.tree.structure(gradient)),
                    expected=str(jax.tree.structure(chosen)),
                    fix="return an array for each floating array of vjp_arg, and None for its other leaves",
                )
            return gradient, None

        self._with_rules = jax.custom_vjp(value, nondiff_argnums=(0,))
        self._with_rules.defvjp(forward, backward)

    def __call__(self, vjp_arg: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._with_rules is None:
            name = getattr(self.fn, "__name__", repr(self.fn))
            raise StateError(f"filter_custom_vjp: {name} has no rules yet.", fix="call its defvjp(forward, backward)")
        arrays, rest = partition((vjp_arg, args, kwargs), is_array)
        chosen, others = partition(arrays[0], is_inexact_array)
        value, integers, static = self._with_rules(rest, chosen, (others, *arrays[1:]))
        return combine(value, integers, static.value)


def _whole(rest: Any, chosen: Any, arrays: Any) -> Any:
    # Outside jit a rule gets Python numbers where a float was differentiated: they would count as static.
    chosen, (others, args, kwargs) = jax.tree.map(jnp.asarray, (chosen, arrays))
    vjp_arg, rest_args, rest_kwargs = rest
    return combine(chosen, others, vjp_arg), combine(args, rest_args), combine(kwargs, rest_kwargs)


def _parts(out: Any) -> Any:
    arrays, rest = partition(out, is_array)
    return *partition(arrays, is_inexact_array), Static(rest)
