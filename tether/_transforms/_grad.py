# SPDX-License-Identifier: Apache-2.0
"""grad and value_and_grad: with respect to arguments, or to Variables wherever they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether._transforms import _arguments
from tether._transforms._target import Choice, Differentiable, Rule, dtype_of
from tether.errors import GradientError, describe


def value_and_grad(
    fun: Callable[..., Any] | None = None,
    argnums: Any = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: Any = None,
) -> Any:
    """Makes a function that gives the value of ``fun`` and its gradient.

    A module is differentiated in its trainable Params; its gradient has the module's shape, with None for the
    rest, and reads like it (``grads.head.weight``). What ``fun`` writes is written once; the tangents of this
    gradient end here. A model that is closed over and also an argument is one model: its gradient is the total.

    Args:
        fun: A function that returns a scalar, or with ``has_aux`` a pair of it and anything.
        argnums: Numbers or names of the arguments to differentiate; 0 by default.
        has_aux: Whether ``fun`` returns ``(value, aux)``.
        holomorphic: Whether ``fun`` is promised to be holomorphic.
        allow_int: Whether integer inputs are allowed; their gradient is float0.
        wrt: A selection narrows which cells of the module arguments are differentiated. Modules or Variables
            (or a container of them) are differentiated wherever ``fun`` comes by them, in place of arguments.
    Returns:
        A function that returns ``(value, gradient)``, or ``((value, aux), gradient)``.
    Raises:
        ArgumentError: an argument number that the function doesn't have.
        GradientError: nothing to differentiate has a float in it, or the result is no scalar.
    Example:
        >>> model = nn.Linear(2, 1)
        >>> value, grads = tether.value_and_grad(lambda model: (model(jnp.ones(2)) ** 2).sum())(model)
        >>> grads.weight.shape
        (1, 2)
    """
    options = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic, "allow_int": allow_int, "wrt": wrt}
    if fun is None:
        return functools.partial(value_and_grad, **options)
    kind = jnp.complexfloating if holomorphic else jnp.floating
    rule = Rule("grad", inputs=kind if holomorphic else jnp.inexact, allow_int=allow_int)
    choice, check = Choice(rule, fun, argnums, wrt), functools.partial(_check_scalar, fun, kind)

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        target = choice.target(args)
        function = Differentiable(rule, fun, args, kwargs, target, has_aux, check)

        def scalar(flat: list[Any]) -> Any:
            (value,), rest = function.inside(flat)
            return value, rest

        compute = jax.value_and_grad(scalar, has_aux=True, holomorphic=holomorphic, allow_int=allow_int)
        (value, rest), gradients = compute(target.values())
        result = function.outside([value], rest)
        return (result if has_aux else result[0]), choice.shaped(target.layout.filled(gradients))

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any] | None = None,
    argnums: Any = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: Any = None,
) -> Any:
    """Makes a function that gives the gradient of ``fun``; with ``has_aux``, ``(gradient, aux)``.

    The arguments, errors and rules are those of ``value_and_grad``.

    Example:
        >>> float(tether.grad(lambda x: x**2)(3.0))
        6.0
    """
    options = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic, "allow_int": allow_int, "wrt": wrt}
    if fun is None:
        return functools.partial(grad, **options)
    both = value_and_grad(fun, **options)

    @functools.wraps(fun, updated=())
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        result, gradient = both(*args, **kwargs)
        return (gradient, result[1]) if has_aux else gradient

    return grad_fun


def _check_scalar(fun: Callable[..., Any], kind: Any, value: Any) -> None:
    dtype = dtype_of(value)
    if dtype is None or jnp.shape(value) != () or not jnp.issubdtype(dtype, kind):
        raise GradientError(
            "grad: the function must return a scalar to differentiate.",
            at=_arguments.name_of(fun),
            got=describe(value),
            expected=f"a {kind.__name__} scalar",
            fix=["reduce it: .mean() or .sum()", "has_aux=True, if it returns (value, aux)"],
        )
