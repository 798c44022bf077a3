# SPDX-License-Identifier: Apache-2.0
"""shard_map: a function of the blocks that the devices of a mesh hold, of its arguments and of its Variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from tether._core import frame as _frame
from tether._core import ref as _ref
from tether._core.lift import Lifted
from tether._core.structure import is_module
from tether._core.variable import Rng, Variable, coerced, is_key
from tether._modules.capture import cells_for, looking_anew
from tether._modules.module import variables_of
from tether._transforms import _arguments
from tether._transforms._call import arrays_and_others, is_stateful, reach_of, resolved
from tether._transforms._specs import INFER, Grid, axes_of, in_words, specs_in, spread, variable_specs
from tether._transforms._traced import MOST_TRACES, endless, warn_missed
from tether.errors import ArgumentError, ShapeError, VmapWriteError, describe
from tether.random._streams import settle

_RULES = ("mean", "sum", "discard")


class _MissedRead(Exception):
    """Ends a run that met Variables which were not found before: what it gave is not used."""


def shard_map(
    f: Callable[..., Any] | None = None,
    /,
    *,
    out_specs: Any,
    in_specs: Any = INFER,
    mesh: Mesh | AbstractMesh | None = None,
    axis_names: set[Any] | frozenset[Any] = frozenset(),
    check_vma: bool = True,
    states: dict[Any, PartitionSpec] | None = None,
    writes: dict[Any, str] | None = None,
) -> Any:
    """Maps a function over the shards of its arguments, one for each device of a mesh.

    A Variable that the function comes by, in whatever way, is split as its own sharding on the mesh says, else
    every shard has all of it. What a shard writes to its block of a split Variable becomes that block. To a
    Variable that is not split, all shards must write the same value, or a rule says what becomes of the values.
    Random draws differ from shard to shard, and the stream outside advances once; a stream of split keys is drawn
    from as it is. A Variable stays where it was: its sharding after the call is that before.

    Args:
        f: The function or module; without it, a decorator with the options is returned.
        out_specs: As in ``jax.shard_map``, for the results.
        in_specs: As in ``jax.shard_map``, for the positional arguments; entries behind them are for those given by
            name, of which each shard has all where there is none. None passes an argument as it is; strings, bools
            and what else is no array pass anyway. For a module: a PartitionSpec for all its Variables,
            ``{select: PartitionSpec}`` for some, a module of PartitionSpecs, or None. Without ``in_specs``, all
            axes must be explicit.
        mesh: As in ``jax.shard_map``.
        axis_names: As in ``jax.shard_map``.
        check_vma: As in ``jax.shard_map``. Without it nobody knows which values differ from shard to shard: a
            write to a Variable that is not split is taken to be the same in all shards, and a rule is applied
            to it over all axes.
        states: ``{select: PartitionSpec}`` for Variables, however the function comes by them; goes before ``in_specs``.
        writes: Rules for writes that differ between shards which share the Variable: ``{select: rule}``, a
            rule being "mean", "sum" or "discard". A Variable's own ``reduce=`` holds where no rule does.
    Returns:
        The mapped function.
    Raises:
        VmapWriteError: a write that differs from shard to shard, without a rule.
        ShapeError: an axis that the mesh doesn't divide, or a PartitionSpec with more entries than axes.
        ArgumentError: no mesh, an axis that it doesn't have, specs that don't fit the arguments or results.
    Example:
        >>> P, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh(jax.devices(), "devices")
        >>> norm = nn.BatchNorm(3, axis_name="devices", channel_axis=1)
        >>> split = tether.shard_map(norm, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"))
        >>> split(jnp.ones((2 * len(jax.devices()), 3))).sharding.spec
        P('devices',)
    """
    options = {"mesh": mesh, "axis_names": axis_names, "check_vma": check_vma, "states": states, "writes": writes}
    if f is None:
        return functools.partial(shard_map, out_specs=out_specs, in_specs=in_specs, **options)
    _arguments.checked_callable(f, "shard_map")
    for rule in (writes or {}).values():
        if rule not in _RULES:
            raise ArgumentError(
                "shard_map: no such rule for writes.", got=repr(rule), expected=" or ".join(map(repr, _RULES))
            )

    @functools.wraps(f, updated=())
    def shard_map_fun(*args: Any, **kwargs: Any) -> Any:
        grid = Grid(mesh, axis_names, check_vma)
        inputs = _Inputs(f, args, kwargs, in_specs, grid, states or {}, writes or {})
        return _mapped(f, inputs, out_specs, {"mesh": mesh, "axis_names": axis_names})

    return shard_map_fun


def _mapped(f: Callable[..., Any], inputs: _Inputs, out_specs: Any, options: dict[str, Any]) -> Any:
    found: list[Variable] = []
    for _ in range(MOST_TRACES):
        with looking_anew() as seen:
            lifted = Lifted("shard_map", f)
            lifted.frame.miss = "note"
            results = _Results(inputs, out_specs)
            try:
                groups = _computed(lifted, inputs, results, options)
            except Exception:
                if not lifted.frame.missed:
                    raise
                found += lifted.frame.missed
                inputs.lift(lifted.frame.missed)
                continue
        if found:
            warn_missed("shard_map", _arguments.name_of(f), found)
        inputs.record(lifted.frame)
        leaves, new = results.taken(groups)
        own = [cell for group in seen for cell in group.cells.variables]
        cells = dict(zip(own, cells_for(group.key for group in seen), strict=True))
        lifted.written = [cells.get(variable, variable) for variable in lifted.written]
        return lifted.outside(leaves, [coerced(v, value) for v, value in zip(lifted.written, new, strict=True)])
    raise endless("shard_map", _arguments.name_of(f), found)


def _computed(lifted: Lifted, inputs: _Inputs, results: _Results, options: dict[str, Any]) -> dict[int, list[Any]]:
    frame, f, grid = lifted.frame, lifted.fun, inputs.grid

    def fun(*args: Any, **kwargs: Any) -> Any:
        frame.given = inputs.own_streams()
        out = f(*args, **kwargs)
        settle(frame)
        results.note(out, frame.birth)
        return out

    def body(values: list[Any], leaves: list[Any]) -> Any:
        index: Any = jax.lax.axis_index(grid.axes)
        frame.lane = frame.row = index
        args, kwargs = inputs.rebuilt(leaves)
        out, new = lifted.inside(inputs.inside(values), *args, **kwargs)
        if frame.missed:
            raise _MissedRead
        lifted.written, new = results.reduced(lifted.written, new)
        return results.grouped(out, new)

    lifted.fun = fun
    in_specs = (list(inputs.variables.values()), inputs.specs)
    out_specs = dict(enumerate(results.specs))
    compute = jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=grid.checks, **options)
    return compute([grid.placed(*pair) for pair in inputs.variables.items()], inputs.leaves)


class _Inputs:
    """The arguments and Variables of one call, with their specs.

    Attributes:
        variables: Those that hold arrays, each with its PartitionSpec.
        leaves, specs: The arrays among the arguments, and their PartitionSpecs.
        one_key: Streams of which a shard's block is one key, from which it draws, with the shape of the block.
    """

    def __init__(self, f: Any, args: Any, kwargs: Any, in_specs: Any, grid: Grid, states: Any, writes: Any):
        self.grid, self._args = grid, (args, kwargs)
        self.leaves: list[Any] = []
        self.specs: list[PartitionSpec] = []
        self._declared: dict[Variable, PartitionSpec] = {}
        self._parts = [self._argument(*argument) for argument in _per_argument(f, args, kwargs, in_specs, grid)]
        reach = reach_of(f, args, kwargs)
        self._names = reach.variables()
        for select, spec in states.items():
            grid.check(spec, f"states, at {describe(select)}")
        self._declared.update(resolved("shard_map", states, reach))
        self._rules = resolved("shard_map", writes, reach)
        self._stacked = {v for _, m in reach.modules.values() if m._tether.stacked for v in variables_of(m)}
        self.variables: dict[Variable, PartitionSpec] = {}
        self.one_key: dict[Variable, tuple[int, ...]] = {}
        arrays, self._others = arrays_and_others(reach)
        self.lift(arrays)

    def lift(self, variables: Iterable[Variable]) -> None:
        """Makes Variables explicit inputs."""
        for variable in variables:
            value = _frame.peek(variable)
            if not isinstance(value, jax.Array):
                self._others[variable] = value
                continue
            spec = self._declared[variable] if variable in self._declared else self.grid.own_spec(variable, value)
            self.grid.check_fit(spec, value, self.name(variable))
            if not _ref.holds(variable):  # nobody put it where its Ref is
                self.grid.check_devices(_frame.held(variable), self.name(variable))
            self.variables[variable] = spec
            is_own = isinstance(variable, Rng) and axes_of(spec) and variable not in self._stacked
            if is_own and value.size == self.grid.size_of(axes_of(spec)):
                self.one_key[variable] = (1,) * value.ndim

    def name(self, variable: Variable) -> str:
        return f"{self._names.get(variable) or variable.label or 'a Variable'}  ({type(variable).__name__})"

    def _argument(self, name: str, value: Any, specs: Any) -> Any:
        treedef = jax.tree.structure(value, is_leaf=is_stateful)
        return treedef, [self._part(*part) for part in spread(specs, value, name, "in_specs")]

    def _part(self, name: str, part: Any, spec: Any) -> Any:
        if is_stateful(part):
            specs = variable_specs(spec, part, name, self.grid)
            self._declared.update(specs)
            return lambda _: part
        is_number = isinstance(part, int | float | complex) and not isinstance(part, bool)
        if spec is None or not (is_number or isinstance(part, jax.Array | np.ndarray | np.generic)):
            return lambda _: part
        spec = self.grid.inferred(part) if spec is INFER else self.grid.check(spec, f"in_specs of {name}")
        self.grid.check_fit(spec, part, name)
        self.grid.check_devices(part, name)
        self.leaves.append(part)
        self.specs.append(spec)
        place = len(self.leaves) - 1
        return lambda leaves: leaves[place]

    def rebuilt(self, leaves: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with the blocks of this shard."""
        new = [jax.tree.unflatten(treedef, [part(leaves) for part in parts]) for treedef, parts in self._parts]
        args, kwargs = self._args
        return new[: len(args)], dict(zip(kwargs, new[len(args) :], strict=True))

    def own_streams(self) -> frozenset[Variable]:
        """The streams of which each shard has a key of its own."""
        return frozenset(v for v, spec in self.variables.items() if isinstance(v, Rng) and axes_of(spec))

    def inside(self, values: list[Any]) -> dict[Variable, Any]:
        """The Variables with the blocks of this shard."""
        blocks = zip(self.variables, values, strict=True)
        return {**self._others, **{v: b.reshape(()) if v in self.one_key else b for v, b in blocks}}

    def rule(self, variable: Variable) -> str | None:
        return self._rules.get(variable) or variable.reduce

    def record(self, frame: _frame.Frame) -> None:
        """Tells the Frames around which Variables were read, and how those in use lie on the mesh."""
        for variable in [variable for variable in frame.reads if variable in self.variables]:
            _frame.read(variable)
        used = {v: self.variables[v] for v in [*frame.reads, *frame.written] if v in self.variables}
        is_whole = lambda v: _frame.held(v).shape == _frame.peek(v).shape  # else a vmap is around
        used = {v: spec for v, spec in used.items() if is_whole(v)}
        for around in _frame.thread.frames:
            around.mesh = self.grid.mesh
            around.placed.update((variable, NamedSharding(self.grid.mesh, spec)) for variable, spec in used.items())


class _Results:
    """What leaves the mapped function: results and written values, in groups that have one PartitionSpec each.

    Which Variables are written, and how many leaves a result has, is known at the end of the trace alone.
    """

    def __init__(self, inputs: _Inputs, out_specs: Any):
        self._inputs, self._grid, self._out_specs = inputs, inputs.grid, out_specs
        named = [self._grid.check(spec, "out_specs") for spec in specs_in(out_specs)]
        self._stack = PartitionSpec(self._grid.axes)  # one row for each shard
        self.specs = list(dict.fromkeys([PartitionSpec(), self._stack, *named, *inputs.variables.values()]))
        self._of_leaves: list[PartitionSpec] = []
        self._of_written: list[PartitionSpec] = []

    def note(self, out: Any, birth: int) -> None:
        """Takes down the specs of a result, leaf by leaf."""
        self._of_leaves = []
        for name, part, spec in spread(self._out_specs, out, "result", "out_specs", is_module):
            if not is_module(part):
                self._leaf(name, part, spec)
            elif part._tether.birth > birth:
                specs = variable_specs(spec, part, name, self._grid)
                for variable in variables_of(part):
                    for leaf in jax.tree.leaves(_frame.peek(variable)):
                        self._leaf(f"{name}.{variable.label}", leaf, specs.get(variable, PartitionSpec()))

    def _leaf(self, name: str, value: Any, spec: Any) -> None:
        value = jnp.asarray(value)
        differing = self._grid.differing(value, self._grid.check(spec, f"out_specs of {name}"), False)
        if differing:
            raise ArgumentError(
                "shard_map: a result differs from shard to shard, and out_specs says that it doesn't.",
                at=name,
                got=f"{describe(value)}, another along {in_words(differing)}, and {spec}",
                fix=[
                    f"combine it: jax.lax.pmean(x, {differing[0]!r}), or psum",
                    "a PartitionSpec that names the axis: the results of the shards are joined along it",
                ],
            )
        if len(list(spec)) > value.ndim:
            raise ShapeError(
                "shard_map: out_specs has more entries than the result has axes.",
                at=name,
                got=f"{describe(value)} and {spec}",
                expected=f"at most {value.ndim} entries",
                fix="an axis to join the shards along: x[None]",
            )
        self._of_leaves.append(spec)

    def reduced(self, written: list[Variable], values: list[Any]) -> tuple[list[Variable], list[Any]]:
        """What is written outside: each value with its rule applied, without those that are discarded."""
        triples = [(v, *self._write(v, value)) for v, value in zip(written, values, strict=True)]
        kept = [(variable, spec, value) for variable, spec, value in triples if spec is not None]
        self._of_written = [spec for _, spec, _ in kept]
        return [variable for variable, _, _ in kept], [value for _, _, value in kept]

    def _write(self, variable: Variable, value: Any) -> tuple[Any, Any]:
        if variable.leaves_only:
            return self._stack, value[None]
        spec, rule = self._inputs.variables.get(variable, PartitionSpec()), self._inputs.rule(variable)
        if variable in self._inputs.one_key:
            value = value.reshape(self._inputs.one_key[variable])
        differing = self._grid.differing(value, spec, rule is not None)
        if not differing:
            return spec, value
        if rule == "discard":
            return None, None
        if rule is None or is_key(value):
            raise self._differs(variable, value, differing)
        combine = jax.lax.pmean if rule == "mean" else jax.lax.psum
        return spec, combine(value, differing).astype(value.dtype)

    def _differs(self, variable: Variable, value: Any, axes: tuple[Any, ...]) -> VmapWriteError:
        name, kind, axis = repr(variable.label) if variable.label else "variable", type(variable).__name__, axes[0]
        combine = (
            f"combine it: {kind}(x, reduce='mean') at its declaration, "
            f"tether.shard_map(f, writes={{{name}: 'mean' | 'sum'}}), or jax.lax.pmean over {axis!r}"
        )
        split = f"a block for each shard: tether.shard_map(f, states={{{name}: PartitionSpec({axis!r})}})"
        drop = f"leave it as it was: tether.shard_map(f, writes={{{name}: 'discard'}})"
        return VmapWriteError(
            "shard_map: a write to a Variable that shards have in common differs from shard to shard.",
            at=self._inputs.name(variable),
            got=f"{describe(value)}, another in each shard along {in_words(axes)}",
            expected="the same value in all of them, or a rule, or a Variable that is split",
            fix=[*([] if is_key(value) else [combine]), *([split] if value.ndim else []), drop],
        )

    def grouped(self, leaves: list[Any], written: list[Any]) -> dict[int, list[Any]]:
        groups: dict[int, list[Any]] = {index: [] for index in range(len(self.specs))}
        for spec, value in zip(self._of_leaves + self._of_written, [*leaves, *written], strict=True):
            groups[self.specs.index(spec)].append(value)
        return groups

    def taken(self, groups: dict[int, list[Any]]) -> tuple[list[Any], list[Any]]:
        """The leaves of the result and the written values, in their order."""
        rest = {index: iter(group) for index, group in groups.items()}
        values = [next(rest[self.specs.index(spec)]) for spec in self._of_leaves + self._of_written]
        return values[: len(self._of_leaves)], values[len(self._of_leaves) :]


def _per_argument(f: Any, args: Any, kwargs: Any, in_specs: Any, grid: Grid) -> list[tuple[str, Any, Any]]:
    """Each argument with its name and its specs: those given by position, then those given by name."""
    named = [(_arguments.name_at(f, place), arg) for place, arg in enumerate(args)]
    if in_specs is INFER and not grid.is_explicit():
        raise ArgumentError(
            "shard_map: in_specs is missing.",
            at=_arguments.name_of(f),
            got=f"{in_words(grid.axes)}, not explicit: the type of an array doesn't say how it is split",
            expected="in_specs=, a tuple with an entry for each argument",
        )
    if in_specs is INFER or isinstance(in_specs, PartitionSpec):
        return [(name, arg, in_specs) for name, arg in named] + [(name, value, INFER) for name, value in kwargs.items()]
    later = list(_arguments.parameters(f))[len(args) :]
    if isinstance(in_specs, tuple | list) and len(in_specs) >= len(args):
        by_name = dict(zip(later, in_specs[len(args) :], strict=False))
        if len(by_name) == len(in_specs) - len(args) and by_name.keys() <= kwargs.keys():
            first = [(name, arg, specs) for (name, arg), specs in zip(named, in_specs, strict=False)]
            return first + [(name, value, by_name.get(name, INFER)) for name, value in kwargs.items()]
    raise ArgumentError(
        "shard_map: in_specs doesn't fit the arguments.",
        at=f"{_arguments.name_of(f)}{_arguments.signature(f) or '(...)'}",
        got=f"{describe(in_specs)} for {len(args)} argument(s) by position"
        + (f" and {', '.join(kwargs)}" if kwargs else ""),
        expected="a PartitionSpec, or a tuple with one entry for each argument",
        fix="None for an argument that is no array",
    )
