# SPDX-License-Identifier: Apache-2.0
"""Frames: overlays of Variable values that last as long as one transformation runs one function.

While a transformation runs, the thread's stack of Frames holds the traced values. A read asks the
innermost Frame that has a value, else the Variable; a write goes to the innermost Frame; at the end
the written values leave the JAX transformation as outputs and are written once, outside. So there is
nothing to restore, and a Variable never holds a tracer of a trace younger than itself.

Variables and Frames carry birth numbers: a Frame concerns only Variables older than itself. Between
the place of an access and the home of the value there may be traces of plain JAX transformations,
which know nothing of Frames; what may cross them is decided here, in ``_check_crossing`` and ``_lowered``.
"""

from __future__ import annotations

import collections
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from tether._core import trace as _trace
from tether.errors import LeakError, PlainTransformError

if TYPE_CHECKING:
    from tether._core.variable import Variable

births = itertools.count()
_OURS = ("jax.jit", "jax.grad", "jax.vmap", "jax.checkpoint")  # those that have a namesake here


class _Thread(threading.local):
    """What one thread is doing: its Frames, and what the calls around it asked for."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.training: bool | None = None  # `training=` of the calls around
        self.stream: Any = None  # the Rng of `key=` or of `random.scope`
        self.constructing: list[Any] | None = None  # modules whose outermost constructor still runs


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
        children: Stream of random keys from outside -> its private child in the lanes, and where that began.
    """

    __slots__ = (
        "birth",
        "children",
        "given",
        "home",
        "kind",
        "lane",
        "miss",
        "missed",
        "outer",
        "reads",
        "values",
        "written",
    )

    def __init__(self, kind: str, miss: str = "through"):
        self.kind, self.miss, self.lane = kind, miss, None
        self.values: dict[Variable, Any] = {}
        self.given: frozenset[Variable] = frozenset()
        self.reads: dict[Variable, None] = {}
        self.written: dict[Variable, None] = {}
        self.missed: dict[Variable, None] = {}
        self.children: dict[Variable, Any] = {}
        self.birth = next(births)
        self.home: Any = None
        self.outer = _trace.current()  # where the transformation was called: a read that passes goes on from there

    def run(self, values: dict[Variable, Any], fun: Callable[[], Any]) -> tuple[Any, list[Variable], list[Any]]:
        """Runs ``fun`` under this Frame: its result, the Variables it wrote, and their last values.

        ``values`` are those that differ from the outside at the start.

        Call it inside the JAX transformation. Afterwards the Frame holds no traced value.
        """
        depth = len(thread.frames)
        try:  # a signal may come right after the append: it, too, finds the stack cut back
            self.values, self.given, self.home = dict(values), frozenset(values), _trace.current()
            thread.frames.append(self)
            out = fun()
            return out, list(self.written), [self.values[variable] for variable in self.written]
        finally:
            del thread.frames[depth:]
            self.values, self.children = {}, {}
            self.home = self.outer = self.lane = None


def read(variable: Variable) -> Any:
    """The value of a Variable, as seen from here."""
    frames, now = thread.frames, _trace.current()
    if not frames and now is _trace.EVALUATING and variable.home is None:
        return variable._value
    for frame in reversed(frames):
        if frame.birth < variable.birth:
            break
        _check_crossing(variable, _trace.crossed(now, frame.home), "read")
        frame.reads[variable] = None
        if variable in frame.values:
            return frame.values[variable]
        _missed(frame, variable)
        now = frame.outer
    _check_crossing(variable, _trace.crossed(now, _home(variable)), "read")
    return _alive(variable, variable._value)


def _alive(variable: Variable, value: Any) -> Any:
    """The value, unless it belongs to a trace that is over."""
    if isinstance(value, jax.core.Tracer) and _trace.owner(value) not in _trace.chain(_trace.current()):
        raise LeakError(
            "a Variable was read outside the transformation that made it.",
            at=variable.describe(),
            got=f"the value of a trace that is over; the Variable was made at {variable.where}",
            expected="a Variable of this trace, or an array",
            fix="return the module (or the value) from the transformed function and use what the call returns",
        )
    return value


def _home(variable: Variable) -> Any:
    home = variable.home() if variable.home is not None else None
    return _trace.EVALUATING if home is None else home


def _missed(frame: Frame, variable: Variable) -> None:
    if frame.miss == "note":
        frame.missed[variable] = None
    elif frame.miss == "refuse":
        raise LeakError(
            f"{frame.kind}: the function uses a Variable that it was not given.",
            at=variable.describe(),
            expected="values for every Variable that the function uses",
            fix="start from pure(f).values(), which has a value for all of them",
        )


