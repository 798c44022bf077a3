# SPDX-License-Identifier: Apache-2.0
"""Loops and branches in Python, for ``jax.disable_jit()``: with concrete values, so that print and a debugger work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tether._core import frame as _frame
from tether._core.variable import Rng
from tether._transforms._call import reach_of
from tether.random._streams import Forked


def is_eager() -> bool:
    """Whether nothing is to be compiled."""
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def run_eagerly(
    kind: str, funs: list[Callable[..., Any]], args: tuple[Any, ...], steps: Callable[[], Any], own: Any = ()
) -> Any:
    """Runs ``steps`` as one transformation: writes land at the end; streams, but for ``own``, are private in it."""
    reached = (variable for fun in funs for variable in reach_of(fun, args, {}).variables())
    found = list(dict.fromkeys(v for v in reached if isinstance(v, Rng) and v not in own))
    keys = zip(found, _frame.gather(found), strict=True)
    streams = Forked({stream: key for stream, key in keys if key is not None})
    out, written, new = _frame.Frame(kind).run({**streams.starts}, steps)
    _frame.write_back(written, list(map(streams.settled, written, new)))
    return out
