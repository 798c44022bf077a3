# SPDX-License-Identifier: Apache-2.0
"""Derivatives of functions of anything.

| Equinox | here | what differs |
| --- | --- | --- |
| filter_grad, filter_value_and_grad | ``jax.value_and_grad`` of the leaves that a specification chooses | nothing |
| filter_jvp, filter_vjp | ``jax.jvp``, ``jax.vjp`` of the leaves that have tangents | nothing |
| filter_closure_convert | ``jax.make_jaxpr``, its constants a child | nothing |

What a ``StateIndex`` holds is written by them, and has no gradient.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from tether._core import trace as _trace
from tether.compat.equinox._errors import SpecError
from tether.compat.equinox.make_jaxpr import filter_make_jaxpr
from tether.compat.equinox.module import Module, Static, Wrapper, static_field, update_wrapper
from tether.tree import combine, is_array, is_inexact_array, partition
from tether.tree import filter as filter_tree

__all__ = ["filter_closure_convert", "filter_grad", "filter_jvp", "filter_value_and_grad", "filter_vjp"]

_MISSING: Any = object()


class _ValueAndGrad(Wrapper):
    _fun: Callable[..., Any]
    _arg: Any
    _gradkwargs: dict[str, Any]

    def __call__(self, x: Any, /, *args: Any, **kwargs: Any) -> Any:
        @functools.partial(jax.value_and_grad, argnums=0, **self._gradkwargs)
        def of_chosen(chosen: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
            return self._fun(combine(chosen, rest), *args, **kwargs)

        return of_chosen(*partition(x, self._arg), *args, **kwargs)


class _Grad(Wrapper):
    _value_and_grad: _ValueAndGrad
    _has_aux: bool

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        value, gradient = self._value_and_grad(*args, **kwargs)
        return (gradient, value[1]) if self._has_aux else gradient


def filter_value_and_grad(fun: Any = _MISSING, *, arg: Any = is_inexact_array, **gradkwargs: Any) -> Any:
    """Makes a function that returns ``(value, gradient)``, by the first argument of ``fun``.

    Args:
        fun: The function; without it, a decorator.
        arg: What to differentiate of its first argument: true, false, a function of one leaf, or a tree of those that
            is a prefix. The gradient has None for the other leaves.
        gradkwargs: Of ``jax.value_and_grad``: ``has_aux``, ``holomorphic``, ``allow_int``.
    Example:
        >>> eqx.filter_value_and_grad(lambda x: x["a"] ** 2)({"a": jnp.array(3.0), "name": "b"})[1]["a"].item()
        6.0
    """
    arg = _without_old_name("filter_value_and_grad", arg, gradkwargs)
    if fun is _MISSING:
        return functools.partial(filter_value_and_grad, arg=arg, **gradkwargs)
    if "argnums" in gradkwargs:
        raise SpecError(
            "filter_grad: argnums= is given; the gradient is by the first argument.",
            got=f"argnums={gradkwargs['argnums']!r}",
            fix="make a function of one tuple of what is to be differentiated",
        )
    return update_wrapper(_ValueAndGrad(fun, arg, gradkwargs), fun)


def filter_grad(fun: Any = _MISSING, *, arg: Any = is_inexact_array, **gradkwargs: Any) -> Any:
    """Makes a function that returns the gradient by the first argument of ``fun``.

    Args:
        fun, arg, gradkwargs: As for ``filter_value_and_grad``.
    Example:
        >>> layer = eqx.nn.Linear(2, 1, key=jax.random.PRNGKey(0))
        >>> eqx.filter_grad(lambda layer, x: layer(x).sum())(layer, jnp.ones(2)).weight.tolist()
        [[1.0, 1.0]]
    """
    arg = _without_old_name("filter_grad", arg, gradkwargs)
    if fun is _MISSING:
        return functools.partial(filter_grad, arg=arg, **gradkwargs)
    both = filter_value_and_grad(fun, arg=arg, **gradkwargs)
    return update_wrapper(_Grad(both, gradkwargs.get("has_aux", False)), fun)


def _without_old_name(name: str, arg: Any, gradkwargs: dict[str, Any]) -> Any:
    if "filter_spec" not in gradkwargs:
        return arg
    warnings.warn(f"{name}: filter_spec= is deprecated; use arg=", DeprecationWarning, stacklevel=3)
    return gradkwargs.pop("filter_spec")


def filter_jvp(fn: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The value of a function, and its derivative in a direction.

    Args:
        fn: Takes and returns anything.
        primals: Its positional arguments.
        tangents: The direction: a tree of their structure, None for what isn't differentiated.
    Returns:
        The result, and its tangents: None for what doesn't depend on what is differentiated.
    Raises:
        ValueError: The two have different structures.
        TypeError: A tangent doesn't fit its primal.
    Example:
        >>> out, tangent = eqx.filter_jvp(lambda x, n: (x**n, n), (jnp.array(3.0), 2), (jnp.array(1.0), None))
        >>> float(out[0]), float(tangent[0]), tangent[1]
        (9.0, 6.0, None)
    """
    is_none = lambda leaf: leaf is None
    leaves, treedef = jax.tree.flatten(primals, is_leaf=is_none)
    directions, other = jax.tree.flatten(tangents, is_leaf=is_none)
    if treedef != other:
        raise SpecError(
            "filter_jvp: primals and tangents have different structures.",
            got=str(other),
            expected=str(treedef),
            fix="give None for what isn't differentiated",
        )
    moving = [number for number, direction in enumerate(directions) if direction is not None]

    def of_moving(*values: Any) -> Any:
        given = dict(zip(moving, values, strict=True))
        args = jax.tree.unflatten(treedef, [given.get(number, leaf) for number, leaf in enumerate(leaves)])
        depends, rest = partition(fn(*args), lambda leaf: _trace.owner(leaf) is here)
        return depends, Static(rest)

    def traced(*values: Any) -> Any:
        nonlocal here
        here = _trace.current()
        return of_moving(*values)

    here: Any = None
    out, tangent = jax.jvp(traced, [leaves[n] for n in moving], [directions[n] for n in moving])
    return combine(out[0], out[1].value), tangent[0]


