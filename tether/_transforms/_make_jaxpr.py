# SPDX-License-Identifier: Apache-2.0
"""make_jaxpr: a function as JAX's intermediate representation, to look at or to evaluate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core.lift import unpack
from tether._transforms import _arguments
from tether._transforms._body import Operands
from tether._transforms._call import arrays_and_others, reach_of
from tether._transforms._traced import Traced


def make_jaxpr(
    fun: Callable[..., Any], static_argnums: Any = (), axis_env: Any = None, return_shape: bool = False
) -> Callable[..., Any]:
    """Makes a function that gives the jaxpr of ``fun`` for arguments like these; nothing is computed or written.

    Its inputs are the values of the Variables that ``fun`` reads or writes, in the order of
    ``tether.pure(fun).values(*args)``, then the leaves of the arguments, without those of modules. Its outputs are the
    leaves of the result, then the values of the written Variables, in the order of ``tether.uses(fun)(*args).writes``.
    ``jax.core.eval_jaxpr`` computes them.

    Args:
        fun: The function or module.
        static_argnums: Numbers or names of arguments that are handed through as they are; so is what is no array.
        axis_env: As in ``jax.make_jaxpr``: pairs of the name and size of axes around.
        return_shape: Whether the shapes and dtypes of the result are returned, too.
    Returns:
        A function that returns what ``jax.make_jaxpr`` does: the jaxpr, or a pair of it and the result as a tree of
        ``jax.ShapeDtypeStruct``. Arrays in its arguments may be such, too.
    Example:
        >>> calls = tether.State(0)
        >>> def f(x):
        ...     calls.value = calls.value + 1
        ...     return 2 * x
        >>> jaxpr = tether.make_jaxpr(f)(1.0)
        >>> y, new_calls = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, calls.value, 5.0)
        >>> float(y), int(new_calls), int(calls.value)
        (10.0, 1, 0)
    """
    _arguments.checked_callable(fun, "make_jaxpr")

    @functools.wraps(fun, updated=())
    def make_jaxpr_fun(*args: Any, **kwargs: Any) -> Any:
        static = _arguments.positions(static_argnums, fun, len(args), "static_argnums")
        make = functools.partial(_made, fun, args, kwargs, static)
        jaxpr, shape = make() if axis_env is None else _in_axes(axis_env, make)
        return (jaxpr, shape) if return_shape else jaxpr

    return make_jaxpr_fun


def _made(fun: Callable[..., Any], args: Any, kwargs: Any, static: tuple[int, ...]) -> tuple[Any, Any]:
    operands = Operands(*[arg for place, arg in enumerate(args) if place not in static], **kwargs)

    def call(leaves: list[Any]) -> Any:
        dynamic, names = operands.rebuilt(leaves)
        new = iter(dynamic)
        return fun(*[arg if place in static else next(new) for place, arg in enumerate(args)], **names)

    lifted, fixed = arrays_and_others(reach_of(fun, args, kwargs))
    traced = Traced("make_jaxpr", _arguments.name_of(fun), call, operands.leaves, lifted, fixed)
    touched = {*traced.reads, *traced.written}
    variables = [variable for variable in traced.lifted if variable in touched]

    def program(values: list[Any], leaves: list[Any]) -> list[Any]:
        given = dict(zip(variables, values, strict=True))
        return traced.call(*map(given.get, traced.lifted), *leaves)

    jaxpr = jax.make_jaxpr(program)([_frame.peek(variable) for variable in variables], operands.leaves)
    return jaxpr, unpack(traced.packed, traced.avals)


def _in_axes(axis_env: Any, make: Callable[[], Any]) -> Any:
    """What a function returns that is run with named axes around."""
    made: list[Any] = []
    jax.make_jaxpr(lambda: made.append(make()), axis_env=axis_env)()
    return made[0]
