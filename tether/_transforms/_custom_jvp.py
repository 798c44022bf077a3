# SPDX-License-Identifier: Apache-2.0
"""custom_jvp: a function with a forward-mode derivative of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import zero_from_primal

from tether._core.variable import Variable
from tether._modules.module import Module, structure_of
from tether._transforms import _arguments
from tether._transforms._call import is_stateful
from tether._transforms._custom import (
    Arguments,
    Call,
    aval_of,
    cells_of,
    fitting,
    instantiated,
    is_differentiable,
    is_zero,
    positional,
    spread,
)
from tether.errors import ArgumentError, StructureError, describe


def custom_jvp(fun: Callable[..., Any] | None = None, nondiff_argnums: Any = ()) -> Any:
    """Gives a function a forward-mode derivative of its own; reverse mode follows from it.

    ``f.defjvp(rule)`` defines it: ``rule(primals, tangents)`` returns ``(result, tangent)``, None for a tangent of
    zeros. The tangent of a module is a module of tangents, with None for what has none. Arguments named by
    ``nondiff_argnums`` come first in ``rule``. ``f.defjvps(*rules)`` takes one ``rule(tangent, result, *primals)`` for
    each argument, or None.

    The rules for modules and state are those of ``custom_vjp``: function and rule may come by modules in any way, a
    Variable that is differentiated must be in an argument, and what ``rule`` writes is written if the call is
    differentiated, without a tangent.

    Args:
        fun: The function. In a class it makes a method.
        nondiff_argnums: Numbers or names of arguments that are handed through: functions, settings, ``self``.
    Returns:
        The function, with ``defjvp(rule, symbolic_zeros=False)`` and ``defjvps(*rules)``.
    Raises:
        ArgumentError: no rule is defined; an argument can't be given by position.
        GradientError: a Variable is differentiated that is in no argument; a write or draw that only the rule makes.
        StructureError, ShapeError, DtypeError: the rule returns something else than it should.
    Example:
        >>> @tether.custom_jvp
        ... def safe_sqrt(x):
        ...     return jnp.sqrt(x)
        >>> @safe_sqrt.defjvp
        ... def rule(primals, tangents):
        ...     (x,), (dx,) = primals, tangents
        ...     y = safe_sqrt(x)
        ...     return y, jnp.where(x == 0, 0.0, dx / (2 * jnp.where(x == 0, 1.0, y)))
        >>> float(tether.grad(safe_sqrt)(4.0)), float(tether.grad(safe_sqrt)(0.0))
        (0.25, 0.0)
    """
    if fun is None:
        return functools.partial(custom_jvp, nondiff_argnums=nondiff_argnums)
    _arguments.checked_callable(fun, "custom_jvp")
    rule: dict[str, Any] = {}
    options = {"symbolic_zeros": False}

    @functools.wraps(fun, updated=())
    def custom_jvp_fun(*args: Any, **kwargs: Any) -> Any:
        if not rule:
            name = _arguments.name_of(fun)
            raise ArgumentError(f"custom_jvp: {name} has no rule.", fix=f"{name}.defjvp(rule), or {name}.defjvps(...)")
        args = positional("custom_jvp", fun, args, kwargs)
        fixed = _arguments.positions(nondiff_argnums, fun, len(args), "nondiff_argnums")
        return _Jvp(fun, rule, Arguments(fun, args, fixed), **options).outcome()

    def defjvp(jvp: Callable[..., Any], symbolic_zeros: bool = False) -> Callable[..., Any]:
        """Defines the rule, and returns it."""
        rule["jvp"] = _arguments.checked_callable(jvp, "custom_jvp, the rule")
        options["symbolic_zeros"] = symbolic_zeros
        return jvp

    def defjvps(*jvps: Callable[..., Any] | None) -> None:
        """Defines the rule by one for each argument; None for an argument without a tangent."""
        name = _arguments.name_of(fun)
        if _arguments.as_tuple(nondiff_argnums):
            raise ArgumentError(
                "custom_jvp: defjvps takes one rule for each argument, and has no place for nondiff_argnums.",
                at=name,
                fix=f"{name}.defjvp(rule)",
            )
        for jvp in jvps:
            if jvp is not None:
                _arguments.checked_callable(jvp, "custom_jvp, a rule")
        defjvp(functools.partial(_by_argument, custom_jvp_fun, jvps))

    custom_jvp_fun.defjvp, custom_jvp_fun.defjvps = defjvp, defjvps  # type: ignore[attr-defined]
    return custom_jvp_fun


def _by_argument(fun: Callable[..., Any], jvps: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The rule that is a sum over the arguments."""
    if len(jvps) != len(primals):
        raise ArgumentError(
            "custom_jvp: defjvps takes one rule for each argument.",
            at=_arguments.name_of(fun),
            got=f"{len(jvps)} rules for {len(primals)} arguments",
            fix="None for an argument without a tangent",
        )
    out = fun(*primals)
    pairs = zip(jvps, tangents, strict=True)
    parts = [jvp(tangent, out, *primals) for jvp, tangent in pairs if jvp is not None]
    return out, jax.tree.map(lambda *terms: functools.reduce(lambda a, b: a + b, terms), *parts) if parts else None


