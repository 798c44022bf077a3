# SPDX-License-Identifier: Apache-2.0
"""vjp, jvp and linearize: products with the Jacobian of a function at some primals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._core import frame as _frame
from tether._core.structure import joined
from tether._core.variable import Param
from tether._modules.module import Module, structure_of, variables_of
from tether._modules.selection import unknown_path
from tether._transforms import _arguments
from tether._transforms._call import is_stateful
from tether._transforms._target import Cells, Differentiable, Layout, Leaf, Rule, Target, dtype_of, with_paths
from tether.errors import ArgumentError, DtypeError, GradientError, ShapeError, StructureError, describe


def vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False, wrt: Any = None) -> Any:
    """Computes a function's result, and a function that multiplies a cotangent with its Jacobian from the left.

    State is written now, once, whatever ``fun`` writes; the function that is returned writes nothing, and may be
    called as often as one likes, under any transformation.

    Args:
        fun: A function that returns arrays, or with ``has_aux`` a pair of those and anything.
        *primals: Its arguments. Modules are differentiated in their trainable Params.
        has_aux: Whether ``fun`` returns ``(result, aux)``.
        wrt: A selection of the cells of the modules to differentiate, in place of the trainable Params.
    Returns:
        ``(result, vjp_fn)``, or ``(result, vjp_fn, aux)``. ``vjp_fn(cotangent)`` takes a cotangent like the
        result (None for a zero one), and gives a tuple with one cotangent for each primal: for a module a module of
        them, with None where nothing is differentiated; for integers float0.
    Raises:
        GradientError: a result that is no array, or a module that existed before.
        StructureError, ShapeError, DtypeError: a cotangent that isn't like the result.
    Example:
        >>> layer = nn.Linear(2, 1)
        >>> y, vjp_fn = tether.vjp(lambda layer, x: layer(x), layer, jnp.array([3.0, 4.0]))
        >>> of_layer, of_x = vjp_fn(jnp.ones(1))
        >>> of_layer.weight.tolist()
        [[3.0, 4.0]]
    """
    function, target = _prepared("vjp", fun, primals, has_aux, wrt)
    out, pullback, rest = jax.vjp(function.inside, target.values(), has_aux=True)
    result, aux = function.outside(out, rest)
    like = _Like("vjp: a cotangent", _layout_of_result(function), out)
    vjp_fn = jax.tree_util.Partial(_Pullback(target.layout, like), pullback)
    return (result, vjp_fn, aux) if has_aux else (result, vjp_fn)


def jvp(fun: Callable[..., Any], primals: Any, tangents: Any, has_aux: bool = False, *, wrt: Any = None) -> Any:
    """Computes a function's result, and the product of its Jacobian with tangents.

    State is written once, with no tangent of this transformation.

    Args:
        fun: A function that returns arrays, or with ``has_aux`` a pair of those and anything.
        primals: A tuple or list of its arguments. Modules are differentiated in their trainable Params.
        tangents: One for each primal, like it, None for a zero one. For a module, a module of tangents, with None for
            zero, or ``{path: array}``.
        has_aux: Whether ``fun`` returns ``(result, aux)``.
        wrt: A selection of the cells of the modules to differentiate, in place of the trainable Params.
    Returns:
        ``(result, tangent)``, or ``(result, tangent, aux)``. The tangent is like the result.
    Raises:
        GradientError: a result that is no array, or a module that existed before; a tangent for what isn't
            differentiated.
        StructureError, ShapeError, DtypeError, SelectionError: a tangent that isn't like its primal.
    Example:
        >>> layer = nn.Linear(2, 1)
        >>> y, tangent = tether.jvp(lambda layer: layer(jnp.array([3.0, 4.0])), (layer,), ({"bias": jnp.ones(1)},))
        >>> tangent.tolist()
        [1.0]
    """
    if not isinstance(primals, tuple | list) or not isinstance(tangents, tuple | list):
        raise ArgumentError(
            "jvp: primals and tangents are tuples or lists, with one entry for each argument.",
            at=_arguments.name_of(fun),
            got=f"{describe(primals)} and {describe(tangents)}",
            fix="jvp(f, (x,), (tangent,))",
        )
    function, target = _prepared("jvp", fun, tuple(primals), has_aux, wrt)
    flat = target.values()
    inner = _Like("jvp: a tangent", target.layout, flat).flat(tangents)
    out, out_tangents, rest = jax.jvp(function.inside, (flat,), (inner,), has_aux=True)
    result, aux = function.outside(out, rest)
    tangent = jax.tree.unflatten(function.treedef, out_tangents)
    return (result, tangent, aux) if has_aux else (result, tangent)


def linearize(fun: Callable[..., Any], *primals: Any, has_aux: bool = False, wrt: Any = None) -> Any:
    """Computes a function's result, and a function that multiplies its Jacobian with tangents.

    Like ``jvp`` for many tangents at the same primals: ``fun`` runs once, and State is written then.

    Args:
        fun: A function that returns arrays, or with ``has_aux`` a pair of those and anything.
        *primals: Its arguments. Modules are differentiated in their trainable Params.
        has_aux: Whether ``fun`` returns ``(result, aux)``.
        wrt: A selection of the cells of the modules to differentiate, in place of the trainable Params.
    Returns:
        ``(result, f_jvp)``, or ``(result, f_jvp, aux)``. ``f_jvp(*tangents)`` takes tangents as ``jvp`` does.
    Raises:
        GradientError, StructureError, ShapeError, DtypeError, SelectionError: as for ``jvp``.
    Example:
        >>> y, f_jvp = tether.linearize(lambda x: x**2, 3.0)
        >>> float(f_jvp(1.0)), float(f_jvp(2.0))
        (6.0, 12.0)
    """
    function, target = _prepared("linearize", fun, primals, has_aux, wrt)
    flat = target.values()
    out, pushforward, rest = jax.linearize(function.inside, flat, has_aux=True)
    result, aux = function.outside(out, rest)
    like = _Like("linearize: a tangent", target.layout, flat)
    f_jvp = jax.tree_util.Partial(_Pushforward(like, function.treedef), pushforward)
    return (result, f_jvp, aux) if has_aux else (result, f_jvp)


def _prepared(name: str, fun: Any, primals: tuple[Any, ...], has_aux: bool, wrt: Any) -> tuple[Differentiable, Target]:
    _arguments.checked_callable(fun, name)
    rule, numbers = Rule(name, hands_through=True), tuple(range(len(primals)))
    names = [_arguments.name_at(fun, number) for number in numbers]
    target = Target(rule, primals, names, Param if wrt is None else wrt, numbers)
    return Differentiable(rule, fun, primals, {}, target, has_aux), target


def _layout_of_result(function: Differentiable) -> Layout:
    return Layout(("result",), (function.treedef,), (tuple(map(Leaf, range(function.treedef.num_leaves))),))


class _Pullback:
    """What ``vjp`` returns, but for the arrays: a cotangent like the result in, cotangents like the primals out."""

    __slots__ = ("_primals", "_result")

    def __init__(self, primals: Layout, result: _Like):
        self._primals, self._result = primals, result

    def __call__(self, pullback: Callable[..., Any], cotangent: Any) -> tuple[Any, ...]:
        return tuple(self._primals.filled(*pullback(self._result.flat([cotangent]))))


class _Pushforward:
    """What ``linearize`` returns, but for the arrays: tangents like the primals in, one like the result out."""

    __slots__ = ("_primals", "_treedef")

    def __init__(self, primals: _Like, treedef: Any):
        self._primals, self._treedef = primals, treedef

    def __call__(self, pushforward: Callable[..., Any], *tangents: Any) -> Any:
        return jax.tree.unflatten(self._treedef, pushforward(self._primals.flat(tangents)))


class _Like:
    """What tangents or cotangents must be like: trees, and the shapes and dtypes in them. It holds no arrays."""

    __slots__ = ("_avals", "_layout", "_what")

    def __init__(self, what: str, layout: Layout, flat: Sequence[Any]):
        self._what, self._layout = what, layout
        self._avals = [jax.ShapeDtypeStruct(np.shape(value), jnp.result_type(value)) for value in flat]

    def flat(self, trees: Sequence[Any]) -> list[Any]:
        """The tangents as a flat list, with zeros where none is given."""
        if len(trees) != len(self._layout.names):
            raise ArgumentError(
                f"{self._what} is needed for each primal.",
                got=f"{len(trees)}",
                expected=f"{len(self._layout.names)}",
                fix="None for a zero one",
            )
        found: list[Any] = [None] * len(self._avals)
        for number, value, at in self._entries(trees):
            if found[number] is not None and found[number] is not value:
                raise StructureError(
                    f"{self._what} is given twice for one cell, which is tied, or lies in two primals.",
                    at=at,
                    expected="one value for the cell",
                    fix="give it in one place, and None in the others",
                )
            found[number] = self._checked(value, self._avals[number], at)
        return [_zero(a) if v is None else v for v, a in zip(found, self._avals, strict=True)]

    def _entries(self, trees: Sequence[Any]) -> Iterator[tuple[int, Any, str]]:
        """Every tangent that is given: its number, the value, and what messages call its place."""
        layout = self._layout
        rows = zip(trees, layout.names, layout.treedefs, layout.slots, layout.places(), strict=True)
        for tree, name, treedef, slots, places in rows:
            for slot, part, at in zip(slots, self._parts(tree, name, treedef), places, strict=True):
                if part is None:
                    continue
                if isinstance(slot, Cells):
                    yield from self._of_module(slot, part, at)
                elif isinstance(slot, Leaf):
                    yield slot.number, part, at
                else:
                    self._check_zero(part, at, "cast the primal, if it is an integer: x.astype(jnp.float32)")

    def _parts(self, tree: Any, name: str, treedef: Any) -> list[Any]:
        try:
            return treedef.flatten_up_to(tree)
        except (TypeError, ValueError) as error:
            raise StructureError(
                f"{self._what} has another structure than what it belongs to.",
                at=name + _parting(tree, treedef),
                got=str(jax.tree.structure(tree, is_leaf=is_stateful)),
                expected=str(treedef),
                fix="None in place of an array or a module stands for zeros",
            ) from error

    def _of_module(self, slot: Cells, part: Any, at: str) -> Iterator[tuple[int, Any, str]]:
        structure = slot.structure
        if isinstance(part, Module):
            paths = structure_of(part).paths
            if paths != structure.paths:
                raise self._other_module(at, paths, structure.paths)
            given = dict(zip(paths, _frame.gather(variables_of(part)), strict=True))
        elif isinstance(part, Mapping):
            given = part
        else:
            raise StructureError(
                f"{self._what} for a module has no known form.",
                at=at,
                got=describe(part),
                expected="a module like it, {path: array}, or None for zeros",
                fix="tether.variables(model) has the paths",
            )
        for path, value in given.items():
            if path not in structure.places:
                raise unknown_path(path, structure.places, f"{self._what}: {at} has no cell at this path")
            number, place = slot.numbers[structure.places[path]], joined(at, path)
            if number is not None and value is not None:
                yield number, value, place
            elif value is not None:
                self._check_zero(value, place, _FIXES_FOR_CELLS)

    def _other_module(self, at: str, got: tuple[str, ...], expected: tuple[str, ...]) -> StructureError:
        missing, extra = [p for p in expected if p not in got], [p for p in got if p not in expected]
        return StructureError(
            f"{self._what} is a module of another structure than what it belongs to.",
            at=at,
            got=f"{len(got)} cells" + (f", without {missing[0]!r}" if missing else ""),
            expected=f"{len(expected)} cells" + (f", without {extra[0]!r}" if extra else ""),
            fix="give {path: array} for some of the cells",
        )

    def _check_zero(self, value: Any, at: str, fix: str | list[str]) -> None:
        if getattr(value, "dtype", None) != jax.dtypes.float0:
            raise GradientError(
                f"{self._what} is given for what isn't differentiated.",
                at=at,
                got=describe(value),
                expected="None",
                fix=fix,
            )

    def _checked(self, value: Any, aval: Any, at: str) -> Any:
        """The value, if it is an array of the right shape and dtype."""
        dtype = dtype_of(value)
        if dtype is None:
            error, fault, fix = DtypeError, "is no array", "an array, or None for zeros"
        elif np.shape(value) != aval.shape:
            error, fault, fix = ShapeError, "has another shape than what it belongs to", "None for zeros of its shape"
        elif dtype != aval.dtype and not _is_discrete(aval):
            error, fault, fix = DtypeError, "has another dtype than what it belongs to", f"cast it to {aval.dtype}"
        else:
            return value
        raise error(f"{self._what} {fault}.", at=at, got=describe(value), expected=describe(aval), fix=fix)


_FIXES_FOR_CELLS = [
    "the tangents of the trainable Params alone: tether.filter(tangents, tether.Param)",
    "wrt=: a selection that names the cell, too",
]


def _is_discrete(aval: Any) -> bool:
    """Whether values like this have no tangent."""
    return not jnp.issubdtype(aval.dtype, jnp.inexact)


def _zero(aval: Any) -> Any:
    return np.zeros(aval.shape, jax.dtypes.float0) if _is_discrete(aval) else jnp.zeros(aval.shape, aval.dtype)


def _parting(tree: Any, treedef: Any) -> str:
    """The path at which a tree parts from a structure."""
    expected = [path for path, _ in with_paths(treedef.unflatten(range(treedef.num_leaves)))]
    got = [path for path, _ in with_paths(tree, is_leaf=lambda part: part is None or is_stateful(part))]
    missing = [path for path in expected if not any(path.startswith(other) for other in got)]
    extra = [path for path in got if path not in expected]
    return next(iter(missing + extra), "")
