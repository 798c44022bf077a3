# SPDX-License-Identifier: Apache-2.0
"""jacfwd, jacrev and hessian: whole Jacobians, in trees of the user's shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether._transforms._target import Choice, Differentiable, Rule


def jacfwd(
    fun: Callable[..., Any] | None = None,
    argnums: Any = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Any = None,
) -> Any:
    """Makes a function that gives the Jacobian of ``fun``, computed forward, column by column.

    The Jacobian has the structure of the result, and in place of each array in it what is differentiated, with the
    axes of that array in front: for a module a module of Jacobians, with None where nothing is differentiated.
    ``fun`` runs once, and State is written once, with no lane and no tangent.

    Args:
        fun: A function that returns arrays with floats, or with ``has_aux`` a pair of those and anything.
        argnums: Numbers or names of the arguments to differentiate; 0 by default.
        has_aux: Whether ``fun`` returns ``(result, aux)``.
        holomorphic: Whether ``fun`` is promised to be holomorphic.
        wrt: A selection narrows which cells of the module arguments are differentiated. Modules or Variables
            (or a container of them) are differentiated wherever ``fun`` comes by them, in place of arguments.
    Returns:
        A function of the same arguments that returns the Jacobian, or ``(jacobian, aux)``.
    Raises:
        ArgumentError: an argument number that the function doesn't have.
        GradientError: nothing to differentiate has a float in it, or a result is no array of floats.
    Example:
        >>> layer = nn.Linear(2, 3)
        >>> tether.jacfwd(lambda layer, x: layer(x))(layer, jnp.ones(2)).weight.shape
        (3, 3, 2)
    """
    options = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic, "wrt": wrt}
    if fun is None:
        return functools.partial(jacfwd, **options)
    kind = jnp.complexfloating if holomorphic else jnp.floating
    rule = Rule("jacfwd", inputs=kind, outputs=kind if holomorphic else jnp.inexact)
    return _jacobian_fun(rule, functools.partial(jax.jacfwd, holomorphic=holomorphic), fun, argnums, has_aux, wrt)


def jacrev(
    fun: Callable[..., Any] | None = None,
    argnums: Any = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    wrt: Any = None,
) -> Any:
    """Makes a function that gives the Jacobian of ``fun``, computed backward, row by row.

    The arguments, errors and rules are those of ``jacfwd``; ``allow_int`` is as in ``jax.jacrev``.

    Example:
        >>> tether.jacrev(lambda x: x[:2] * x[2])(jnp.array([1.0, 2.0, 3.0])).tolist()
        [[3.0, 0.0, 1.0], [0.0, 3.0, 2.0]]
    """
    options = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic, "allow_int": allow_int, "wrt": wrt}
    if fun is None:
        return functools.partial(jacrev, **options)
    kind = jnp.complexfloating if holomorphic else jnp.floating
    rule = Rule("jacrev", inputs=kind if holomorphic else jnp.inexact, outputs=kind, allow_int=allow_int)
    compute = functools.partial(jax.jacrev, holomorphic=holomorphic, allow_int=allow_int)
    return _jacobian_fun(rule, compute, fun, argnums, has_aux, wrt)


def hessian(
    fun: Callable[..., Any] | None = None,
    argnums: Any = None,
    has_aux: bool = False,
    holomorphic: bool = False,
    *,
    wrt: Any = None,
) -> Any:
    """Makes a function that gives the Hessian of ``fun``: the Jacobian of its Jacobian.

    In place of each array of the Jacobian stands again what is differentiated: for a module, a module whose cells
    hold modules (``hess.head.weight.head.bias`` is the block of those two).

    The arguments, errors and rules are those of ``jacfwd``.

    Example:
        >>> scale = nn.Linear(2, 1, use_bias=False)
        >>> hess = tether.hessian(lambda layer: layer(jnp.array([1.0, 2.0])).sum() ** 2)(scale)
        >>> hess.weight.weight[0, :, 0].tolist()
        [[2.0, 4.0], [4.0, 8.0]]
    """
    options = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic, "wrt": wrt}
    if fun is None:
        return functools.partial(hessian, **options)
    kind = jnp.complexfloating if holomorphic else jnp.floating
    rule = Rule("hessian", inputs=kind, outputs=kind)
    compute = functools.partial(jax.hessian, holomorphic=holomorphic)
    return _jacobian_fun(rule, compute, fun, argnums, has_aux, wrt, order=2)


def _jacobian_fun(
    rule: Rule, compute: Any, fun: Callable[..., Any], argnums: Any, has_aux: bool, wrt: Any, order: int = 1
) -> Callable[..., Any]:
    choice = Choice(rule, fun, argnums, wrt)

    @functools.wraps(fun, updated=())
    def jacobian_fun(*args: Any, **kwargs: Any) -> Any:
        target = choice.target(args)
        function = Differentiable(rule, fun, args, kwargs, target, has_aux)
        jacobians, rest = compute(function.inside, has_aux=True)(target.values())

        def shaped(jacobian: Any, depth: int) -> Any:
            """The flat lists of one array of the result, nested as deep as the order, in the user's shape."""
            if depth == 0:
                return jacobian
            return choice.shaped(target.layout.filled([shaped(part, depth - 1) for part in jacobian]))

        result, aux = function.outside([shaped(jacobian, order) for jacobian in jacobians], rest)
        return (result, aux) if has_aux else result

    return jacobian_fun
