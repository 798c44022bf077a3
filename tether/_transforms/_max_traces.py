# SPDX-License-Identifier: Apache-2.0
"""assert_max_traces: an error, with the reason, where a function is traced more often than it should be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tether._transforms import _arguments
from tether._transforms._call import arrays_and_others, reach_of
from tether._transforms._explain import compilations, layers
from tether._transforms._jit import Jit
from tether._transforms._record import Record, Records
from tether.errors import ArgumentError, CheckError, describe


class _Counted:
    """How often a function was called, and what each call depended on."""

    def __init__(self, fun: Callable[..., Any], most: int | None):
        self._fun, self._most, self._records, self.count = fun, most, Records(), 0
        self._static = _arguments.StaticArguments(fun, None, None)

    def add(self, args: Any, kwargs: Any) -> None:
        """Counts a call.

        Raises:
            CheckError: it is one too many.
        """
        self.count += 1
        reach = reach_of(self._fun, args, kwargs)
        record = Record(reach, *arrays_and_others(reach))
        record.add_call(self._static, args, kwargs, reach)
        self._records.add(record)
        if self._most is not None and self.count > self._most:
            raise CheckError(
                f"assert_max_traces: {_arguments.name_of(self._fun)} is traced {self.count} times.",
                got="; ".join(compilations(self._records)[-1].reasons),
                expected=f"max_traces={self._most}",
                fix="call it with the shapes, dtypes, settings and modules of the calls before",
            )


def assert_max_traces(fn: Callable[..., Any] | None = None, *, max_traces: int | None) -> Any:
    """Makes a function that may be traced, which is to say, called, only so many times.

    It goes inside: ``tether.jit(tether.debug.assert_max_traces(f, max_traces=1))``. The error says what differs from
    the calls before, in the words of ``tether.explain``.

    Args:
        fn: The function or module; without it, a decorator is returned.
        max_traces: The most; None for any number, to be asked for with ``get_num_traces``.
    Raises:
        ArgumentError: ``fn`` was made by ``tether.jit``: its calls are no traces.
        CheckError: one call more.
    Example:
        >>> double = tether.jit(tether.debug.assert_max_traces(lambda x: 2 * x, max_traces=1))
        >>> double(jnp.ones(3)).shape
        (3,)
        >>> double(jnp.ones(4))
        Traceback (most recent call last):
        tether.errors.CheckError: assert_max_traces: <lambda> is traced 2 times...
    """
    if fn is None:
        return functools.partial(assert_max_traces, max_traces=max_traces)
    _arguments.checked_callable(fn, "assert_max_traces")
    if isinstance(fn, Jit):
        raise ArgumentError(
            "assert_max_traces: what is counted is compiled already.",
            got=repr(fn),
            expected="the function that is to be compiled",
            fix="tether.jit(tether.debug.assert_max_traces(f, max_traces=1))",
        )
    counter = _Counted(fn, max_traces)

    @functools.wraps(fn, updated=())
    def counted(*args: Any, **kwargs: Any) -> Any:
        counter.add(args, kwargs)
        return fn(*args, **kwargs)

    counted.__name__ = _arguments.name_of(fn)
    counted._counted = counter  # type: ignore[attr-defined]
    return counted


def get_num_traces(fn: Callable[..., Any]) -> int:
    """How often a function was traced.

    Args:
        fn: What ``assert_max_traces`` or ``tether.jit`` gave, or a method, partial, wrapper or module made of it.
    Raises:
        ArgumentError: it is made of neither.
    Example:
        >>> double = tether.jit(lambda x: 2 * x)
        >>> double(1.0).item(), double(2.0).item(), tether.debug.get_num_traces(double)
        (2.0, 4.0, 1)
    """
    found = [layer for layer in layers(fn) if isinstance(layer, Jit) or hasattr(layer, "_counted")]
    if not found:
        raise ArgumentError(
            "get_num_traces: nobody counts the traces of this function.",
            got=f"the function {_arguments.name_of(fn)}" if callable(fn) else describe(fn),
            expected="a function that assert_max_traces or tether.jit gave",
            fix="tether.jit(f), or jax.jit(tether.debug.assert_max_traces(f, max_traces=None))",
        )
    last = found[-1]  # the counter, if there are both: another jit may trace it, too
    return last.traces if isinstance(last, Jit) else last._counted.count
