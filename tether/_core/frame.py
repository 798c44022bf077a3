# SPDX-License-Identifier: Apache-2.0
"""Frames: overlays of Variable values that last as long as one transformation runs one function.

While a transformation runs, the thread's stack of Frames holds the traced values. A read asks the
innermost Frame that has a value, else the Variable; a write goes to the innermost Frame; at the end
the written values leave the JAX transformation as outputs and are written once, outside. So there is
nothing to restore, and a Variable never holds a tracer of a trace younger than itself.

Variables and Frames carry birth numbers: a Frame concerns only Variables older than itself. Between
the place of an access and the home of the value there may be traces of plain JAX transformations,
which know nothing of Frames; what may cross them is decided here. Inside a Frame, JAX must not keep a trace
that read a Variable; outside all Frames, the Variable moves into a ``jax.Ref`` (``ref``), which JAX knows.
"""

from __future__ import annotations

import collections
import itertools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import numpy as np

from tether._core import ref as _ref
from tether._core import trace as _trace
from tether.errors import LeakError, PlainTransformError

if TYPE_CHECKING:
    from tether._core.variable import Variable

births = itertools.count()


class _Thread(threading.local):
    """What one thread is doing: its Frames, and what the calls around it asked for."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.training: bool | None = None  # `training=` of the calls around
        self.stream: Any = None  # the Rng of `key=` or of `random.scope`
        self.constructing: list[Any] | None = None  # modules whose outermost constructor still runs
        self.watchers: tuple[Any, ...] = ()  # what looks at the calls of modules, the outermost first
        self.inside = ""  # while something looks: the path of the module that is being called


thread = _Thread()


class Slot:
    """One value. The slot's descriptor is the getter and setter that the fast paths map in C."""

    __slots__ = ("_value",)
    _value: Any


get_value = operator.attrgetter("_value")
set_value: Callable[[Any, Any], None] = Slot.__dict__["_value"].__set__


class Frame:
    """The values of Variables while one transformation runs one function.

    Args:
        kind: Name of the transformation.
        miss: What a read of an older Variable without a value here does: "through" asks the Frame
            around; "note" does too, and remembers it in ``missed``; "refuse" raises.

    Attributes:
        values: Variable -> its value inside: those given at the start, and those written.
        lane: Inside vmap, the index of the lane; random streams are told apart by it.
        row: Where one trace stands for several rows (lanes, turns of a loop), the index of the row.
        children: Stream of random keys from outside -> its private child in the lanes, and where that began.
        placed: Variable -> the sharding that a shard_map inside has for it.
        mesh: That of a shard_map inside.
    """

    __slots__ = (
        *("birth", "caching", "children", "given", "home", "kind", "lane", "mesh", "miss", "missed", "outer"),
        *("placed", "reads", "row", "values", "written"),
    )

    def __init__(self, kind: str, miss: str = "through"):
        self.kind, self.miss = kind, miss
        self.lane: Any = None
        self.row: Any = None
        self.values: dict[Variable, Any] = {}
        self.given: frozenset[Variable] = frozenset()
        self.reads: dict[Variable, None] = {}
        self.written: dict[Variable, None] = {}
        self.missed: dict[Variable, None] = {}
        self.children: dict[Variable, Any] = {}
        self.placed: dict[Variable, Any] = {}
        self.mesh: Any = None
        self.birth = next(births)
        self.home: Any = None
        self.caching: Any = None
        self.outer = _trace.current()  # where the transformation was called: a read that passes goes on from there

    def run(self, values: dict[Variable, Any], fun: Callable[[], Any]) -> tuple[Any, list[Variable], list[Any]]:
        """Runs ``fun`` under this Frame: its result, the Variables it wrote, and their last values.

        ``values`` are those that differ from the outside at the start.

        Call it inside the JAX transformation. Afterwards the Frame holds no traced value.
        """
        depth, self.caching = len(thread.frames), _trace.Caching(apart=bool(_ref.cached))
        try:  # a signal may come right after the append: it, too, finds the stack cut back
            self.values, self.given, self.home = dict(values), frozenset(values), _trace.current()
            self.caching.begin()
            thread.frames.append(self)
            out = fun()
            return out, list(self.written), [self.values[variable] for variable in self.written]
        finally:
            del thread.frames[depth:]
            try:
                self.caching.end()
            finally:
                self.caching.end()  # once more, should a signal have come in the first
            self.values, self.children = {}, {}
            self.home = self.outer = self.lane = self.row = self.caching = None
            if thread.frames:
                thread.frames[-1].caching.renew()


def _is_plain(value: Any) -> bool:
    return isinstance(getattr(value, "dtype", None), np.dtype) or not isinstance(value, jax.Array)


def stored(value: Any) -> Any:
    """A value as a slot holds it: of a typed key the data, which JAX passes and returns without running Python."""
    return value if _is_plain(value) else jax.random.key_data(value)


def loaded(variable: Variable, value: Any) -> Any:
    """What a slot holds, as it is read."""
    return value if variable.impl is None else jax.random.wrap_key_data(value, impl=variable.impl)


