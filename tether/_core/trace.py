# SPDX-License-Identifier: Apache-2.0
"""Where in JAX's stack of traces this thread stands.

The one file that leans on undocumented behaviour of JAX:

- an opaque trace state has ``_trace_ref``, a weak reference to the trace of the thread;
- a trace has ``parent_trace``, except the outermost one, which evaluates;
- a tracer has ``_trace``; a staging (jit-like) trace has ``frame.debug_info.traced_for``;
- ``stop_gradient`` of a value with a tangent gives a value of the trace below;
- JAX finds a cached trace by ``==`` of what a user context holds.

``tests/core/test_trace.py`` holds each of these against every supported version.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state, set_current_trace

_NOT_THE_USERS = ("tether", "jax", "contextlib", "functools")
_ROOTLESS = ("custom_jvp", "custom_vjp", "shard_map")
_LOOKS = ("eval_shape", "make_jaxpr", "make_jaxpr_f")
_TREES = tuple(f"jax.{name}" for name in ("tree", "tree_util", "_src.tree", "_src.tree_util", "_src.flattree"))
_NAMES = {
    "LinearizeTrace": "grad",
    "JVPTrace": "grad",
    "BatchTrace": "vmap",
    "ShardMapTrace": "shard_map",
    "scan": "lax.scan",
    "fori_loop": "lax.fori_loop",
    "cond": "lax.cond",
    "switch": "lax.switch",
    "while_body": "lax.while_loop",
    "while_cond": "lax.while_loop",
}


def current() -> Any:
    """The trace that this thread computes in."""
    return get_opaque_trace_state()._trace_ref()  # ``take_current_trace`` would tell, but a signal in it breaks JAX


def chain(trace: Any) -> list[Any]:
    """The trace and those around it, innermost first, without the evaluating one."""
    traces = []
    while trace is not None and trace is not EVALUATING:
        traces.append(trace)
        trace = getattr(trace, "parent_trace", None)  # that of an eager shard_map has none, and is the last
    return traces


def has_lost_parent(trace: Any) -> bool:
    """Whether JAX may not say which traces are around this one: in a custom rule, or a shard_map, inside jit."""
    return any(stage(part) in _ROOTLESS or getattr(part, "parent_trace", None) is None for part in chain(trace))


def crossed(trace: Any, home: Any) -> list[Any]:
    """The traces from ``trace`` out to ``home``, without ``home``."""
    if trace is home:
        return []
    traces = chain(trace)
    return traces[: traces.index(home)] if home in traces else traces


def owner(value: Any) -> Any:
    """The trace that a tracer belongs to, None for an array."""
    return value._trace if isinstance(value, jax.core.Tracer) else None


def varies(value: Any, lanes: Any) -> bool:
    """Whether a value differs from lane to lane of a trace; custom rules give tracers also of those that don't."""
    return owner(value) is lanes and owner(jnp.array(value, copy=True)) is lanes


def is_staged(trace: Any) -> bool:
    """Whether the trace records a program (jit, scan, cond, ...), which JAX caches."""
    return hasattr(trace, "frame")


def stage(trace: Any) -> str:
    """What a staged trace is traced for: "jit", "scan", "while_body", ...; the class of any other trace."""
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return type(trace).__name__ if info is None else info.traced_for.split(" ")[0]


def transform_name(trace: Any) -> str:
    """The name of the JAX transformation that a trace belongs to."""
    name = stage(trace)
    return f"jax.{_NAMES.get(name, name)}"


def stopped(value: Any) -> Any:
    """The value without the tangents of the current trace."""
    inexact = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
    return jax.lax.stop_gradient(value) if inexact else value


def _package(frame: Any) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def user_line() -> str:
    """File and line of the user's code that runs: neither Tether's nor JAX's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _NOT_THE_USERS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_handed_by_jax() -> bool:
    """Whether the unflatten two calls up is a transformation's, which gives a function its arguments.

    The user's own tree functions unflatten, too, and so does looking at shapes, which computes nothing.
    """
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__") in _TREES:
        frame = frame.f_back
    if frame is None or _package(frame) != "jax":
        return False
    while frame is not None and _package(frame) != "tether":  # what is above Tether's own tracing looks at that
        if frame.f_code.co_name in _LOOKS and _package(frame) == "jax":
            return False
        frame = frame.f_back
    return True


def inside(trace: Any) -> Any:
    """A context in which this thread computes in ``trace``, one of those around it."""
    return set_current_trace(trace)


class Key(list[Any]):
    """What JAX's caches of traces hold, by whose ``==`` they find them: of one item, another one if it is spoiled.

    Compared and hashed in C: JAX would turn a signal that comes in a comparison into an error of its own.
    """

    __hash__ = list.__len__  # type: ignore[assignment]


_OUTSIDE = Key([False])
_keys = jax.make_user_context(_OUTSIDE)


def outside() -> Any:
    """A context in which JAX finds what is cached outside all of ``Caching``: for functions that read no Variable."""
    return _keys(_OUTSIDE)


class Caching:
    """Keeps single traces out of JAX's caches: those under way when it is spoiled, from ``begin`` to ``end``.

    Args:
        apart: Whether traces that are cached outside all such times are not to be found here, either.
    """

    __slots__ = ("_apart", "_before", "_key")

    def __init__(self, apart: bool):
        self._apart, self._before, self._key = apart, _keys.value, Key([apart])

    def begin(self) -> None:
        _keys(self._key).__enter__()

    def end(self) -> None:
        """May be called twice, and without ``begin``: a signal can come anywhere, also in JAX's own context."""
        _keys(self._before).__enter__()

    def spoil(self) -> None:
        """The traces under way are not found again; ``renew`` must follow before the next begins."""
        self._key[0] = object()

    def renew(self) -> None:
        if self._key[0] is not self._apart:  # the very key would still be found
            self._key = Key([self._apart])
            self.begin()


EVALUATING = current()
while getattr(EVALUATING, "parent_trace", None) is not None:
    EVALUATING = EVALUATING.parent_trace
