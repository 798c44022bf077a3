# SPDX-License-Identifier: Apache-2.0
"""custom_vjp: a function with a reverse-mode derivative of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core.structure import joined
from tether._core.variable import Rng, Variable
from tether._modules.module import Module, structure_of, variables_of
from tether._modules.selection import unknown_path
from tether._transforms import _arguments
from tether._transforms._call import is_stateful
from tether._transforms._custom import (
    Arguments,
    Call,
    Folded,
    cells_in,
    cells_of,
    fitting,
    instantiated,
    is_differentiable,
    positional,
    spread,
)
from tether._transforms._specs import varying
from tether.errors import ArgumentError, GradientError, StructureError, describe


def custom_vjp(fun: Callable[..., Any] | None = None, nondiff_argnums: Any = ()) -> Any:
    """Gives a function a reverse-mode derivative of its own.

    ``f.defvjp(fwd, bwd)`` defines it: ``fwd`` takes the arguments of ``f`` and returns ``(result, residuals)``;
    ``bwd(residuals, cotangent)`` returns a tuple with a cotangent for each argument, None for zeros. A module among
    the arguments has a module of cotangents, or ``{path: array}``; existing modules may be residuals. Arguments named
    by ``nondiff_argnums`` come first in ``bwd``.

    Function and rule may come by modules in any way, and ``bwd`` finds every Variable as ``fwd`` left it. But a
    Variable that is differentiated must be in an argument. What ``fwd`` writes is written, without a tangent, if the
    call is differentiated, else what ``f`` writes; in a compiled function ``fwd`` may only write what ``f`` writes.
    ``bwd`` writes nothing and draws no keys: a mask that it needs is a residual.

    Args:
        fun: The function. In a class it makes a method.
        nondiff_argnums: Numbers or names of arguments that are handed through: functions, settings, ``self``.
    Returns:
        The function, with ``defvjp(fwd, bwd, symbolic_zeros=False)``, whose arguments are those of ``jax.custom_vjp``.
    Raises:
        ArgumentError: no rule is defined; an argument can't be given by position.
        GradientError: a Variable is differentiated that is in no argument; a write or draw that only the rule makes.
        StructureError, ShapeError, DtypeError: ``fwd`` or ``bwd`` returns something else than it should.
        LeakError: ``bwd`` uses a Variable that the call could not see.
    Example:
        >>> scale = tether.Param(3.0)
        >>> @tether.custom_vjp
        ... def clipped(module, x):
        ...     return module(x)
        >>> def fwd(module, x):
        ...     return module(x), (module, x)
        >>> def bwd(residuals, g):
        ...     module, x = residuals
        ...     g = jnp.clip(g, -1, 1)
        ...     return {"weight": jnp.outer(g, x), "bias": g}, g @ module.weight
        >>> clipped.defvjp(fwd, bwd)
        >>> loss = lambda module: 100 * clipped(module, jnp.ones(2)).sum()
        >>> tether.grad(loss)(nn.Linear(2, 1)).bias.tolist()
        [1.0]
    """
    if fun is None:
        return functools.partial(custom_vjp, nondiff_argnums=nondiff_argnums)
    _arguments.checked_callable(fun, "custom_vjp")
    rule: dict[str, Any] = {}
    options = {"symbolic_zeros": False}

    @functools.wraps(fun, updated=())
    def custom_vjp_fun(*args: Any, **kwargs: Any) -> Any:
        if not rule:
            name = _arguments.name_of(fun)
            raise ArgumentError(
                f"custom_vjp: {name} has no rule.", fix=f"{name}.defvjp(fwd, bwd) before the first call"
            )
        args = positional("custom_vjp", fun, args, kwargs)
        fixed = _arguments.positions(nondiff_argnums, fun, len(args), "nondiff_argnums")
        return _Vjp(fun, rule, Arguments(fun, args, fixed), **options).outcome()

    def defvjp(fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic_zeros: bool = False) -> None:
        """Defines the rule."""
        for name, part in (("fwd", fwd), ("bwd", bwd)):
            rule[name] = _arguments.checked_callable(part, f"custom_vjp, {name}")
        options["symbolic_zeros"] = symbolic_zeros

    custom_vjp_fun.defvjp = defvjp  # type: ignore[attr-defined]
    return custom_vjp_fun


class _Vjp:
    """One call, as JAX sees it: functions of the operands' values and of the leaves of the arguments."""

    def __init__(self, fun: Any, rule: dict[str, Any], arguments: Arguments, symbolic_zeros: bool):
        self._call = Call("custom_vjp", fun, rule, arguments)
        self._fwd, self._bwd, self._symbolic_zeros = rule["fwd"], rule["bwd"], symbolic_zeros

    def outcome(self) -> Any:
        call, custom = self._call, jax.custom_vjp(self._call.primal)
        custom.defvjp(self._forward, self._backward, symbolic_zeros=True)  # they tell what is differentiated

        def compute(values: list[Any], leaves: list[Any]) -> Any:
            try:
                return custom(values, leaves)
            except NotImplementedError as error:  # for an eager shard_map, that alone: nothing is differentiated in it
                if call.has_run or "shard_map" not in str(error):
                    raise
                return call.primal(values, leaves)

        return call.outcome(compute)

    def _forward(self, values: list[Any], leaves: list[Any]) -> Any:
        call, arguments = self._call, self._call.arguments
        given = {variable: primal.value for variable, primal in zip(call.variables, values, strict=True)}
        pairs = zip(call.variables, values, strict=True)
        refused = call.closed_over(v for v, primal in pairs if primal.perturbed and is_differentiable(primal.value))
        plain = [primal.value for primal in leaves]
        taken = leaves if self._symbolic_zeros else plain
        taken = [plain[n] if n in arguments.fixed_leaves else leaf for n, leaf in enumerate(taken)]
        run = lambda birth: call.packed(self._pair(self._fwd(*arguments.called(taken))), birth)
        packed, new, groups = call.run(run, given, refused)
        found, (out, residuals) = packed.take(), packed.pair()
        results = call.results(given, out, found[: out.count], new, groups)
        after = [{**given, **new}[variable] for variable in call.variables]
        kept = Folded(residuals.treedef, found[out.count :])
        return results, (kept, after, [plain[n] for n in arguments.fixed_leaves])

    def _pair(self, out: Any) -> tuple[Any, Any]:
        if isinstance(out, tuple | list) and len(out) == 2:
            return out[0], out[1]
        raise StructureError(
            f"custom_vjp: fwd of {self._call.name} must return a pair.",
            at=_arguments.name_of(self._fwd),
            got=describe(out),
            expected="(result, residuals)",
            fix="return result, None, if bwd needs nothing",
        )

    def _backward(self, saved: Any, cotangents: Any) -> tuple[list[Any], list[Any]]:
        call, arguments = self._call, self._call.arguments
        residuals, values, fixed = saved
        leaves = dict.fromkeys(range(arguments.count)) | dict(zip(arguments.fixed_leaves, fixed, strict=True))
        cotangents = cotangents[0] if self._symbolic_zeros else map(instantiated, cotangents[0])

        def run(_: int) -> Any:
            args = arguments.called(list(leaves.values()))
            of_result = call.shaped(list(cotangents))
            return self._gathered(self._bwd(*[args[n] for n in arguments.fixed], residuals.unfolded(), of_result))

        given = dict(zip(call.variables, values, strict=True))
        (of_cells, of_leaves), new, groups = call.run(run, given)
        for variable in new:
            if variable not in cells_in(groups):
                raise self._wrote(variable)
        return [of_cells.get(variable) for variable in call.variables], [of_leaves.get(n) for n in leaves]

    def _wrote(self, variable: Variable) -> GradientError:
        is_stream = isinstance(variable, Rng)
        return GradientError(
            f"custom_vjp: bwd of {self._call.name} {'draws a key' if is_stream else 'writes a Variable'}.",
            at=variable.describe(),
            expected="a bwd that only reads",
            fix="draw in fwd, and hand over what was drawn in the residuals" if is_stream else "write it in fwd",
        )

    def _gathered(self, cotangents: Any) -> tuple[dict[Variable, Any], dict[int, Any]]:
        """What bwd returned, by Variable and by number of leaf."""
        arguments, name = self._call.arguments, self._call.name
        count = len(arguments.differentiated)
        if not isinstance(cotangents, tuple | list) or len(cotangents) != count:
            raise StructureError(
                f"custom_vjp: bwd of {name} must return one cotangent for each argument.",
                at=", ".join(arguments.names[n] for n in arguments.differentiated) or "no argument",
                got=describe(cotangents),
                expected=f"a tuple of {count}",
                fix="None for an argument without one; (g,) for a single argument",
            )
        of_cells: dict[Variable, Any] = {}
        of_leaves: dict[int, Any] = {}
        what = f"custom_vjp: a cotangent that bwd of {name} returns"
        for place, tree in zip(arguments.differentiated, cotangents, strict=True):
            at = arguments.names[place]
            parts = spread(tree, arguments.treedefs[place], at, what)
            for (part, number), cotangent in zip(arguments.slots(place), parts, strict=True):
                if number is not None:
                    value = fitting(cotangent, arguments.avals[number], at, what)
                    of_leaves[number] = _summed(value, arguments.axes[number])
                for variable, value, path in _of_cells(part, cotangent, at, what):
                    like = _frame.peek(variable)
                    value = fitting(value, like, path, what)
                    if value is not None:
                        value = _summed(value, varying(like))
                        of_cells[variable] = of_cells[variable] + value if variable in of_cells else value
        return of_cells, of_leaves


