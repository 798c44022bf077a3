# SPDX-License-Identifier: Apache-2.0
"""Checks in programs: what is called when one fails, and how its failure leaves a compiled program.

A program calls the host only when a check fails. There it raises, and JAX wraps that in an error of its own, with a
long text; ``tether.jit`` finds the failure again in that text. On several devices nothing may be raised inside, since
the other devices would wait for the one that stopped until XLA ends the process: the failure is noted, and raised when
the program is over.

Leans on one thing that JAX doesn't document, held by ``tests/transforms/test_checks.py`` against every supported
version: the equation of a callback has it among its parameters, as ``callback.callback_func``.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tether._core import frame as _frame
from tether._core import trace as _trace
from tether._core.variable import Variable
from tether._modules.call import innermost
from tether.errors import CheckError

_MOST_KEPT = 16  # failures of one check, for as many threads that fail at once
_MOST_LISTED = 8  # lanes in a message
_lock = threading.Lock()


class Check:
    """One check where it stands in a program. Called with what it checks, it raises if that is true in any lane.

    Args:
        name: The function that the user called, for the message.
        messages: What may be wrong; ``index`` chooses.
        is_looked_at: Whether a debugger opens instead.
        at: Where the check stands; where it is called from, if None.

    Attributes:
        is_translated: Whether a ``tether.jit`` says what failed, so that nobody needs JAX's log of it.
        failures: The last ones.
        waiting: How many runs there are that want failures to be noted, not raised.
        noted: How many were.
    """

    def __init__(self, name: str, messages: Sequence[str], is_looked_at: bool = False, at: str | None = None):
        self._name, self._messages, self._is_looked_at = name, tuple(messages), is_looked_at
        self._at = here() if at is None else at
        self.is_translated, self.waiting, self.noted = False, 0, 0
        self.failures: collections.deque[CheckError] = collections.deque(maxlen=_MOST_KEPT)

    def __call__(self, pred: Any, index: Any, *values: Any) -> np.uint8:
        pred, index = np.asarray(pred), np.asarray(index)
        if not pred.any():
            return np.uint8(0)
        error = self._error(pred, index)
        if self._is_looked_at:
            _look(error, pred, *map(np.asarray, values))
            return np.uint8(1)
        self.failures.append(error)
        if not self.waiting:
            raise _again(error, self.is_translated)
        self.noted += 1
        return np.uint8(1)

    def _error(self, pred: np.ndarray, index: np.ndarray) -> CheckError:
        if not pred.ndim:
            return CheckError(f"{self._name}: {self._message(index)}", at=self._at)
        lanes: dict[str, list[str]] = {}
        for lane in map(tuple, np.argwhere(pred)):
            lanes.setdefault(self._message(index[lane]), []).append(f"[{', '.join(map(str, lane))}]")
        first, *others = lanes
        got = f"a failure at {_listed(lanes[first])} of a batch of {list(pred.shape)}"
        got += "".join(f"; at {_listed(lanes[other])}: {other}" for other in others)
        return CheckError(f"{self._name}: {first}", at=self._at, got=got)

    def _message(self, index: Any) -> str:
        count = len(self._messages)
        return self._messages[index] if 0 <= index < count else f"a failure with index {index}, and msgs has {count}."


def _listed(lanes: list[str]) -> str:
    more = f" and {len(lanes) - _MOST_LISTED} more" if len(lanes) > _MOST_LISTED else ""
    return ", ".join(lanes[:_MOST_LISTED]) + more


def _look(error: CheckError, pred: np.ndarray, *x: np.ndarray) -> None:
    """Where the debugger opens: ``error`` says what is wrong, ``x`` are the arrays that the check stands at."""
    print(error)
    breakpoint()


def here() -> str:
    """The module that is being called, if one is, and the line of the user's code."""
    return ", ".join(filter(None, [innermost(), _trace.user_line()]))


def _again(error: CheckError, is_translated: bool = False) -> CheckError:
    """The same error, never raised before."""
    new = copy.copy(error)
    new._is_translated = is_translated  # type: ignore[attr-defined]
    return new


def _is_news(record: logging.LogRecord) -> bool:
    """Whether nobody else says what JAX logs of a callback that failed."""
    return not getattr(record.exc_info and record.exc_info[1], "_is_translated", False)


logging.getLogger(jax.pure_callback.__module__).addFilter(_is_news)


def checks_in(jaxpr: Any) -> list[Check]:
    """The checks of a program, also of those inside it."""
    return list(dict.fromkeys(_found(jaxpr, set())))


def _found(jaxpr: Any, seen: set[int]) -> Iterator[Check]:
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            if isinstance(call := getattr(value, "callback_func", None), Check):
                yield call
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)  # of a closed one
                if hasattr(inner, "eqns"):
                    yield from _found(inner, seen)


def checking(
    checks: Sequence[Check], several: bool, run: Callable[..., Any], written: Sequence[Variable] = ()
) -> Callable[..., Any]:
    """A compiled program that raises CheckError if a check in it fails; then nothing that it computed is kept.

    Args:
        checks: Those of the program.
        several: Whether it runs on several devices.
        run: Runs it.
        written: What ``run`` itself writes. The old values come back; what was donated is lost, and says so when used.
    """
    return functools.partial(_checked, checks, several, run, written) if checks else run


def _checked(
    checks: Sequence[Check], several: bool, run: Callable[..., Any], written: Sequence[Variable], *args: Any
) -> Any:
    out, old = None, list(map(_frame.get_value, written))
    for check in checks:
        check.is_translated = True
    try:
        with _noting(checks if several else ()) as noted:
            out = run(*args)
            jax.block_until_ready([out, *map(_frame.get_value, written)])
        failure = next(noted(), None)
    except (RuntimeError, ValueError) as error:
        failure = next((f for check in checks for f in list(check.failures) if str(f) in str(error)), None)
        if failure is None:
            raise
    if failure is None:
        return out
    for variable, value in zip(written, old, strict=True):
        if not _frame.is_deleted(value):
            _frame.set_value(variable, value)
        elif variable._value is not value:  # not to come back: on several devices, jax 0.10.2 crashes at its next use
            variable._value.delete()
    raise _again(failure)


@contextlib.contextmanager
def _noting(checks: Sequence[Check]) -> Iterator[Callable[[], Iterator[CheckError]]]:
    """While it lasts, failures are noted; gives what gives those.

    Two runs of one program at once may both find what only one of them did: rather that than none of them.
    """
    with _lock:
        counts = [check.noted for check in checks]
        for check in checks:
            check.waiting += 1
    try:
        pairs = zip(checks, counts, strict=True)
        yield lambda: (check.failures[-1] for check, count in pairs if check.noted != count)
    finally:
        with _lock:
            for check in checks:
                check.waiting -= 1
