# SPDX-License-Identifier: Apache-2.0
"""What custom_vjp and custom_jvp share: one call of a function that has a rule of its own.

JAX keeps the rule in its program and runs it when that program is differentiated, perhaps long after the call, when
the Frames of the call are gone. So every Variable that the function and its rule can reach is an operand, and each of
them runs in a Frame of its own, over the operands' values. Between operands and Frame there may be traces of which the
call knew nothing: what belonged to the trace of the call is then replaced by stand-ins.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._core.lift import Kept, Packed, unpack
from tether._core.structure import is_module
from tether._core.variable import Rng, Variable, is_key
from tether._modules.capture import Group, cells_for, looking_anew
from tether._modules.module import Module, structure_of, survey, variables_of
from tether._transforms import _arguments
from tether._transforms._body import Body, Operands
from tether._transforms._call import arrays_and_others, is_stateful, reach_of
from tether._transforms._specs import varying
from tether._transforms._target import dtype_of
from tether.errors import (
    ArgumentError,
    DtypeError,
    GradientError,
    LeakError,
    ShapeError,
    StructureError,
    TetherError,
    describe,
)
from tether.random._streams import own_stream


class Arguments(Operands):
    """The arguments of one call, by position.

    Args:
        fun: The function.
        args: Its arguments.
        fixed: Positions of those that aren't differentiated: in them only arrays are leaves.

    Attributes:
        fixed_leaves: Numbers of the leaves in those.
        differentiated: Positions of the others; ``names`` are those of all.
        own: The Variables in those that are differentiated.
        count: Of the leaves; ``avals`` are their shapes and dtypes, and ``axes`` those of a mesh that they vary along.
    """

    def __init__(self, fun: Callable[..., Any], args: Sequence[Any], fixed: tuple[int, ...]):
        super().__init__(*args)
        self.fixed, self.differentiated = sorted(fixed), [n for n in range(len(args)) if n not in fixed]
        self.names = [_arguments.name_at(fun, place) for place in range(len(args))]
        self.treedefs = [jax.tree.structure(arg, is_leaf=is_stateful) for arg in args]
        counts = [treedef.num_leaves for treedef in self.treedefs]
        self._spans = [slice(end - count, end) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]
        for part in itertools.chain.from_iterable(range(*self._spans[place].indices(sum(counts))) for place in fixed):
            self._is_leaf[part] = isinstance(self._parts[part], jax.Array)
        self.leaves = [part for part, is_leaf in zip(self._parts, self._is_leaf, strict=True) if is_leaf]
        self.fixed_leaves = [n for place in self.fixed for _, n in self.slots(place) if n is not None]
        self.count, self.avals = len(self.leaves), list(map(aval_of, self.leaves))
        self.axes = list(map(varying, self.leaves))
        self.own = {v for place in self.differentiated for part in self.parts(place) for v in cells_of(part)}

    def parts(self, place: int) -> list[Any]:
        """The parts of one argument: arrays, modules, and whatever else is no container."""
        return self._parts[self._spans[place]]

    def slots(self, place: int) -> list[tuple[Any, int | None]]:
        """The parts of one argument, each with its number among the leaves if it is one."""
        numbers = itertools.count(sum(self._is_leaf[: self._spans[place].start]))
        flags = self._is_leaf[self._spans[place]]
        return [(part, next(numbers) if flag else None) for part, flag in zip(self.parts(place), flags, strict=True)]

    def called(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments with these leaves."""
        return self.rebuilt(leaves)[0]

    def without_values(self, stand_in: Callable[[Variable], Variable]) -> Arguments:
        """The same arguments, without the leaves and with other Variables."""
        new = copy.copy(self)
        new.args, new.leaves = (), []
        new._parts = [
            None if flag else _with_cells(part, stand_in) for part, flag in zip(self._parts, self._is_leaf, strict=True)
        ]
        new.own = set(map(stand_in, self.own))
        return new


