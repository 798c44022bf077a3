# SPDX-License-Identifier: Apache-2.0
"""grad and value_and_grad: with respect to arguments, or to Variables wherever they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._core import frame as _frame
from tether._core.lift import Lifted
from tether._core.variable import Param, Variable
from tether._modules.module import Module, structure_of, variables_of
from tether._modules.selection import matches
from tether._transforms import _arguments
from tether._transforms._call import is_stateful
from tether.errors import ArgumentError, GradientError, describe


class _Target:
    """What one call differentiates: Variables, each once, and array leaves, in trees of the user's shape."""

    def __init__(self, trees: list[Any], names: list[str], select: Any, allow_int: bool):
        self.variables: dict[Variable, int] = {}
        self.leaves: list[Any] = []
        self._select, self._allow_int = select, allow_int
        self._trees = [jax.tree.flatten(tree, is_leaf=is_stateful) for tree in trees]
        named = zip(self._trees, names, strict=True)
        self._parts = [[self._part(part, name) for part in parts] for (parts, _), name in named]

    def _part(self, part: Any, name: str) -> Any:
        if isinstance(part, Module):
            chosen = [v for v in matches(self._select, part) if self._is_differentiable(_frame.peek(v))]
            for variable in chosen:
                self.variables.setdefault(variable, len(self.variables))
            return part, set(chosen)
        if isinstance(part, Variable):
            self.variables.setdefault(part, len(self.variables))
            return part, {part}
        if not self._is_differentiable(part):
            raise GradientError(
                "grad: an argument has no float in it.",
                at=name,
                got=describe(part),
                expected="a float or complex array, or a module with such Params",
                fix="choose another argument by argnums=, or cast it: x.astype(jnp.float32)",
            )
        self.leaves.append(part)
        return len(self.leaves) - 1, None

    def _is_differentiable(self, value: Any) -> bool:
        if not isinstance(value, jax.Array | np.ndarray | np.generic | float | complex | int) or isinstance(
            value, bool
        ):
            return False
        return self._allow_int or bool(jnp.issubdtype(jnp.result_type(value), jnp.inexact))

    def rebuilt(self, leaves: list[Any]) -> list[Any]:
        """The trees with other leaves, and the same modules."""
        return self._unflattened(lambda part, chosen: part if chosen is not None else leaves[part])

    def gradients(self, of_variables: list[Any], of_leaves: list[Any]) -> list[Any]:
        """The trees with gradients: a module of them, None where nothing is differentiated, for a module."""

        def gradient(part: Any, chosen: Any) -> Any:
            if chosen is None:
                return of_leaves[part]
            if isinstance(part, Variable):
                return of_variables[self.variables[part]]
            structure = structure_of(part)
            values = [of_variables[self.variables[v]] if v in chosen else None for v in variables_of(part)]
            return structure.build(structure.variables(values))

        return self._unflattened(gradient)

    def _unflattened(self, fun: Callable[[Any, Any], Any]) -> list[Any]:
        pairs = zip(self._trees, self._parts, strict=True)
        return [jax.tree.unflatten(treedef, [fun(*part) for part in parts]) for (_, treedef), parts in pairs]


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
    _arguments.checked_callable(fun, "grad")
    closed_over = _is_closed_over(wrt)
    if closed_over and argnums is not None:
        raise ArgumentError("grad: argnums= and a wrt= of modules exclude each other.", fix="leave out one of them")
    select = Param if wrt is None or closed_over else wrt
    jax_options = {"holomorphic": holomorphic, "allow_int": allow_int}

    @functools.wraps(fun, updated=())
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        numbers = () if closed_over else _arguments.positions(_default(argnums), fun, len(args), "argnums")
        trees = [wrt] if closed_over else [args[number] for number in numbers]
        names = ["wrt"] if closed_over else [_arguments.name_at(fun, number) for number in numbers]
        target = _Target(trees, names, select, allow_int)
        if not target.variables and not target.leaves:
            raise _nothing_to_differentiate(trees, names, select)
        result, gradients = _differentiated(fun, args, kwargs, target, numbers, has_aux, jax_options)
        is_tuple = isinstance(argnums, tuple | list)
        return result, tuple(gradients) if is_tuple else gradients[0]

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


def _differentiated(
    fun: Any, args: Any, kwargs: Any, target: _Target, numbers: Any, has_aux: bool, options: Any
) -> Any:
    lifted = Lifted("grad", lambda *a, **k: _checked(fun, fun(*a, **k), has_aux, options["holomorphic"]))

    def inside(values: list[Any], leaves: list[Any]) -> Any:
        new_args = list(args)
        for number, tree in zip(numbers, target.rebuilt(leaves), strict=False):
            new_args[number] = tree
        out, new = lifted.inside(dict(zip(target.variables, values, strict=True)), *new_args, **kwargs)
        return out[0], (out[1:], new)

    values = _frame.gather(list(target.variables))
    compute = jax.value_and_grad(inside, (0, 1), has_aux=True, **options)
    (value, (rest, new)), gradients = compute(values, target.leaves)
    result = lifted.outside([value, *rest], new)
    return (result if has_aux else result[0]), target.gradients(*gradients)


def _checked(fun: Any, out: Any, has_aux: bool, holomorphic: bool) -> tuple[Any, Any]:
    """The result as ``(scalar, aux)``, or an error that says what the function should return."""
    if has_aux and not (isinstance(out, tuple | list) and len(out) == 2):
        raise GradientError(
            "grad: with has_aux the function must return a pair.",
            at=_arguments.name_of(fun),
            got=describe(out),
            expected="(value, aux)",
        )
    value, aux = out if has_aux else (out, None)
    kind = jnp.complexfloating if holomorphic else jnp.floating
    is_number = isinstance(value, jax.Array | np.ndarray | np.generic | float | complex)
    if not is_number or jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), kind):
        raise GradientError(
            "grad: the function must return a scalar to differentiate.",
            at=_arguments.name_of(fun),
            got=describe(value),
            expected=f"a {kind.__name__} scalar",
            fix=["reduce it: .mean() or .sum()", "has_aux=True, if it returns (value, aux)"],
        )
    return value, aux


def _is_closed_over(wrt: Any) -> bool:
    if isinstance(wrt, list | tuple | dict):
        parts = list(wrt.values() if isinstance(wrt, dict) else wrt)
        return len(parts) > 0 and all(map(_is_closed_over, parts))
    return isinstance(wrt, Module | Variable)


def _default(argnums: Any) -> Any:
    return 0 if argnums is None else argnums


def _nothing_to_differentiate(trees: list[Any], names: list[str], select: Any) -> GradientError:
    return GradientError(
        "grad: there is no float to differentiate.",
        at=", ".join(names),
        got=", ".join(map(describe, trees)),
        expected=f"an argument with floats, or float Variables of {getattr(select, '__name__', select)!r}",
        fix=["another argnums=", "wrt=: a selection that names float Variables; a frozen Param is no Param"],
    )
