# SPDX-License-Identifier: Apache-2.0
"""jit: a call gathers a flat list of arrays, calls one ``jax.jit`` function, and writes back.

Two things are cached above JAX's own cache. An *entry* is one traced program, keyed by structure, ties,
avals and static arguments; it holds no model. A *plan* binds an entry to the Variables at hand, keyed by
the identity of the modules and the avals of the arguments; its guards say whether closures and globals
still hold what they held. So a call that is like the last one walks nothing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core import ref as _ref
from tether._core import trace as _trace
from tether._core.lift import unpack
from tether._core.structure import static_key
from tether._core.variable import Rng, Variable, own_copy
from tether._modules.call import donating, state_lost
from tether._modules.capture import cells_for, watch_key, watched_parts
from tether._modules.module import structure_of, variables_of
from tether._transforms import _arguments
from tether._transforms._call import arrays_and_others, identity, joined, likeness, reach_of, split
from tether._transforms._checks import checking
from tether._transforms._discovery import Reach
from tether._transforms._eager import is_eager
from tether._transforms._program import Program, StaleProgram, traced
from tether._transforms._record import Record, Records
from tether.errors import CheckError
from tether.random._streams import in_lanes

_NOTHING = contextlib.nullcontext()
_MOST_KEPT = 256  # plans or programs of one function


class _Plan:
    """A program bound to Variables.

    Attributes:
        is_committed: Whether the Variables lie where the program will put their new values.
        is_single: Whether they are known to lie on one device.
        home: Where those go that are in Refs of another device; None where that doesn't matter.
        known: Kinds of inputs with which the donating program has run.
        placed: Variables that a shard_map inside has on a mesh, with the sharding. What is split stays so
            (``layouts``), or the function is traced again.
    """

    __slots__ = (
        "donated",
        "draws",
        "home",
        "inputs",
        "is_committed",
        "is_single",
        "kept",
        "known",
        "layouts",
        "placed",
        "program",
        "settled",
        "targets",
        "written",
    )

    def __init__(self, program: Program, lifted: list[Variable], reach: Reach):
        self.program, self.is_committed, self.is_single = program, False, False
        self.home: Any = None
        self.known: set[Any] = set()
        self.donated = [lifted[i] for i in program.donated]
        self.kept = [lifted[i] for i in program.kept]
        self.written = [lifted[i] for i in program.written]
        self.inputs = self.donated + self.kept
        self.placed = {lifted[i]: sharding for i, sharding in program.placed.items()}
        self.layouts = list(map(_layout, self.placed))
        self.settled = all(variable.home is None for variable in self.variables())
        self.draws = any(isinstance(variable, Rng) for variable in self.donated)
        self.targets = {p: weakref.ref(m) for p, m in reach.places()} if program.packed.has_kept else {}

    def variables(self) -> list[Variable]:
        return [*self.donated, *self.kept, *self.written]

    def gathered(self) -> list[Any]:
        """The values of the inputs."""
        values = _frame.gather_stored(self.inputs, self.settled)
        if self.home is None or not _ref.moved:
            return values
        targets = [_concrete(self.placed[v]) if v in self.placed else self.home for v in self.inputs]
        triples = zip(self.inputs, values, targets, strict=True)
        return [jax.device_put(value, target) if _ref.holds(v) else value for v, value, target in triples]


class _Plans:
    """The plans for calls of one kind: one for each configuration of JAX that was met, the last used first."""

    __slots__ = ("guards", "plans", "reach", "watched")

    def __init__(self, plans: list[_Plan], reach: Reach):
        self.plans, self.guards = plans, reach.guards
        self.reach: Reach | None = reach  # until they are kept: it holds the modules
        self.watched: list[Any] = []

    def are_lasting(self) -> bool:
        """Whether they hold nothing that lives no longer than a trace around, as the private streams of lanes do."""
        if not all(plan.settled for plan in self.plans):
            return False
        return not (_frame.thread.frames and in_lanes() and any(plan.draws for plan in self.plans))

    def serve(self) -> bool:
        """Whether everything that was reached is still in its place, and the streams are those of this call."""
        if not self.are_lasting():
            return False
        for plan in self.plans:
            if plan.placed and list(map(_layout, plan.placed)) != plan.layouts:
                return False
        for guard in self.guards:  # noqa: SIM110  (a call's path: a generator costs)
            if not guard.holds():
                return False
        return True


class Jit:
    """A function compiled by ``jax.jit``, whose Variables are found, passed and written back.

    Attributes:
        traces: How often the function's Python ran, once for each compilation.
    """

    def __init__(self, fun: Callable[..., Any], static_argnums: Any, static_argnames: Any, donate_state: bool):
        self._fun = _arguments.checked_callable(fun, "jit")
        self._static = _arguments.StaticArguments(fun, static_argnums, static_argnames)
        self._donate = donate_state
        self._plans: dict[Any, _Plans] = {}
        self._programs: dict[Any, list[Program]] = {}
        self._pinned: weakref.WeakKeyDictionary[Program, dict[Any, Any]] = weakref.WeakKeyDictionary()
        self._last: Program | None = None
        self._records = Records()
        self._given_away: set[Any] = set()
        self.traces = 0
        if donate_state:
            donating.add(self)
        functools.update_wrapper(self, fun, updated=())

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"tether.jit({_arguments.name_of(self._fun)})"

    @property
    def reads(self) -> tuple[str, ...]:
        """Paths of the Variables that the program of the last call reads."""
        return self._last.reads if self._last else ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Paths of the Variables that the program of the last call writes."""
        return self._last.writes if self._last else ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = []
        key = self._key(args, kwargs, identity, leaves)
        if is_eager():
            return self._run_eagerly(args, kwargs)
        found = self._plans.get(key)
        if found is None or not found.serve():
            found = self._make_plans(args, kwargs, leaves)
        for plan in found.plans:
            try:
                out = self._run(plan, leaves)
                break
            except StaleProgram:
                continue
        else:
            plan = self._trace(found, args, kwargs, leaves)
            out = self._run(plan, leaves)
        if plan in found.plans[1:]:
            found.plans = [plan, *(other for other in found.plans if other is not plan)]  # whole, for other threads
        if found.reach is not None:
            self._keep(key, found, found.reach)
        self._last = plan.program
        return unpack(plan.program.packed, out, lambda place: self._existing(plan, place, args, kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered program for these arguments, as ``jax.jit(f).lower`` gives it; nothing runs."""
        leaves: list[Any] = []
        self._key(args, kwargs, identity, leaves)
        found = self._make_plans(args, kwargs, leaves)
        for plan in found.plans:
            try:
                return self._lowered(plan, leaves)
            except StaleProgram:
                continue
        return self._lowered(self._trace(found, args, kwargs, leaves), leaves)

    def _lowered(self, plan: _Plan, leaves: list[Any]) -> Any:
        run = self._compiled(plan, leaves, self._donate)
        held = [_frame.gather_stored(part, plan.settled) for part in (plan.donated, plan.kept)]
        lowered = run.lower(*held, leaves)
        self._last = plan.program
        return lowered

    def _key(self, args: Any, kwargs: Any, mark: Any, leaves: list[Any]) -> tuple[Any, ...]:
        static = self._static
        thread = _frame.thread
        key: list[Any] = [thread.training, None if thread.stream is None else mark(thread.stream)]
        if thread.watchers:
            key += watch_key(), *map(mark, watched_parts())
        if static.is_empty:
            key += [split(arg, mark, leaves) for arg in args]
        else:
            at = static.positions(len(args))
            key += [
                static_key(a, f"argument {_arguments.name_at(self._fun, i)}") if i in at else split(a, mark, leaves)
                for i, a in enumerate(args)
            ]
        for name in sorted(kwargs) if kwargs else ():
            value = kwargs[name]
            key += name, static_key(value, f"argument {name}") if name in static.names else split(value, mark, leaves)
        return tuple(key)

    def _make_plans(self, args: Any, kwargs: Any, leaves: list[Any]) -> _Plans:
        """Binds the programs that modules of these structures have already."""
        reach = reach_of(self._fun, args, kwargs)
        lifted, fixed = arrays_and_others(reach)
        programs = self._programs.get(self._likeness(reach, lifted, fixed, args, kwargs), ())
        return _Plans([_Plan(program, lifted, reach) for program in programs], reach)

    def _trace(self, found: _Plans, args: Any, kwargs: Any, leaves: list[Any]) -> _Plan:
        """A plan with a new program, kept where others may use it."""
        reach = reach_of(self._fun, args, kwargs)
        lifted, fixed = arrays_and_others(reach)
        likeness_key = self._likeness(reach, lifted, fixed, args, kwargs)
        call, rebuild = lambda new: self._fun(*new[0], **new[1]), lambda new: self._rebuilt(args, kwargs, new)
        program, missed = traced(call, rebuild, leaves, lifted, fixed, reach, _arguments.name_of(self._fun))
        self.traces += program.traces
        plan = _Plan(program, lifted + missed, reach)
        record = Record(reach, lifted, fixed)
        record.add_call(self._static, args, kwargs, reach)
        record.add_program(program, missed)
        self._records.add(record)
        if self._donate:
            self._given_away.update(map(_mark, plan.donated))
        if program.is_closed:
            found.plans = [plan, *found.plans]
            if not missed:
                self._programs.setdefault(likeness_key, []).append(program)
                _drop_oldest(self._programs)
        return plan

    def _likeness(
        self, reach: Reach, lifted: list[Variable], fixed: dict[Variable, Any], args: Any, kwargs: Any
    ) -> Any:
        return self._key(args, kwargs, likeness, []), _reach_key(reach, lifted, fixed)

    def _keep(self, key: Any, found: _Plans, reach: Reach) -> None:
        """Keeps plans as long as everything lives that they were made for."""
        found.reach = None
        if not found.plans or not found.are_lasting():
            return
        me = weakref.ref(self)

        def forget(_: Any) -> None:
            if (jit := me()) is not None:
                jit._plans.pop(key, None)

        modules = [module._tether for _, module in reach.modules.values()]
        stream = [_frame.thread.stream] if _frame.thread.stream is not None else []
        watched = [*(info.token or info for info in modules), *reach.objects, *stream, *watched_parts()]
        found.watched = [weakref.ref(part, forget) for part in watched]
        self._plans[key] = found
        _drop_oldest(self._plans)

    def _rebuilt(self, args: Any, kwargs: Any, leaves: Iterator[Any]) -> tuple[list[Any], dict[str, Any]]:
        static = self._static
        at = static.positions(len(args))
        new = [arg if place in at else joined(arg, leaves) for place, arg in enumerate(args)]
        names = sorted(kwargs)
        return new, {n: kwargs[n] if n in static.names else joined(kwargs[n], leaves) for n in names}

    def _run(self, plan: _Plan, leaves: list[Any]) -> Any:
        if self._donate and self._may_donate(plan):
            return self._run_donating(plan, leaves)
        run = plan.program.run if plan.is_single else self._compiled(plan, leaves, donate=False)
        count = len(plan.donated)
        several = not (plan.is_single or is_nested())
        call = checking(plan.program.checks, several, lambda values: run(values[:count], values[count:], leaves))
        try:
            with (
                _trace.outside() if _ref.cached and plan.program.is_closed else _NOTHING
            ):  # one compilation, in Frames too
                # At once: another thread may make a step.
                out = _frame.with_values(plan.gathered, call)
        except (RuntimeError, ValueError) as error:
            _say_deleted(error, plan.inputs)
            raise
        count = len(plan.written)
        _frame.write_stored(plan.written, out[:count])
        if plan.program.captured:
            seen = cells_for(plan.program.captured)
            _frame.write_back(seen, out[count : count + len(seen)])
            count += len(seen)
        return out[count:]

    def _may_donate(self, plan: _Plan) -> bool:
        if is_nested() or _frame.thread.watchers:
            return False
        return not (_ref.moved and any(map(_ref.holds, plan.variables())))

    def _run_donating(self, plan: _Plan, leaves: list[Any]) -> Any:
        run = plan.program.run_donating if plan.is_single else self._compiled(plan, leaves, donate=True)
        donated = list(map(_frame.get_value, plan.donated))
        signature = tuple([(type(v), getattr(v, "committed", None)) for v in [*leaves, *donated[:1]]])
        step = checking(plan.program.checks, not plan.is_single, _donated, plan.written)
        try:
            # JAX prepares the first such call in Python, where a signal can come between. Readers: other threads.
            if signature not in plan.known or _frame.readers:
                donated = [own_copy(value) for value in donated]
            out = step(run, plan, donated, leaves)
        except (ValueError, RuntimeError) as error:
            _say_deleted(error, [*plan.donated, *plan.kept])
            if isinstance(error, CheckError) or "donate" not in str(error):
                raise
            out = None
        if out is None:  # two of the inputs share a buffer
            out = step(run, plan, [own_copy(value) for value in donated], leaves)
        plan.known.add(signature)
        return out

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        """The function itself on the caller's own objects, as ``jax.disable_jit`` asks; its writes land at the end."""
        frame = _frame.Frame("jit")
        try:
            out, written, new = frame.run({}, lambda: self._fun(*args, **kwargs))
        except RuntimeError as error:
            _say_deleted(error, frame.reads)
            raise
        _frame.write_back(written, new)
        return out

    def donates(self, variable: Variable) -> bool:
        """Whether a program of this function gives away the buffer of a Variable of this path, shape and dtype."""
        return bool(variable.label) and _mark(variable) in self._given_away

    def _compiled(self, plan: _Plan, leaves: list[Any], donate: bool) -> Any:
        """The program; on a mesh with the sharding of each written Variable held as it is, which XLA would change."""
        run = plan.program.run_donating if donate else plan.program.run
        if is_nested():
            return run
        if not plan.is_committed:
            _commit(plan, leaves)
        if plan.is_single:
            return run
        pins = [None if _ref.holds(variable) else variable._value.sharding for variable in plan.written]
        known, key = self._pinned.setdefault(plan.program, {}), (donate, *pins)
        if key not in known:
            call = functools.wraps(run, updated=())(lambda donated, kept, leaves: run(donated, kept, leaves))
            others = plan.program.packed.count + sum(treedef.num_leaves for *_, treedef in plan.program.captured)
            shardings = [*pins, *[None] * others]  # None: as XLA chooses
            known[key] = jax.jit(call, donate_argnums=0 if donate else (), out_shardings=shardings)
            plan.known.clear()
            _drop_oldest(known)
        return known[key]

    def _existing(self, plan: _Plan, place: Any, args: Any, kwargs: Any) -> Any:
        module = plan.targets[place]() if place in plan.targets else None
        return module if module is not None else dict(reach_of(self._fun, args, kwargs).places())[place]


def _donated(run: Any, plan: _Plan, donated: list[Any], leaves: list[Any]) -> list[Any]:
    """One C call from the compiled function to the last write, so that no signal comes between."""
    kept = list(map(_frame.get_value, plan.kept))
    out = [_frame.Slot() for _ in range(plan.program.packed.count)]
    targets = itertools.chain(plan.written, out)
    old = list(map(_frame.get_value, plan.written))  # dropping an array releases the GIL: not between two writes
    results = itertools.chain.from_iterable(map(run, [donated], [kept], [leaves]))
    collections.deque(map(_frame.set_value, targets, results), 0)
    del old
    return list(map(_frame.get_value, out))


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_state: bool = False,
) -> Any:
    """Compiles a function; the Variables that it reads are inputs, those that it writes are outputs.

    The function may come by its modules in any way: arguments, closure, globals, ``self``, defaults, partials.
    Arrays, and ints, floats and complex numbers in builtin containers, are dynamic; everything else (a bool or
    a string, too) is static and compared by value. Modules of equal structure share a compilation.

    Args:
        fun: The function, method or module; without it, a decorator with the options is returned.
        static_argnums: Numbers (or names) of arguments to treat as constants; they must be hashable.
        static_argnames: Names of such arguments.
        donate_state: Whether the buffers of written Variables are reused for their new values. Saves memory and
            time; arrays read from the model before a call are then dead after it (``tether.snapshot`` copies).
    Returns:
        The compiled function, with ``traces``, ``reads``, ``writes`` and ``lower``; ``tether.explain`` says why it
        was compiled. Under ``jax.disable_jit()`` the function itself runs, with concrete values.
    Raises:
        ArgumentError: a static argument that the function doesn't have.
        StateLostError: a donated step failed on the device, or uses an array that a donated step consumed.
    Example:
        >>> counter = tether.State(0)
        >>> @tether.jit
        ... def count(x):
        ...     counter.value = counter.value + 1
        ...     return x * counter.value
        >>> [float(count(1.0)) for _ in range(3)], count.traces
        ([1.0, 2.0, 3.0], 1)
    """
    if fun is None:
        options = {"static_argnums": static_argnums, "static_argnames": static_argnames, "donate_state": donate_state}
        return functools.partial(jit, **options)
    return Jit(fun, static_argnums, static_argnames, donate_state)


def is_nested() -> bool:
    """Whether this thread is inside a transformation, Tether's or JAX's."""
    return bool(_frame.thread.frames) or _trace.current() is not _trace.EVALUATING


def _drop_oldest(kept: dict[Any, Any]) -> None:
    while len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]