def held(variable: Variable) -> Any:
    """What lies in the Variable itself, whatever the Frames say; it leaves no step in the trace."""
    home = _trace.owner(variable._value) or _trace.EVALUATING
    with _trace.inside(home):
        return loaded(variable, _ref.get(variable, home))


def keep(variable: Variable, value: Any) -> None:
    """Puts a value into the Variable itself."""
    variable.impl = None if _is_plain(value) else jax.random.key_impl(value)
    set_value(variable, stored(value))


def read(variable: Variable) -> Any:
    """The value of a Variable, as seen from here."""
    frames, now = thread.frames, _trace.current()
    if not frames and now is _trace.EVALUATING and variable.home is None:
        value = _ref.get(variable, now) if _ref.moved else variable._value
        return value if variable.impl is None else loaded(variable, value)
    for depth, frame in enumerate(reversed(frames)):
        if frame.birth < variable.birth:
            return _read_outside(variable, now, frames[: len(frames) - depth])
        _cross(variable, _trace.crossed(now, frame.home))
        frame.reads[variable] = None
        if variable in frame.values:
            return _reachable(variable, frame.values[variable], now)
        _missed(frame, variable)
        now = frame.outer
    return _read_outside(variable, now, [])


def _reachable(variable: Variable, value: Any, now: Any) -> Any:
    """A Frame's value, unless a custom rule reads it that runs outside the transformation of its tracer."""
    home = _trace.owner(value)
    if _is_foreign(home, now) and not _trace.is_staged(home):
        raise PlainTransformError.custom_rule(_trace.transform_name(home), variable.describe())
    return value


def _is_foreign(home: Any, now: Any) -> bool:
    return home is not None and home is not now and home not in _trace.chain(now)


def _read_outside(variable: Variable, now: Any, around: Sequence[Frame]) -> Any:
    """The value of the Variable itself, as seen from the trace ``now``; ``around`` are the Frames around its birth."""
    home = _home(variable)
    traces = _trace.crossed(now, home)
    staged = [trace for trace in traces if _trace.is_staged(trace)]
    _check_not_stopped(variable, traces)
    if variable.handed is not None:
        variable.handed.read(variable)
    if staged and not around and home is _trace.EVALUATING and variable._value is not None:
        _to_ref(variable, traces, "read")
        return loaded(variable, _ref.get(variable, staged[0]))
    if staged and around:
        _spoil()
    elif staged:
        variable.captured = True
    return loaded(variable, _alive(variable, _ref.get(variable, home) if _ref.moved else variable._value))


def _cross(variable: Variable, traces: list[Any]) -> None:
    """A read from within plain traces that run inside a Frame."""
    _check_not_stopped(variable, traces)
    if any(map(_trace.is_staged, traces)):
        _spoil()


def _spoil() -> None:
    """What JAX traces here holds a value of this run of the Frames: it must not find the trace again."""
    for frame in thread.frames:
        frame.caching.spoil()
    thread.frames[-1].caching.renew()


def _to_ref(variable: Variable, traces: list[Any], action: str) -> None:
    reason = _ref.refusal(variable, traces, action)
    if reason is not None:
        raise _unseen(variable, traces, action, reason)
    _ref.move(variable)


def _alive(variable: Variable, value: Any) -> Any:
    """The value, unless it belongs to a trace that is over."""
    if is_over(value):
        raise LeakError.over(variable.describe(), variable.where)
    return value


def is_over(value: Any) -> bool:
    """Whether a value belongs to a trace that is over."""
    now = _trace.current()
    return _is_foreign(_trace.owner(value), now) and not _trace.has_lost_parent(now)


def _home(variable: Variable) -> Any:
    home = variable.home() if variable.home is not None else None
    return _trace.EVALUATING if home is None else home


def _missed(frame: Frame, variable: Variable) -> None:
    if frame.miss == "note":
        frame.missed[variable] = None
    elif frame.miss == "refuse":
        raise LeakError.not_given(frame.kind, variable.describe())


def write(variable: Variable, value: Any) -> None:
    """Writes a checked value where it belongs: into the innermost Frame, else into the Variable."""
    frames, now = thread.frames, _trace.current()
    frame = frames[-1] if frames and frames[-1].birth > variable.birth else None
    home = frame.home if frame else _home(variable)
    if frame is None and home is _trace.EVALUATING and (_ref.moved or now is not home):
        _write_outside(variable, value, _trace.crossed(now, home))
        return
    if now is not home:
        traces = _trace.crossed(now, home)
        if any(map(_trace.is_staged, traces)):
            raise _unseen(variable, traces, "write", "the written value would stay in its trace")
        value = _lowered(variable, value, traces)
    if frame is None:
        _write_itself(variable, value)
        return
    if variable not in frame.values and not variable.leaves_only:
        _missed(frame, variable)
    frame.values[variable] = value
    frame.written[variable] = None