def write(variable: Variable, value: Any) -> None:
    """Writes a checked value where it belongs: into the innermost Frame, else into the Variable."""
    frames, now = thread.frames, _trace.current()
    frame = frames[-1] if frames and frames[-1].birth > variable.birth else None
    home = frame.home if frame else _home(variable)
    if now is not home:
        value = _lowered(variable, value, _trace.crossed(now, home))
    if frame is None:
        set_value(variable, value)
        return
    if variable not in frame.values:
        _missed(frame, variable)
    frame.values[variable] = value
    frame.written[variable] = None


def is_deleted(value: Any) -> bool:
    """Whether a donated call consumed the buffer of a value."""
    return isinstance(value, jax.Array) and _trace.owner(value) is None and value.is_deleted()


def peek(variable: Variable) -> Any:
    """The value as it is, for its shape and dtype: no read is recorded, and nothing is crossed."""
    for frame in reversed(thread.frames):
        if frame.birth < variable.birth:
            break
        if variable in frame.values:
            return frame.values[variable]
    return _alive(variable, variable._value)


def _check_crossing(variable: Variable, traces: list[Any], action: str) -> None:
    for trace in traces:
        if _trace.is_staged(trace):
            name = _trace.transform_name(trace)
            raise PlainTransformError(
                f"{name}: the function {action}s a Variable that this plain JAX transformation can't see.",
                at=variable.describe(),
                got=f"a {action} inside {name}, which would bake the value in as a constant",
                expected="a Tether transformation around every use of a module made outside",
                fix=_fixes(
                    name,
                    ["p = tether.pure(f), a plain function: jax.jit(p)(p.values(), ...) returns (out, new_values)"],
                ),
            )
    stopped_in = variable.stopped() if variable.stopped is not None else None
    if stopped_in is not None and stopped_in in traces:
        name = _trace.transform_name(stopped_in)
        raise PlainTransformError(
            f"{name}: a Variable is read after it was written, and the gradient through it would be lost.",
            at=variable.describe(),
            got=f"a read, in the trace of {name} that wrote a value with a tangent",
            expected="no read after such a write, or a transformation that keeps tangents in what is written",
            fix=_fixes(name, []),
        )


def _fixes(name: str, others: list[str]) -> list[str]:
    """The transformation to use instead; make_jaxpr and eval_shape trace as jit does."""
    ours = name.replace("jax.", "tether.").replace(".lax", "")
    return [f"{ours}(f) in place of {name}(f)", *others] if name in _OURS else others or ["tether.jit around the whole"]


def _lowered(variable: Variable, value: Any, traces: list[Any]) -> Any:
    """The value as the level outside the plain traces can hold it: without tangents, one for all lanes."""
    for trace in traces:
        if _trace.is_staged(trace):
            _check_crossing(variable, traces, "write")
    variable.stopped = None
    if _trace.owner(value) not in traces:
        return value
    before = _trace.owner(value)
    value = _trace.stopped(value)
    lanes = _trace.owner(value)
    if lanes in traces:
        name = _trace.transform_name(lanes)
        raise PlainTransformError(
            f"{name}: a write to a shared Variable differs from lane to lane.",
            at=variable.describe(),
            got=f"a value with a lane of {name}",
            expected="the same value in every lane, as a mean over a named axis is",
            fix=[
                "name the axis and combine over it: jax.vmap(f, axis_name='batch'), BatchNorm(..., axis_name='batch')",
                "tether.vmap(f, writes={select: 'mean' | 'sum' | 'stack' | 'discard'})",
            ],
        )
    variable.stopped = weakref.ref(before)
    return value


def gather(variables: Sequence[Variable], settled: bool = False) -> list[Any]:
    """The values of many Variables: one C call where no trace is about.

    ``settled`` says that none of them was born in a trace, and so none can have been smuggled out of one.
    """
    if not thread.frames and _trace.current() is _trace.EVALUATING and (settled or all(map(_is_settled, variables))):
        return list(map(get_value, variables))
    return [read(variable) for variable in variables]


def _is_settled(variable: Variable) -> bool:
    return variable.home is None


def write_back(variables: Sequence[Variable], values: Iterable[Any]) -> None:
    """Writes what a transformation returned, all of it or nothing."""
    if not thread.frames and _trace.current() is _trace.EVALUATING:
        kept = list(map(get_value, variables))  # dropping an array releases the GIL: not between two writes
        collections.deque(map(set_value, variables, values), 0)
        del kept
        return
    for variable, value in zip(variables, values, strict=True):
        write(variable, value)