def _reach_key(reach: Reach, lifted: list[Variable], fixed: dict[Variable, Any]) -> Any:
    """What a program depends on besides its arguments: structures, ties between them, avals."""
    index = {variable: i for i, variable in enumerate([*lifted, *fixed])}
    roots = [module for _, module in reach.modules.values()]
    ties = tuple(tuple(index[variable] for variable in variables_of(root)) for root in roots)
    loose = tuple((type(variable), index[variable]) for variable in reach.loose)
    avals = tuple([(value.shape, value.dtype) for value in map(_frame.peek, lifted)]), tuple(map(_layout, lifted))
    others = tuple(static_key(value) for value in fixed.values())
    return tuple(map(structure_of, roots)), ties, loose, avals, others


def _commit(plan: _Plan, leaves: list[Any]) -> None:
    """Commits state to the device of committed inputs, as its new values will be: else JAX compiles twice."""
    own = [variable for variable in plan.inputs if not _ref.holds(variable)]  # nobody put a Ref where it is
    values = [value for value in [*leaves, *_frame.gather_stored(own, plan.settled)] if isinstance(value, jax.Array)]
    placed = {variable: found for variable, sharding in plan.placed.items() if (found := _concrete(sharding))}
    home = next((value.sharding for value in values if value.committed), None)
    if home is None and plan.program.mesh is not None:
        home = _concrete(jax.sharding.NamedSharding(plan.program.mesh, jax.sharding.PartitionSpec()))
    plan.is_committed, plan.is_single = True, home is None or isinstance(home, jax.sharding.SingleDeviceSharding)
    if home is None:
        return
    if isinstance(home, jax.sharding.NamedSharding):
        home = jax.sharding.NamedSharding(home.mesh, jax.sharding.PartitionSpec())
    elif not plan.is_single:
        return
    plan.home = home
    for variable in plan.written:
        if not _ref.holds(variable) and not variable._value.committed:
            _frame.set_value(variable, jax.device_put(variable._value, placed.get(variable, home)))
    plan.layouts = list(map(_layout, plan.placed))


def _layout(variable: Variable) -> Any:
    """How the array of a Variable is split over devices; None where it isn't."""
    value = variable._value
    if not isinstance(value, jax.Array) or _trace.owner(value) is not None or not value.committed:
        return None
    return None if value.sharding.is_fully_replicated else value.sharding


def _concrete(sharding: Any) -> Any:
    """A sharding on devices: where a shard_map took its mesh from the context, on those of the context now."""
    if isinstance(sharding.mesh, jax.sharding.Mesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else jax.sharding.NamedSharding(mesh, sharding.spec)


def _mark(variable: Variable) -> Any:
    return variable.label, variable._value.shape, variable._value.dtype


def _say_deleted(error: BaseException, variables: Iterable[Variable]) -> None:
    """Turns JAX's word on a deleted array into an error with the path."""
    lost = [variable for variable in variables if _frame.is_deleted(variable._value)]
    if lost and isinstance(error, CheckError):
        error.fixes = ["without donate_state=True, state stays as it was; here it was given to the call, and is lost"]
    elif lost:
        raise state_lost(lost) from error