def cells_of(part: Any) -> tuple[Variable, ...]:
    """The Variables of a part of an argument."""
    if isinstance(part, Module):
        return variables_of(part)
    if isinstance(part, Variable):
        return (part,)
    return part.variables if is_stateful(part) else ()


def _with_cells(part: Any, stand_in: Callable[[Variable], Variable]) -> Any:
    """A part of an argument with other Variables; the part itself, if they are the same ones."""
    old = cells_of(part)
    new = list(map(stand_in, old))
    if all(a is b for a, b in zip(old, new, strict=True)):
        return part
    if isinstance(part, Module):
        return structure_of(part).build(new, survey(part).references)
    return new[0] if isinstance(part, Variable) else type(part)(part.treedef, new)


class Call:
    """One call of a function with a rule.

    Args:
        kind: Name of the transformation.
        fun: The user's function.
        rule: The functions of its rule, by what messages call them.
        arguments: What it is called with.

    Attributes:
        variables: The operands; those in differentiated arguments are in ``arguments.own``.
        treedef: Of the result, once something has run; ``avals`` are the shapes and dtypes of its leaves.
        written: The Variables that are written, in the order of the results for them.
        has_run: Whether the function or its rule has run, and not just the function's program.
    """

    def __init__(self, kind: str, fun: Callable[..., Any], rule: dict[str, Any], arguments: Arguments):
        self.kind, self.name, self.arguments = kind, _arguments.name_of(fun), arguments
        self.treedef: Any = None
        self.avals: list[Any] = []
        self.written: list[Variable] = []
        self._captured: list[Any] = []
        self._packed: Any = None
        self._fun, self._rule = fun, rule
        self.has_run = self._is_over = False
        thread = _frame.thread
        self._context = thread.training, thread.stream, thread.inside
        self._outer = _trace.current()
        reach = reach_of(fun, arguments.args, rule)
        lifted, self._others = arrays_and_others(reach)
        streams = [variable for variable in reach.variables() if isinstance(variable, Rng)]
        self._roots: dict[Variable, Variable] = {
            own: stream for stream in streams if (own := own_stream(stream)) is not stream
        }
        self._body: Body | None = None
        values, unused = {}, set(self._roots.values())
        if any(map(_trace.is_staged, _trace.chain(self._outer))):
            self._body = body = Body(kind, fun, arguments, refer=_if_settled)
            self._first(body.packed, body.avals, body.written, body.groups)
            values = dict(zip(body.variables, _frame.gather(body.variables), strict=True))
            unused = {stream for stream in streams if stream not in values and stream not in arguments.own}
        for variable in lifted:
            if variable not in values and variable not in unused:
                with contextlib.suppress(TetherError):  # what can't be read here raises where it is read
                    values[variable] = _frame.read(variable)
        self.variables, self._values = list(values), list(values.values())

    def outcome(self, compute: Callable[..., Any]) -> Any:
        """The result of the call, and its writes; ``compute`` is the JAX transformation, of values and leaves."""
        leaves, new = compute(self._values, self.arguments.leaves)
        _frame.write_back([*self.written, *cells_for(self._captured)], list(map(_landed, new)))
        out = unpack(self._packed, leaves)
        self._finish()
        return out

    def _finish(self) -> None:
        """Lets go of what belongs to the trace, and if a program has the rule, of what only the arguments bring."""
        stand_ins: dict[Variable, Variable] = {}
        is_in_program = self._body is not None and not self.has_run
        kept = reach_of(self._fun, (), self._rule).variables() if is_in_program else self.variables

        def stand_in(variable: Variable) -> Variable:
            root = self._roots.get(variable, variable)
            if root.home is None and root in kept:
                return root
            if root not in stand_ins:
                stand_ins[root] = type(root).make(None, label=root.label)
            return stand_ins[root]

        training, stream, inside = self._context
        self._context = training, stream and stand_in(stream), inside
        self.arguments = self.arguments.without_values(stand_in)
        self.variables = list(map(stand_in, self.variables))
        self.written = list(map(stand_in, self.written))
        self._others = {stand_in(variable): other for variable, other in self._others.items()}
        self._roots, self._values = {}, []
        self._body = self._outer = self._packed = None
        self._is_over = True

    def closed_over(self, differentiated: Iterable[Variable]) -> set[Variable]:
        """Those of the Variables that are in no argument of which the rule gives a derivative."""
        return {variable for variable in differentiated if variable not in self.arguments.own}

    def primal(self, values: list[Any], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """The function itself, as JAX calls it where nothing is differentiated."""
        given = dict(zip(self.variables, values, strict=True))
        if self._body is None:
            run = lambda birth: self.packed(self._fun(*self.arguments.called(leaves)), birth)
            packed, new, groups = self.run(run, given)
            return self.results(given, packed, packed.take(), new, groups)
        out, new = self._body(given, leaves)
        return out, [new[v] for v in [*self.written, *cells_in(self._body.groups)]]

    @staticmethod
    def packed(out: Any, birth: int) -> Packed:
        """A result as leaves; in it, a module that belongs to no trace stays the same object."""
        return Packed(out, birth, _if_settled)

    def run(
        self, fun: Callable[[int], Any], given: dict[Variable, Any], refused: Collection[Variable] = ()
    ) -> tuple[Any, dict[Variable, Any], list[Group]]:
        """Runs a function in a Frame over values of the operands: its result, what it wrote, what was captured.

        The function is given the birth number of the Frame. A read of the ``refused`` is an error.
        """
        values = {**self._others, **{variable: value for variable, value in given.items() if variable not in refused}}
        self.has_run = True
        with self._around(), looking_anew() as groups:
            frame = _frame.Frame(self.kind, miss="note")
            if not self._is_over:
                frame.outer = self._outer
            frame.missed = _Missing(functools.partial(self._check_missing, frame, refused))
            out, written, new = frame.run(values, lambda: fun(frame.birth))
        return out, dict(zip(written, new, strict=True)), groups

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        """What was in force at the call. After it, the Frames that are there belong to others."""
        thread = _frame.thread
        outer = thread.training, thread.stream, thread.inside, thread.frames
        thread.training, thread.stream, thread.inside = self._context
        thread.frames = [] if self._is_over else thread.frames
        try:
            yield
        finally:
            thread.training, thread.stream, thread.inside, thread.frames = outer

    def _check_missing(self, frame: _frame.Frame, refused: Collection[Variable], variable: Variable) -> None:
        if variable in refused and variable in frame.reads:
            del frame.reads[variable]  # a call inside may only have looked whether it can be read
            raise GradientError(
                f"{self.kind}: a Variable is differentiated that is no argument, so the rule gives no gradient of it.",
                at=variable.describe(),
                got=f"a read in {self.name} of a Variable that it closes over",
                expected="every Variable that is differentiated in an argument",
                fix=[
                    f"pass the module as an argument of {self.name}: the rule then says its gradient",
                    "tether.freeze(model, path) in what is differentiated, if it is a constant",
                ],
            )
        if self._is_over and variable not in refused:
            raise self._unseen(variable)

    def _unseen(self, variable: Variable) -> LeakError:
        is_stream = isinstance(variable, Rng)
        return LeakError(
            f"{self.kind}: the rule of {self.name} uses a Variable that the call did not see, and runs after it.",
            at=variable.describe(),
            got="a draw of a key" if is_stream else "a Variable behind a property, a registry or another object",
            expected="Variables that the function or its rule can be seen to reach",
            fix=f"draw in {self.name} too, or hand over a key" if is_stream else "pass its module as an argument",
        )

    def results(
        self,
        given: dict[Variable, Any],
        packed: Packed,
        leaves: list[Any],
        new: dict[Variable, Any],
        groups: list[Group],
    ) -> tuple[list[Any], list[Any]]:
        """Leaves and written values in the order of what ran first."""
        avals = [aval_of(leaf) for leaf in leaves]
        if self.treedef is None:
            self._first(packed, avals, list(new), groups)
        else:
            self._check_same(packed, avals, new, groups)
        after = {**given, **new}
        for variable in self.written:
            if variable not in after:
                raise self._unseen(variable)
        return leaves, [after[variable] for variable in [*self.written, *cells_in(groups)]]

    def _first(self, packed: Packed, avals: Sequence[Any], written: list[Variable], groups: list[Group]) -> None:
        cells = cells_in(groups)
        self._packed, self.treedef, self.avals = packed, packed.treedef, list(avals)
        self._captured = [group.key for group in groups]
        self.written = [variable for variable in written if variable not in cells]

    def _check_same(self, packed: Packed, avals: list[Any], new: dict[Variable, Any], groups: list[Group]) -> None:
        """The rule computes what the function computes, and writes nothing else."""
        if packed.treedef != self.treedef:
            raise StructureError(
                f"{self.kind}: the rule of {self.name} returns another structure than {self.name} itself.",
                got=str(packed.treedef),
                expected=str(self.treedef),
                fix=f"return first what {self.name} returns",
            )
        for place, (got, expected) in enumerate(zip(avals, self.avals, strict=True)):
            if (got.shape, got.dtype) != (expected.shape, expected.dtype):
                raise ShapeError(
                    f"{self.kind}: the rule of {self.name} returns another shape or dtype than {self.name} itself.",
                    at=f"leaf {place} of the result",
                    got=describe(got),
                    expected=describe(expected),
                    fix=f"return first what {self.name} returns",
                )
        cells = cells_in(groups)
        for variable in new:
            if variable not in self.written and variable not in cells:
                raise GradientError(
                    f"{self.kind}: the rule of {self.name} writes a Variable that {self.name} itself doesn't write.",
                    at=variable.describe(),
                    got="a draw of a key" if isinstance(variable, Rng) else "a write in the rule alone",
                    expected="the same writes, whether the call is differentiated or not",
                    fix=f"write it in {self.name}, too, or return the value",
                )
        if [group.key for group in groups] != self._captured:
            raise ArgumentError(
                f"capture: the rule of {self.name} calls other modules than {self.name} itself.",
                got=", ".join(group.path for group in groups) or "nothing",
                expected=", ".join(path for _, path, _ in self._captured) or "nothing",
                fix="capture a part that both call, or the whole function",
            )

    def shaped(self, values: list[Any]) -> Any:
        """Cotangents of the result, like it; None for a module that existed before."""
        tree = jax.tree.unflatten(self.treedef, values)
        return jax.tree.map(lambda part: None if isinstance(part, Kept) else part, tree, is_leaf=_is_kept)


class _Missing(dict):
    """What a Frame is told to do when it has no value of a Variable, besides noting it."""

    def __init__(self, check: Callable[[Variable], None]):
        super().__init__()
        self._check = check

    def __setitem__(self, variable: Variable, value: None) -> None:
        self._check(variable)
        super().__setitem__(variable, value)


def _if_settled(module: Module) -> Module | None:
    """A module that belongs to no trace stays the same object; another one is a value."""
    return module if all(variable.home is None for variable in variables_of(module)) else None


def _landed(value: Any) -> Any:
    """A value as it is written: without a tangent, and with no lane if it is the same in all of them.

    JAX gives whatever comes out of a rule a tangent, integers too, and a lane. Each of these operations drops both.
    """
    if _trace.owner(value) is None or is_differentiable(value):
        return _trace.stopped(value)
    if is_key(value):
        return jax.random.wrap_key_data(jax.random.key_data(value), impl=jax.random.key_impl(value))
    return value | value


def _is_kept(part: Any) -> bool:
    return isinstance(part, Kept)


@jax.tree_util.register_pytree_node_class
class Folded:
    """A tree that JAX hands on. Its modules are made, or found again, where it is unfolded: they belong there."""

    def __init__(self, treedef: Any, leaves: Sequence[Any]):
        self._treedef, self._leaves = treedef, leaves

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        return self._leaves, self._treedef

    @classmethod
    def tree_unflatten(cls, treedef: Any, leaves: Sequence[Any]) -> Folded:
        return cls(treedef, leaves)

    def unfolded(self) -> Any:
        tree = jax.tree.unflatten(self._treedef, self._leaves)
        is_leaf = lambda part: _is_kept(part) or is_module(part)
        return jax.tree.map(lambda part: part.target if _is_kept(part) else part, tree, is_leaf=is_leaf)


def cells_in(groups: list[Group]) -> list[Variable]:
    return [cell for group in groups for cell in group.cells.variables]


def aval_of(leaf: Any) -> Any:
    """The shape and dtype of a leaf, which may be a number."""
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf))