def _summed(value: Any, axes: frozenset[Any]) -> Any:
    """A cotangent, in a shard_map summed over the devices that share its primal."""
    over = tuple(varying(value) - axes) if value is not None else ()
    return jax.lax.psum(value, over) if over else value


def _of_cells(part: Any, cotangent: Any, at: str, what: str) -> list[tuple[Variable, Any, str]]:
    """The cotangents of the Variables in a part of an argument, and what messages call them."""
    if cotangent is None or not is_stateful(part):
        return []
    variables = cells_of(part)
    if not isinstance(part, Module):
        treedef = jax.tree.structure(0) if isinstance(part, Variable) else part.treedef
        return [(v, value, at) for v, value in zip(variables, spread(cotangent, treedef, at, what), strict=True)]
    structure = structure_of(part)
    if isinstance(cotangent, Module) and structure_of(cotangent).paths == structure.paths:
        cotangent = dict(zip(structure.paths, map(_frame.read, variables_of(cotangent)), strict=True))
    if not isinstance(cotangent, Mapping):
        raise StructureError(
            f"{what} does not fit a module.",
            at=f"{at}  ({type(part).__name__})",
            got=describe(cotangent),
            expected="a module like it, as tether.grad returns, {path: array}, or None",
            fix="tether.variables(module) has the paths",
        )
    for path in cotangent:
        if path not in structure.places:
            raise unknown_path(path, structure.places, f"{what} is for no cell of {at}")
    return [(variables[structure.places[path]], value, joined(at, path)) for path, value in cotangent.items()]
