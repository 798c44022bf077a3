# SPDX-License-Identifier: Apache-2.0
"""Draws from streams of keys, the same in every transformation.

A stream is an Rng; a draw splits its key, keeps one half and returns the other. Where one function stands
for several (the lanes of vmap), a stream from outside gets a private child for each: the stream outside
advances once, and each lane's child begins with the lane's index folded in.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from tether._core import frame as _frame
from tether._core import ref as _ref
from tether._core.variable import Rng, assign
from tether.errors import ArgumentError, describe

default_stream: Any = Rng.make(None, label="tether.random.default")  # its key is made at the first use, not at import
default_stream.home = None


def current_stream() -> Rng:
    """The stream that layers draw from here: that of ``key=`` or a scope, else the default one."""
    stream = _frame.thread.stream
    if stream is None:
        stream = default_stream
        if stream._value is None:
            _start(0)
    return stream


def _start(seed: int) -> None:
    with jax.ensure_compile_time_eval():  # also at a first draw inside a trace: the stream belongs to no trace
        _frame.keep(default_stream, jax.random.key(seed))


def seed(value: int) -> None:
    """Starts the default stream anew, wherever its key has been."""
    if _frame.is_outside() and not _ref.holds(default_stream):
        _start(value)
        return
    with jax.ensure_compile_time_eval():
        key = jax.random.key(value)
    assign(default_stream, key)


def draw(stream: Rng | None = None) -> Any:
    """One key of a stream; the stream advances.

    Args:
        stream: An Rng; the current stream by default.
    Example:
        >>> key = tether.random.draw()
        >>> jax.random.normal(key, (2,)).shape
        (2,)
    """
    if stream is None:
        stream = current_stream()
    elif not isinstance(stream, Rng):
        raise ArgumentError(
            "draw: this is no stream.",
            got=describe(stream),
            expected="an Rng",
            fix='tether.random.draw(tether.cell(module, "rng")): the attribute itself reads as the key',
        )
    return _draw(stream, len(_frame.thread.frames))


def _draw(stream: Rng, level: int) -> Any:
    private = _own_stream(stream, level)
    key, drawn = jax.random.split(_frame.read(private))
    assign(private, key)
    return drawn


def _halves(key: Any) -> tuple[Any, Any]:
    """What a key goes on as, and what it gives; of a stack of keys, those of each."""
    halves = jax.vmap(jax.random.split)(key.reshape(-1))
    return halves[:, 0].reshape(key.shape), halves[:, 1].reshape(key.shape)


def _own_stream(stream: Rng, level: int) -> Rng:
    """The stream, or its private child in the innermost of the first ``level`` Frames that has lanes."""
    for index in reversed(range(level)):
        frame = _frame.thread.frames[index]
        if frame.birth < stream.birth:
            break
        if frame.lane is None or stream in frame.given:  # given: a stacked stream, each lane has its own already
            continue
        if stream not in frame.children:
            outside = _own_stream(stream, index)
            after, drawn = _halves(_frame.read(outside))
            start = jax.vmap(jax.random.fold_in, (0, None))(drawn.reshape(-1), frame.lane).reshape(drawn.shape)
            home = weakref.ref(frame.home)
            child = Rng.make(start, label=f"{stream.label or 'a stream'} in a lane of {frame.kind}", home=home)
            child.birth = frame.birth + 0.5  # older than what begins in the lane
            frame.children[stream] = child, child._value, outside, after
        return frame.children[stream][0]
    return stream


def own_stream(stream: Rng) -> Rng:
    """What is drawn from here in the place of a stream: its private child, in lanes."""
    return _own_stream(stream, len(_frame.thread.frames))


def settle(frame: _frame.Frame) -> None:
    """At the end of a Frame with lanes: the streams outside advance, once, if a lane has drawn."""
    for child, start, outside, after in frame.children.values():
        if child._value is not start:
            assign(outside, after)


def streams(others: Iterable[Rng] = ()) -> list[Rng]:
    """The streams that a staged function may draw from: the current one, others, and in lanes their private children.

    Called before the staging, so that a child is made outside, where its key belongs.
    """
    found = [current_stream(), *others]
    return list(dict.fromkeys([*found, *map(own_stream, found)] if in_lanes() else found))


class Forked:
    """Streams at the entry of a loop or branches: each begins there as a private child, which ends there.

    So it doesn't show outside how often was drawn: the stream advances once, or not at all if nothing was drawn.

    Attributes:
        starts: Stream -> the key that its child begins with.
    """

    def __init__(self, streams: dict[Rng, Any]):
        self._before, halves = streams, {stream: _halves(key) for stream, key in streams.items()}
        self._after = {stream: after for stream, (after, _) in halves.items()}
        self.starts = {stream: start for stream, (_, start) in halves.items()}

    def settled(self, variable: Any, end: Any) -> Any:
        """The value to write outside for the one at the end; of no stream, the same."""
        if variable not in self.starts:
            return end
        same = jax.random.key_data(end) == jax.random.key_data(self.starts[variable])
        return jnp.where(same.all(-1), self._before[variable], self._after[variable])


def in_lanes() -> bool:
    """Whether some Frame of this thread has lanes, so that streams are private to them."""
    return any(frame.lane is not None for frame in _frame.thread.frames)