class _Jvp:
    """One call, as JAX sees it: functions of the operands' values and of the leaves of the arguments."""

    def __init__(self, fun: Any, rule: dict[str, Any], arguments: Arguments, symbolic_zeros: bool):
        self._call = Call("custom_jvp", fun, rule, arguments)
        self._jvp, self._symbolic_zeros = rule["jvp"], symbolic_zeros

    def outcome(self) -> Any:
        compute = jax.custom_jvp(self._call.primal)
        compute.defjvp(self._rule, symbolic_zeros=True)  # they tell what is differentiated
        return self._call.outcome(compute)

    def _rule(self, primals: Any, tangents: Any) -> Any:
        call, arguments = self._call, self._call.arguments
        (values, leaves), (of_values, of_leaves) = primals, tangents
        given = dict(zip(call.variables, values, strict=True))
        of_cells = dict(zip(call.variables, of_values, strict=True))
        refused = call.closed_over(v for v, tangent in of_cells.items() if not is_zero(tangent))
        found: list[Any] = []

        def run(birth: int) -> Any:
            args = arguments.called(leaves)
            taken = tuple(args[place] for place in arguments.differentiated)
            inner = tuple(self._tangent(arguments, place, of_cells, of_leaves) for place in arguments.differentiated)
            out = self._jvp(*[args[place] for place in arguments.fixed], taken, inner)
            packed = call.packed(self._pair(out)[0], birth)
            found.extend(self._of_result(packed, call.packed(out[1], birth)))
            return packed

        packed, new, groups = call.run(run, given, refused)
        out, written = call.results(given, packed, packed.take(), new, groups)
        of_written = [zero_from_primal(value, symbolic_zeros=True) for value in written]
        return (out, written), (found, of_written)

    def _tangent(self, arguments: Arguments, place: int, of_cells: dict[Variable, Any], of_leaves: list[Any]) -> Any:
        """The tangent of one argument, of its shape."""

        def value(tangent: Any) -> Any:
            return tangent if self._symbolic_zeros else instantiated(tangent)

        def part_of(part: Any, number: int | None) -> Any:
            if number is not None:
                return value(of_leaves[number])
            cells = [value(of_cells[v]) if _has_tangent(of_cells.get(v)) else None for v in cells_of(part)]
            if isinstance(part, Module):
                structure = structure_of(part)
                return structure.build(structure.variables(cells))
            if isinstance(part, Variable):
                return cells[0]
            return jax.tree.unflatten(part.treedef, cells) if is_stateful(part) else None

        parts = [part_of(part, number) for part, number in arguments.slots(place)]
        return jax.tree.unflatten(arguments.treedefs[place], parts)

    def _pair(self, out: Any) -> tuple[Any, Any]:
        if isinstance(out, tuple | list) and len(out) == 2:
            return out[0], out[1]
        raise StructureError(
            f"custom_jvp: the rule of {self._call.name} must return a pair.",
            at=_arguments.name_of(self._jvp),
            got=describe(out),
            expected="(result, tangent)",
        )

    def _of_result(self, result: Any, tangent: Any) -> list[Any]:
        """The tangents of the leaves of the result."""
        what = f"custom_jvp: the tangent that the rule of {self._call.name} returns"
        tree = jax.tree.unflatten(tangent.treedef, tangent.leaves)
        found = []
        for leaf, part in zip(result.leaves, spread(tree, result.treedef, "result", what), strict=True):
            fitted = fitting(part, aval_of(leaf), "result", what)
            found.append(zero_from_primal(leaf, symbolic_zeros=True) if fitted is None else fitted)
        return found


def _has_tangent(tangent: Any) -> bool:
    return tangent is not None and is_differentiable(tangent.aval if is_zero(tangent) else tangent)
