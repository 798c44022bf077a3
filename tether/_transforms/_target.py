# SPDX-License-Identifier: Apache-2.0
"""What the grad family shares: what a call differentiates, and the function as JAX differentiates it.

A ``Rule`` says what a transformation can differentiate; a ``Target`` is what one call does: Variables and array
leaves. Its ``Layout`` puts results of them into trees of the user's shape, and holds no values, so that a function
that outlives the call can keep it. ``Differentiable`` is the user's function, of flat values, under a Frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tether._core import frame as _frame
from tether._core.lift import Lifted
from tether._core.structure import Structure, is_module, joined
from tether._core.variable import Param, Variable
from tether._modules.module import Module, structure_of, variables_of
from tether._modules.selection import matches
from tether._transforms import _arguments
from tether._transforms._call import is_stateful
from tether.errors import ArgumentError, GradientError, describe


@dataclass(frozen=True)
class Rule:
    """What a transformation can differentiate.

    Args:
        name: Of the transformation, for messages.
        inputs: Kind of dtype that what is differentiated must have.
        outputs: Kind of dtype that every result must have; None for any array.
        allow_int: Whether integers are differentiated too; their gradient is float0.
        hands_through: Whether an argument without a float is handed through, as JAX does; else it raises.
    """

    name: str
    inputs: Any = jnp.inexact
    outputs: Any = None
    allow_int: bool = False
    hands_through: bool = False


class Leaf(NamedTuple):
    """In a layout: an array, or a Variable."""

    number: int

    def filled(self, flat: Sequence[Any]) -> Any:
        return flat[self.number]


class Cells(NamedTuple):
    """In a layout: a module, with the number of each Variable, None where it isn't differentiated."""

    structure: Structure
    numbers: tuple[int | None, ...]

    def filled(self, flat: Sequence[Any]) -> Any:
        values = [None if number is None else flat[number] for number in self.numbers]
        return self.structure.build(self.structure.variables(values))


class Other(NamedTuple):
    """In a layout: what has no float in it; its gradient is float0, as in JAX, or None if it is no array."""

    zero: Any

    def filled(self, flat: Sequence[Any]) -> Any:
        return self.zero


class Layout(NamedTuple):
    """Trees without their values: where in them is what, by number, in a flat list."""

    names: tuple[str, ...]
    treedefs: tuple[Any, ...]
    slots: tuple[tuple[Any, ...], ...]

    def filled(self, flat: Sequence[Any]) -> list[Any]:
        """The trees of gradients: a module of them for a module, None where nothing is differentiated."""
        pairs = zip(self.treedefs, self.slots, strict=True)
        return [jax.tree.unflatten(treedef, [slot.filled(flat) for slot in slots]) for treedef, slots in pairs]

    def places(self) -> list[list[str]]:
        """What messages call each slot."""
        trees = [treedef.unflatten(range(treedef.num_leaves)) for treedef in self.treedefs]
        return [[name + path for path, _ in with_paths(tree)] for name, tree in zip(self.names, trees, strict=True)]