def filter_vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of a function, and the function of its vector-Jacobian products.

    Args:
        fun: Takes and returns anything.
        primals: Its arguments; their floating arrays are differentiated.
        has_aux: Whether ``fun`` returns ``(value, aux)``.
    Returns:
        ``(value, vjp_fn)``, with ``has_aux`` ``(value, vjp_fn, aux)``. ``vjp_fn`` takes cotangents of the floating
        arrays of the value, None for its other leaves, and returns a tuple of those of ``primals``.
    Example:
        >>> value, vjp_fn = eqx.filter_vjp(lambda x, n: x * n, jnp.array(2.0), 3)
        >>> float(value), [leaf.item() for leaf in jax.tree.leaves(vjp_fn(jnp.array(1.0)))]
        (6.0, [3.0])
    """
    chosen, rest = partition(primals, is_inexact_array)

    def of_chosen(*chosen: Any) -> Any:
        out = fun(*combine(chosen, rest))
        out, aux = out if has_aux else (out, None)
        value, others = partition(out, is_inexact_array)
        return value, (others, aux)

    value, vjp_fn, (others, aux) = jax.vjp(of_chosen, *chosen, has_aux=True)
    out = combine(value, others)
    return (out, vjp_fn, aux) if has_aux else (out, vjp_fn)


class _Converted(Module):
    jaxpr: Any = static_field()
    consts: Any
    out_struct: Any = static_field()
    out_static: Any = static_field()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        arrays = jax.tree.leaves(filter_tree((args, kwargs), is_array))
        out = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, self.consts))(*arrays)
        return combine(jax.tree.unflatten(jax.tree.structure(self.out_struct), out), self.out_static)


def filter_closure_convert(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of the same values that closes over nothing: what ``fn`` closed over is in its ``consts``.

    Args:
        fn: The function.
        args, kwargs: Arguments like those that it will be called with; what isn't an array is called as it is.
    Returns:
        A pytree that is called as ``fn`` is; ``fn`` itself, if it closes over nothing.
    Example:
        >>> times = lambda a: eqx.filter_closure_convert(lambda x: a * x, jnp.array(0.0))
        >>> double = times(jnp.array(2.0))
        >>> float(double(jnp.array(3.0))), [float(const) for const in double.consts]
        (6.0, [2.0])
    """
    if getattr(fn, "__closure__", _MISSING) is None:
        return fn
    closed, out_struct, out_static = filter_make_jaxpr(fn)(*args, **kwargs)
    return _Converted(closed.jaxpr, closed.consts, out_struct, out_static)
