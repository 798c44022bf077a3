# SPDX-License-Identifier: Apache-2.0
"""Where in JAX's stack of traces this thread stands.

The one file that leans on undocumented behaviour of JAX and of CPython:

- an opaque trace state has ``_trace_ref``, a weak reference to the trace of the thread;
- a trace has ``parent_trace``, except the outermost one, which evaluates;
- a tracer has ``_trace``; a staging (jit-like) trace has ``frame.debug_info.traced_for``;
- ``stop_gradient`` of a value with a tangent gives a value of the trace below.

``tests/core/test_trace.py`` holds each of these against every supported version.
"""

from __future__ import annotations

import dis
import functools
import sys
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

_NAMES = {
    "LinearizeTrace": "grad",
    "JVPTrace": "grad",
    "BatchTrace": "vmap",
    "ShardMapTrace": "shard_map",
    "scan": "lax.scan",
    "cond": "lax.cond",
    "while_body": "lax.while_loop",
    "while_cond": "lax.while_loop",
}


def current() -> Any:
    """The trace that this thread computes in."""
    return get_opaque_trace_state()._trace_ref()  # ``take_current_trace`` would tell, but a signal in it breaks JAX


def chain(trace: Any) -> list[Any]:
    """The trace and those around it, innermost first, without the evaluating one."""
    traces = []
    while (parent := getattr(trace, "parent_trace", None)) is not None:
        traces.append(trace)
        trace = parent
    return traces


def crossed(trace: Any, home: Any) -> list[Any]:
    """The traces from ``trace`` out to ``home``, without ``home``."""
    if trace is home:
        return []
    traces = chain(trace)
    return traces[: traces.index(home)] if home in traces else traces


def owner(value: Any) -> Any:
    """The trace that a tracer belongs to, None for an array."""
    return value._trace if isinstance(value, jax.core.Tracer) else None


def is_staged(trace: Any) -> bool:
    """Whether the trace records a program (jit, scan, cond, ...), which JAX caches."""
    return hasattr(trace, "frame")


def transform_name(trace: Any) -> str:
    """The name of the JAX transformation that a trace belongs to."""
    info = getattr(getattr(trace, "frame", None), "debug_info", None)
    name = type(trace).__name__ if info is None else info.traced_for.split(" ")[0]
    return f"jax.{_NAMES.get(name, name)}"


def stopped(value: Any) -> Any:
    """The value without the tangents of the current trace."""
    inexact = jnp.issubdtype(jnp.result_type(value), jnp.inexact)
    return jax.lax.stop_gradient(value) if inexact else value


def result_is_discarded(depth: int) -> bool:
    """Whether the call that is running ``depth`` frames up is a statement, its result thrown away."""
    frame = sys._getframe(depth + 1)
    return frame.f_lasti in _discarding_calls(frame.f_code)


@functools.lru_cache(maxsize=1024)
def _discarding_calls(code: Any) -> frozenset[int]:
    steps = list(dis.get_instructions(code))
    pairs = zip(steps, steps[1:], strict=False)  # the last index may lie in the cache entries behind a call
    spans = [range(step.offset, after.offset, 2) for step, after in pairs if after.opname == "POP_TOP"]
    return frozenset(offset for span in spans for offset in span)


EVALUATING = current()
while getattr(EVALUATING, "parent_trace", None) is not None:
    EVALUATING = EVALUATING.parent_trace
