# SPDX-License-Identifier: Apache-2.0
"""Functions of anything, mapped over axes of arrays.

| Equinox | here | what differs |
| --- | --- | --- |
| filter_vmap | ``jax.vmap`` of the arrays | nothing |
| filter_pmap | ``jax.pmap`` of the arrays | a ``StateIndex`` can't be written in it |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tether.compat.equinox._axes import first_of_arrays, is_none, mapped_axes, resolved, traced_spec
from tether.compat.equinox._errors import SpecError
from tether.compat.equinox._signature import Specs
from tether.compat.equinox._static import by_tree, names_of
from tether.compat.equinox.module import Static, Wrapper, update_wrapper
from tether.tree import combine, is_array, is_array_like, partition
from tether.tree import filter as filter_tree

__all__ = ["filter_pmap", "filter_vmap"]

_MISSING: Any = object()


class _Vmap(Wrapper):
    _fun: Callable[..., Any]
    _specs: Specs
    _fn: Any
    _out: Any
    _vmapkwargs: dict[str, Any]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        def of_lane(fun: Any, args: Any, kwargs: Any) -> Any:
            out = fun(*args, **kwargs)
            axes = mapped_axes(resolved("filter_vmap", out, self._out))
            rest, lanes = partition(out, jax.tree.map(is_none, axes, is_leaf=is_none))
            return lanes, Static((axes, rest))

        args, kwargs, specs = self._specs.bind(args, kwargs)
        whole = (self._fun, args, kwargs)
        in_axes = mapped_axes(resolved("filter_vmap", whole, (self._fn, *specs)))
        lanes, static = jax.vmap(of_lane, in_axes=in_axes, out_axes=(0, None), **self._vmapkwargs)(*whole)
        axes, rest = static.value
        return combine(jax.tree.map(lambda axis, part: _moved(part, axis), axes, lanes), rest)


def _moved(lanes: Any, axis: int) -> Any:
    """Lanes from the front to where they are wanted: axes change places, as Equinox had it."""
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, axis), lanes)


def filter_vmap(
    fun: Any = _MISSING,
    *,
    default: Any = first_of_arrays,
    fn: Any = None,
    args: Any = (),
    kwargs: Any = None,
    out: Any = first_of_arrays,
    **vmapkwargs: Any,
) -> Any:
    """Maps a function of anything over an axis of its arrays.

    A specification is an axis, None for what all lanes share, a function of one leaf that returns one of the two, or a
    tree of those that is a prefix.

    Args:
        fun: The function, a module, or a bound method; without it, a decorator.
        default: Specification of an argument that has none of its own.
        fn: Specification of ``fun`` itself.
        args: Specifications of the first arguments.
        kwargs: Specifications by the name of the argument.
        out: Specification of the result.
        vmapkwargs: Of ``jax.vmap``: ``axis_name``, ``axis_size``.
    Raises:
        ValueError: Specifications don't fit, or sizes of axes differ.
    Example:
        >>> make = eqx.filter_vmap(lambda key: eqx.nn.Linear(2, 3, key=key))
        >>> layers = make(jax.random.split(jax.random.PRNGKey(0), 5))
        >>> layers.weight.shape, eqx.filter_vmap(lambda layer, x: layer(x))(layers, jnp.ones((5, 2))).shape
        ((5, 3, 2), (5, 3))
    """
    if fun is _MISSING:
        return functools.partial(filter_vmap, default=default, fn=fn, args=args, kwargs=kwargs, out=out, **vmapkwargs)
    specs = Specs.of("filter_vmap", fun, default, args, kwargs)
    return update_wrapper(_Vmap(fun, specs, fn, out, vmapkwargs), fun)


def filter_pmap(
    fun: Any = _MISSING,
    *,
    default: Any = first_of_arrays,
    fn: Any = None,
    args: Any = (),
    kwargs: Any = None,
    out: Any = first_of_arrays,
    **pmapkwargs: Any,
) -> Any:
    """Maps a function of anything over devices, one index of an axis for each.

    Args:
        fun, default, fn, args, kwargs, out: As for ``filter_vmap``. Also true for a leaf that is traced and not mapped,
            and false for one that is static.
        pmapkwargs: Of ``jax.pmap``: ``axis_name``, ``axis_size``, ``devices``, ...
    Raises:
        ValueError: Specifications don't fit, or sizes of axes differ.
    Example:
        >>> eqx.filter_pmap(lambda x, n: x * n, devices=jax.devices()[:1])(jnp.ones((1, 2)), 3).tolist()
        [[3.0, 3.0]]
    """
    if fun is _MISSING:
        return functools.partial(filter_pmap, default=default, fn=fn, args=args, kwargs=kwargs, out=out, **pmapkwargs)
    specs = Specs.of("filter_pmap", fun, default, args, kwargs)
    return update_wrapper(_Pmap(fun, specs, fn, out, pmapkwargs), fun)


class _Pmap(Wrapper):
    _fun: Callable[..., Any]
    _specs: Specs
    _fn: Any
    _out: Any
    _pmapkwargs: dict[str, Any]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        program, operands = self._program(args, kwargs)
        by_axis, shared, static = program(*operands)
        return combine(*by_axis, combine(shared, static.value))

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """What ``jax.pmap`` lowers for these arguments."""
        program, operands = self._program(args, kwargs)
        return program.lower(*operands)

    def _program(self, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, Any, Any]]:
        args, kwargs, specs = self._specs.bind(args, kwargs)
        # With no argument mapped, JAX learns the number of devices from this one.
        size = self._pmapkwargs.get("axis_size")
        whole = (self._fun, args, kwargs, 0 if size is None else jnp.empty(size))
        axes = resolved("filter_pmap", whole, (self._fn, *specs, first_of_arrays))
        dynamic, rest = partition(whole, traced_spec(axes))
        leaves, treedef = jax.tree.flatten(rest)
        dimensions = _dimensions(whole[:3], mapped_axes(axes)[:3], self._pmapkwargs)
        program = _pmapped(names_of(self._fun), mapped_axes(axes), dimensions, self._pmapkwargs)
        return program, (dynamic, (tuple(leaves), treedef), self._out)


@by_tree
def _pmapped(names: tuple[str, str], in_axes: Any, dimensions: int, pmapkwargs: dict[str, Any]) -> Any:
    """The pmap of a function of arrays; each result leaves by the axis that it is wanted at."""
    wanted = list(range(-dimensions, dimensions))

    def of_device(dynamic: Any, static: Any, out_spec: Any) -> Any:
        fun, args, kwargs, _ = combine(dynamic, jax.tree.unflatten(static[1], static[0]))
        out = fun(*args, **kwargs)
        axes = resolved("filter_pmap", out, out_spec)
        where = mapped_axes(axes)
        _check_out_axes(where, dimensions)
        traced, rest = partition(out, traced_spec(axes))
        by_axis = [
            filter_tree(traced, jax.tree.map(lambda axis, n=n: axis == n, where, is_leaf=is_none)) for n in wanted
        ]
        shared = filter_tree(traced, jax.tree.map(is_none, where, is_leaf=is_none))
        return by_axis, shared, Static(rest)

    of_device.__name__, of_device.__qualname__ = names
    return jax.pmap(
        of_device,
        in_axes=(in_axes, None, None),
        out_axes=(wanted, None, None),
        static_broadcasted_argnums=(1, 2),
        **pmapkwargs,
    )


def _check_out_axes(axes: Any, dimensions: int) -> None:
    for axis in jax.tree.leaves(axes):
        if not -dimensions <= axis < dimensions:
            raise SpecError(
                "filter_pmap: out= asks for an axis that no result has.",
                got=str(axis),
                expected=f"-{dimensions} to {dimensions - 1}, or None",
            )


def _dimensions(whole: Any, axes: Any, pmapkwargs: dict[str, Any]) -> int:
    """The most dimensions of a result, with that of the devices."""
    arrays, rest = partition(whole, is_array)
    struct = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
    return _dimensions_of(rest, struct, axes, {key: pmapkwargs.get(key) for key in ("axis_name", "axis_size")})


@by_tree
def _dimensions_of(rest: Any, struct: Any, axes: Any, mapkwargs: dict[str, Any]) -> int:
    def of_device(arrays: Any) -> Any:
        fun, args, kwargs = combine(arrays, rest)
        return filter_tree(fun(*args, **kwargs), is_array_like)

    out = jax.eval_shape(jax.vmap(of_device, in_axes=(axes,), **mapkwargs), struct)
    return max((leaf.ndim for leaf in jax.tree.leaves(out)), default=0)