def _write_outside(variable: Variable, value: Any, traces: list[Any]) -> None:
    """Writes a Variable of no trace, from within plain traces outside all Frames."""
    staged = [trace for trace in traces if _trace.is_staged(trace)]
    if staged:
        _to_ref(variable, traces, "write")
    value = _lowered(variable, value, traces[: traces.index(staged[0])] if staged else traces)
    if _ref.holds(variable):
        if variable.stopped is not None:  # a cached program may read it, and nobody would know
            name, variable.stopped = _trace.transform_name(variable.stopped()), None
            raise PlainTransformError.tangent(name, variable.describe(), _ref.where(variable))
        _ref.put(variable, stored(value), staged[0] if staged else _trace.EVALUATING)
    else:
        _write_itself(variable, value)


def _write_itself(variable: Variable, value: Any) -> None:
    if variable.captured:  # JAX may find the trace that closed over it, with the old value
        raise PlainTransformError.captured(variable.describe())
    if variable.handed is not None:
        variable.handed.wrote(variable)
    keep(variable, value)


def is_deleted(value: Any) -> bool:
    """Whether a donated call consumed the buffer of a value."""
    return isinstance(value, jax.Array) and _trace.owner(value) is None and value.is_deleted()


def peek(variable: Variable) -> Any:
    """The value for its shape, dtype and device, not to be computed with: nothing is recorded or crossed."""
    for frame in reversed(thread.frames):
        if frame.birth < variable.birth:
            break
        if variable in frame.values:
            return frame.values[variable]
    value = _alive(variable, variable._value)
    return held(variable) if variable.impl is not None or _ref.moved else value


def _unseen(variable: Variable, traces: list[Any], action: str, reason: str) -> PlainTransformError:
    name = next(_trace.transform_name(trace) for trace in traces if _trace.is_staged(trace))
    return PlainTransformError.unseen(name, action, reason, variable.describe())


def _check_not_stopped(variable: Variable, traces: list[Any]) -> None:
    stopped_in = variable.stopped() if variable.stopped is not None else None
    if stopped_in is not None and stopped_in in traces:
        raise PlainTransformError.lost_gradient(_trace.transform_name(stopped_in), variable.describe())


def _lowered(variable: Variable, value: Any, traces: list[Any]) -> Any:
    """The value as the level outside the plain traces can hold it: without tangents, one for all lanes."""
    variable.stopped = None
    if _trace.owner(value) not in traces:
        return value
    before = _trace.owner(value)
    value = _trace.stopped(value)
    lanes = _trace.owner(value)
    if lanes in traces:
        raise PlainTransformError.lanes(_trace.transform_name(lanes), variable.describe())
    variable.stopped = weakref.ref(before)
    return value


def is_outside() -> bool:
    """Whether no trace and no Frame is about."""
    return not thread.frames and _trace.current() is _trace.EVALUATING


def gather(variables: Sequence[Variable], settled: bool = False) -> list[Any]:
    """The values of many Variables: one C call where no trace is about.

    ``settled`` says that each of them ``is_settled``.
    """
    if is_outside() and (settled or all(map(is_settled, variables))):
        return gather_stored(variables, True)
    return [read(variable) for variable in variables]


def gather_stored(variables: Sequence[Variable], settled: bool) -> list[Any]:
    """The values as slots hold them; ``settled`` says that none of the Variables was born in a trace."""
    if is_outside() and settled:
        values = list(map(get_value, variables))
        return _ref.fetched(values) if _ref.moved else values
    return [stored(read(variable)) for variable in variables]


readers: set[Any] = set()  # who wait for a donated call of another thread: meanwhile such calls consume copies
_PATIENCE = 5.0  # seconds


def with_values(look: Callable[[], list[Any]], use: Callable[[list[Any]], Any]) -> Any:
    """``use(look())``; once more, if a donated call of another thread consumes one of the values meanwhile."""
    values = look()
    try:
        return use(values)
    except (RuntimeError, ValueError):
        if threading.active_count() == 1 or not any(map(is_deleted, values)):
            raise
    me, end = object(), time.monotonic() + _PATIENCE
    try:
        readers.add(me)
        while True:
            values = look()
            try:
                return use(values)
            except (RuntimeError, ValueError):
                if time.monotonic() > end or not any(map(is_deleted, values)):
                    raise
            time.sleep(1e-4)  # the call that consumes it needs the GIL to write the new values
    finally:
        readers.discard(me)


def is_settled(variable: Variable) -> bool:
    """Whether the slot tells the value: not born in a trace, and so not smuggled out of one, and no key."""
    return variable.home is None and variable.impl is None


def write_back(variables: Sequence[Variable], values: Iterable[Any]) -> None:
    """Writes what a transformation returned, all of it or nothing."""
    if is_outside():
        write_stored(variables, map(stored, values))
        return
    for variable, value in zip(variables, values, strict=True):
        write(variable, value)


def write_stored(variables: Sequence[Variable], values: Iterable[Any]) -> None:
    """The same with values as slots hold them."""
    if not is_outside():
        for variable, value in zip(variables, values, strict=True):
            write(variable, loaded(variable, value))
        return
    if _ref.moved:
        variables, values = _ref.without(variables, values)
    values, kept = list(values), list(map(get_value, variables))  # dropping an array releases the GIL: not in between
    collections.deque(map(set_value, variables, values), 0)
    del kept