class Target:
    """What one call differentiates: Variables, each once, and array leaves, in trees of the user's shape.

    Args:
        rule: Of the transformation.
        trees: The arguments to differentiate, or what ``wrt=`` names.
        names: What messages call them.
        select: Which Variables of modules.
        numbers: Where the trees stand among the arguments; empty if they are closed over.
    Attributes:
        variables: Variable -> its place in the flat list of all that is differentiated.
        layout: The trees without their values.
    """

    def __init__(self, rule: Rule, trees: Sequence[Any], names: list[str], select: Any, numbers: tuple[int, ...]):
        self.variables: dict[Variable, int] = {}
        self.numbers = numbers
        self._rule, self._select = rule, select
        self._leaves: list[Any] = []  # None in place of a Variable
        flat = [jax.tree.flatten(tree, is_leaf=is_stateful) for tree in trees]
        self._parts = [parts for parts, _ in flat]
        slots = [tuple(self._slot(part, name) for part in parts) for (parts, _), name in zip(flat, names, strict=True)]
        self.layout = Layout(tuple(names), tuple(treedef for _, treedef in flat), tuple(slots))

    def _slot(self, part: Any, name: str) -> Any:
        if isinstance(part, Module):
            return self._cells(part, name)
        value = _frame.peek(part) if isinstance(part, Variable) else part
        if self._takes(value, name):
            return Leaf(self._number(part))
        if self._rule.hands_through:
            return Other(None if dtype_of(value) is None else np.zeros(np.shape(value), jax.dtypes.float0))
        raise GradientError(
            f"{self._rule.name}: an argument has no float in it.",
            at=name,
            got=describe(value),
            expected="a float or complex array, or a module with such Params",
            fix="choose another argument by argnums=, or cast it: x.astype(jnp.float32)",
        )

    def _cells(self, module: Module, name: str) -> Cells:
        structure, chosen = structure_of(module), set(matches(self._select, module))
        numbers = [
            self._number(v) if v in chosen and self._takes(_frame.peek(v), joined(name, path)) else None
            for v, path in zip(variables_of(module), structure.paths, strict=True)
        ]
        return Cells(structure, tuple(numbers))

    def _number(self, part: Any) -> int:
        if isinstance(part, Variable):
            if part in self.variables:
                return self.variables[part]
            self.variables[part] = len(self._leaves)
            part = None
        self._leaves.append(part)
        return len(self._leaves) - 1

    def _takes(self, value: Any, at: str) -> bool:
        """Whether a value is differentiated."""
        dtype = dtype_of(value)
        if dtype is None or isinstance(value, bool):
            return False
        if not jnp.issubdtype(dtype, jnp.inexact):
            return self._rule.allow_int
        if not jnp.issubdtype(dtype, self._rule.inputs):
            raise _other_kind(self._rule, "an argument", at, value, self._rule.inputs)
        return True

    def is_empty(self) -> bool:
        """Whether there is nothing to differentiate."""
        return not self._leaves

    def values(self) -> list[Any]:
        """All that is differentiated, as one flat list."""
        flat = list(self._leaves)
        for place, value in zip(self.variables.values(), _frame.gather(list(self.variables)), strict=True):
            flat[place] = value
        return flat

    def rebuilt(self, flat: Sequence[Any]) -> list[Any]:
        """The trees with other leaves, and the same modules and Variables."""

        def part(slot: Any, old: Any) -> Any:
            return flat[slot.number] if isinstance(slot, Leaf) and not isinstance(old, Variable) else old

        return [
            jax.tree.unflatten(treedef, list(map(part, slots, parts)))
            for treedef, slots, parts in zip(self.layout.treedefs, self.layout.slots, self._parts, strict=True)
        ]


class Choice:
    """What ``argnums=`` and ``wrt=`` say of a function: which of its arguments, or what wherever it is."""

    def __init__(self, rule: Rule, fun: Callable[..., Any], argnums: Any, wrt: Any):
        _arguments.checked_callable(fun, rule.name)
        self._rule, self._fun, self._wrt = rule, fun, wrt
        self._is_closed_over = _is_closed_over(wrt)
        if self._is_closed_over and argnums is not None:
            what = "argnums= and a wrt= of modules exclude each other."
            raise ArgumentError(f"{rule.name}: {what}", fix="leave out one of them")
        self._argnums = 0 if argnums is None else argnums
        self._select = Param if wrt is None or self._is_closed_over else wrt

    def target(self, args: tuple[Any, ...]) -> Target:
        """What a call with these arguments differentiates."""
        if self._is_closed_over:
            trees, names, numbers = [self._wrt], ["wrt"], ()
        else:
            numbers = _arguments.positions(self._argnums, self._fun, len(args), "argnums")
            trees, names = [args[n] for n in numbers], [_arguments.name_at(self._fun, n) for n in numbers]
        target = Target(self._rule, trees, names, self._select, numbers)
        if target.is_empty():
            raise _nothing_to_differentiate(self._rule, trees, names, self._select)
        return target

    def shaped(self, gradients: list[Any]) -> Any:
        """One for each tree as the user asked for it: alone, or as a tuple."""
        return tuple(gradients) if isinstance(self._argnums, tuple | list) else gradients[0]


