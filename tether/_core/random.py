# SPDX-License-Identifier: Apache-2.0
"""Draws from streams of keys, the same in every transformation.

A stream is an Rng; a draw splits its key, keeps one half and returns the other. Where one function stands
for several (the lanes of vmap), a stream from outside gets a private child for each: the stream outside
advances once, and each lane's child begins with the lane's index folded in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core.variable import Rng, assign

default_stream: Any = Rng.make(None, label="tether.random.default")  # its key is made at the first use, not at import
default_stream.home = None


def current_stream() -> Rng:
    """The stream that layers draw from here: that of ``key=`` or a scope, else the default one."""
    stream = _frame.thread.stream
    if stream is None:
        stream = default_stream
        if stream._value is None:
            stream._value = _seed_key(0)
    return stream


def _seed_key(seed: int) -> Any:
    with jax.ensure_compile_time_eval():  # also at a first draw inside a trace: the stream belongs to no trace
        return jax.random.key(seed)


def seed(value: int) -> None:
    """Starts the default stream anew."""
    key = _seed_key(value)
    if default_stream._value is None:
        default_stream._value = key
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
    return _draw(stream or current_stream(), len(_frame.thread.frames))


def _draw(stream: Rng, level: int) -> Any:
    private = _own_stream(stream, level, _frame.read)
    key, drawn = jax.random.split(_frame.read(private))
    assign(private, key)
    return drawn


def _own_stream(stream: Rng, level: int, look: Callable[[Rng], Any]) -> Rng:
    """The stream, or its private child in the innermost of the first ``level`` Frames that has lanes."""
    for index in reversed(range(level)):
        frame = _frame.thread.frames[index]
        if frame.birth < stream.birth:
            break
        if frame.lane is None:
            continue
        if stream in frame.given:  # a stacked stream: each lane has its own already
            break
        if stream not in frame.children:
            outside = _own_stream(stream, index, look)
            after, drawn = jax.random.split(look(outside))
            start = jax.random.fold_in(drawn, frame.lane)
            child = Rng.make(start, label=f"{stream.label} in a lane of {frame.kind}")
            frame.children[stream] = child, start, outside, after
        return frame.children[stream][0]
    return stream


def settle(frame: _frame.Frame) -> None:
    """At the end of a Frame with lanes: the streams outside advance, once, if a lane has drawn."""
    for child, start, outside, after in frame.children.values():
        if child._value is not start:
            assign(outside, after)


def streams() -> list[Rng]:
    """The streams that a staged function may draw from: the current one, and in lanes its private child.

    Called before the staging, so that a child is made outside, where its key belongs.
    """
    stream, level = current_stream(), len(_frame.thread.frames)
    return list(dict.fromkeys([stream, _own_stream(stream, level, _frame.peek)])) if in_lanes() else [stream]


def in_lanes() -> bool:
    """Whether some Frame of this thread has lanes, so that streams are private to them."""
    return any(frame.lane is not None for frame in _frame.thread.frames)