def positional(kind: str, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments by position, defaults too, or an error."""
    signature = _arguments.signature(fun)
    try:
        bound = None if signature is None else signature.bind(*args, **kwargs)
        by_name = [name for name in kwargs if bound is None or name in bound.kwargs]
        if not by_name:
            return args if bound is None else _with_defaults(bound)
        got = f"{', '.join(by_name)}, by name alone"
    except TypeError as error:
        got = str(error)
    raise ArgumentError(
        f"{kind}: the arguments can't be given by position, as a rule takes them.",
        at=f"{_arguments.name_of(fun)}{signature or '(...)'}",
        got=got,
        expected="arguments that fit the signature, none of them by name alone",
    )


def _with_defaults(bound: inspect.BoundArguments) -> tuple[Any, ...]:
    bound.apply_defaults()
    return bound.args


def spread(tree: Any, treedef: Any, at: str, what: str) -> list[Any]:
    """The leaves of a tree of this structure; None stands for all that lies below it."""
    if tree is None:
        return [None] * treedef.num_leaves
    if jax.tree_util.treedef_is_leaf(treedef):
        return [tree]
    parts, node = jax.tree.flatten(tree, is_leaf=lambda part: part is not tree)
    if node.node_data() != treedef.node_data() or len(parts) != len(treedef.children()):
        raise StructureError(
            f"{what} has another structure than what it belongs to.",
            at=at,
            got=str(jax.tree.structure(tree, is_leaf=is_stateful)),
            expected=str(treedef),
            fix="None, in place of an array or of any part, for zeros",
        )
    pairs = zip(parts, treedef.children(), strict=True)
    return [leaf for part, child in pairs for leaf in spread(part, child, at, what)]


def fitting(value: Any, like: Any, at: str, what: str) -> Any:
    """A tangent or cotangent as an array like its primal; None for zeros, and where there is none."""
    if value is None or is_zero(value) or not is_differentiable(like):
        return None
    dtype = dtype_of(value)
    array = None if dtype is None or not jnp.issubdtype(dtype, jnp.number) else jnp.asarray(value)
    if array is None or not _is_real(array) >= _is_real(like):
        fault = f"{what} is of another kind than its primal."
        raise DtypeError(fault, at=at, got=describe(value), expected=describe(like))
    if array.shape != like.shape:
        raise ShapeError(
            f"{what} has another shape than its primal.",
            at=at,
            got=describe(array),
            expected=describe(like),
            fix="None for zeros of its shape",
        )
    return array.astype(like.dtype)


def is_differentiable(value: Any) -> bool:
    """Whether a value has tangents."""
    return hasattr(value, "dtype") and bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _is_real(value: Any) -> bool:
    return not jnp.issubdtype(value.dtype, jnp.complexfloating)


def is_zero(value: Any) -> bool:
    """Whether JAX knows a tangent to be zero."""
    return isinstance(value, jax.custom_derivatives.SymbolicZero)


def instantiated(value: Any) -> Any:
    """A tangent as an array, where JAX knows it to be zero, too."""
    if not is_zero(value):
        return value
    dtype = value.aval.dtype
    zeros = np.zeros if dtype == jax.dtypes.float0 else jnp.zeros
    return zeros(value.aval.shape, dtype)