class Differentiable:
    """A function as JAX differentiates it: of flat values, under a Frame, with flat results.

    ``inside`` is what JAX calls, once. ``outside`` takes what stands for each leaf of the result, and what JAX
    returned as auxiliary; it writes back and gives the user's ``(result, aux)``.

    Args:
        rule: Of the transformation.
        fun: The user's function.
        args: Its arguments, and ``kwargs``.
        target: What is differentiated.
        has_aux: Whether ``fun`` returns ``(result, aux)``.
        check: Raises if the result can't be differentiated; by default, by the rule.

    Attributes:
        treedef: Of the result, known once ``inside`` has run.
    """

    def __init__(
        self,
        rule: Rule,
        fun: Callable[..., Any],
        args: Any,
        kwargs: Any,
        target: Target,
        has_aux: bool,
        check: Callable[[Any], None] | None = None,
    ):
        self._rule, self._fun, self._has_aux = rule, fun, has_aux
        self._args, self._kwargs, self._target = args, kwargs, target
        self._check = check or self._check_result
        self._lifted: Any = Lifted(rule.name, self._run)
        self._opaque: dict[int, Any] = {}
        self.treedef: Any = None

    def inside(self, flat: list[Any]) -> tuple[list[Any], Any]:
        """The leaves of the result, and as auxiliary those of aux and the written values."""
        args = list(self._args)
        for number, tree in zip(self._target.numbers, self._target.rebuilt(flat), strict=False):
            args[number] = tree
        given = {variable: flat[place] for variable, place in self._target.variables.items()}
        out, new = self._lifted.inside(given, *args, **self._kwargs)
        count = self.treedef.num_leaves
        aux = out[count:]
        self._opaque = {place: part for place, part in enumerate(aux) if not _is_array(part)}
        return out[:count], ([part if _is_array(part) else None for part in aux], new)

    def _run(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out, aux = self._fun(*args, **kwargs), None
        if self._has_aux:
            if not (isinstance(out, tuple | list) and len(out) == 2):
                raise GradientError(
                    f"{self._rule.name}: with has_aux the function must return a pair.",
                    at=_arguments.name_of(self._fun),
                    got=describe(out),
                    expected="(value, aux)",
                )
            out, aux = out
        self._check(out)
        self.treedef = jax.tree.structure(out)
        return out, aux

    def _check_result(self, out: Any) -> None:
        rule, fun = self._rule, _arguments.name_of(self._fun)
        for path, part in with_paths(out, is_leaf=is_module):
            if is_module(part) and self._existed(part):
                raise GradientError(
                    f"{rule.name}: a result is a module that existed before.",
                    at=f"{fun}, result{path}",
                    got=describe(part),
                    expected="arrays that the function computes",
                    fix=["return what depends on the input alone", "has_aux=True, and return (value, module)"],
                )
        leaves = with_paths(out)
        for path, leaf in leaves:
            dtype = dtype_of(leaf)
            if dtype is None:
                raise GradientError(
                    f"{rule.name}: a result is no array.",
                    at=f"{fun}, result{path}",
                    got=describe(leaf),
                    expected="arrays and numbers, in any pytree",
                    fix="has_aux=True, and return (value, everything else)",
                )
            if rule.outputs is not None and not jnp.issubdtype(dtype, rule.outputs):
                raise _other_kind(rule, "a result", f"{fun}, result{path}", leaf, rule.outputs)
        if rule.outputs is not None and not leaves:
            raise GradientError(
                f"{rule.name}: the function returns no array.", at=fun, got=describe(out), expected="arrays of floats"
            )

    def _existed(self, module: Module) -> bool:
        """Whether a module, or one that it is a view of, is older than the call."""
        birth, variables = self._lifted.frame.birth, variables_of(module)
        return module._tether.birth < birth or (bool(variables) and all(v.birth < birth for v in variables))

    def outside(self, out: list[Any], rest: Any) -> tuple[Any, Any]:
        """``(result, aux)``, with ``out`` as the leaves of the result."""
        aux, new = list(rest[0]), rest[1]
        for place, part in self._opaque.items():
            aux[place] = part
        lifted, self._lifted = self._lifted, None  # else a cycle keeps the arguments alive
        return lifted.outside([*out, *aux], new)


def dtype_of(value: Any) -> Any:
    """The dtype of an array or number as JAX takes it; None for anything else."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        return None
    try:
        return jnp.result_type(value)
    except TypeError:  # a NumPy array of strings or objects
        return None


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic) and dtype_of(value) is not None


def with_paths(tree: Any, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its path as text."""
    parts = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [(jax.tree_util.keystr(path), part) for path, part in parts]


def _is_closed_over(wrt: Any) -> bool:
    if isinstance(wrt, list | tuple | dict):
        parts = list(wrt.values() if isinstance(wrt, dict) else wrt)
        return len(parts) > 0 and all(map(_is_closed_over, parts))
    return isinstance(wrt, Module | Variable)


_KINDS = {
    jnp.inexact: "a float or complex array",
    jnp.floating: "a float array",
    jnp.complexfloating: "a complex array",
}


def _other_kind(rule: Rule, what: str, at: str, value: Any, kind: Any) -> GradientError:
    """The error for a dtype that the transformation can't differentiate."""
    if kind is jnp.complexfloating:
        fix: Any = "cast it: z.astype(jnp.complex64), or leave out holomorphic=True"
    elif jnp.issubdtype(jnp.result_type(value), jnp.complexfloating):
        fix = [
            "holomorphic=True, if the function is",
            "real and imaginary part as two arrays",
        ]
    else:
        fix = "cast it, or with has_aux=True return it beside what is differentiated"
    return GradientError(
        f"{rule.name}: {what} has the wrong dtype.", at=at, got=describe(value), expected=_KINDS[kind], fix=fix
    )


def _nothing_to_differentiate(rule: Rule, trees: list[Any], names: list[str], select: Any) -> GradientError:
    return GradientError(
        f"{rule.name}: there is no float to differentiate.",
        at=", ".join(names),
        got=", ".join(map(describe, trees)),
        expected=f"an argument with floats, or float Variables of {getattr(select, '__name__', select)!r}",
        fix=["another argnums=", "wrt=: a selection that names float Variables; a frozen Param is no Param"],
    )
