# SPDX-License-Identifier: Apache-2.0
"""The one wrapper around every module's ``__call__``: mode, key, named scope, and errors that say where."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any

import jax

from tether._core import Rng, Variable
from tether._core import frame as _frame
from tether._core.structure import Survey
from tether.errors import StackedError, StateLostError, TetherError, describe

donating: weakref.WeakSet[Any] = weakref.WeakSet()  # functions that give state away: asked when an array is lost


def wrapped_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """``__call__`` with ``training=`` and ``key=``, a named scope, and errors that say where."""
    takes = set(inspect.signature(call).parameters) & {"training", "key"}

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        thread = _frame.thread
        outer = thread.training, thread.stream, thread.inside
        try:
            if kwargs:
                _enter_call(thread, takes, kwargs)
            if self._tether.stacked:
                raise _stacked_error(self)
            with jax.named_scope(_scope_name(self)):
                if thread.watchers:
                    return _watched(call, self, thread)(*args, **kwargs)
                return call(self, *args, **kwargs)
        except Exception as error:
            _say_deleted(error, self)
            _say_where(error, self, args)
            raise
        finally:
            thread.training, thread.stream, thread.inside = outer

    return __call__


def _enter_call(thread: Any, takes: set[str], kwargs: dict[str, Any]) -> None:
    training = kwargs.get("training") if "training" in takes else kwargs.pop("training", None)
    key = kwargs.get("key") if "key" in takes else kwargs.pop("key", None)
    if training is not None:
        thread.training = bool(training)
    if key is not None:
        thread.stream = Rng(key)


def _watched(call: Callable[..., Any], module: Any, thread: Any) -> Callable[..., Any]:
    """The call as those see it that look at it, the innermost first."""
    thread.inside = module._tether.label
    seen = functools.partial(call, module)
    for watcher in reversed(thread.watchers):
        seen = watcher.around(seen, module)
    return seen


def _scope_name(module: Any) -> str:
    return (
        module._tether.label.rpartition(".")[2].replace("[", "_").replace("]", "").strip("_") or type(module).__name__
    )


def _say_where(error: Exception, module: Any, args: tuple[Any, ...]) -> None:
    """Gives an error of a layer its path, and any other one a note, at the innermost module alone."""
    where = _place(module)
    if getattr(error, "_tether_said", False):
        return
    if isinstance(error, TetherError):
        error.at = error.at or where
    else:
        error.add_note(f"in {where}, called with {', '.join(map(describe, args)) or 'no positional arguments'}")
    error._tether_said = True  # type: ignore[attr-defined]


def _place(module: Any) -> str:
    return f"{module._tether.label or 'the module itself'}  ({type(module).__name__})"


def innermost() -> str:
    """Path and class of the module that is being called, read off the stack; empty outside of all calls."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__call__" and frame.f_globals is globals():
            return _place(frame.f_locals["self"])
        frame = frame.f_back
    return ""


def _say_deleted(error: Exception, module: Any) -> None:
    """Turns JAX's word on a deleted array into an error with the path."""
    if not (isinstance(error, RuntimeError) and "deleted" in str(error)) or isinstance(error, TetherError):
        return
    lost = [variable for variable in Survey(module).variables if _frame.is_deleted(variable._value)]
    if lost:
        raise state_lost(lost) from error


def state_lost(variables: list[Variable]) -> StateLostError:
    """The error for Variables whose buffer a donated call consumed; it names the functions that may have."""
    takers = sorted({repr(fun) for fun in list(donating) if any(map(fun.donates, variables))})
    others = " and others" if len(takers) > 3 else ""
    named = f"; such a cell is donated by {', '.join(takers[:3])}{others}" if takers else ""
    return StateLostError(
        "state was lost: its buffer was given away to a donated call.",
        at=", ".join(variable.describe() for variable in variables[:3]) + (" and more" if len(variables) > 3 else ""),
        got=f"an array that a donated call consumed, in a cell that it did not write{named}",
        expected="an array of the cell's own",
        fix=[
            "tether.clone(model) or tether.snapshot(model) before the donated call: a plain tree map shares buffers",
            "tether.jit(f), without donate_state=True, keeps old buffers",
        ],
    )


def _stacked_error(module: Any) -> StackedError:
    return StackedError(
        "a stacked module was called as a single one: its leaves have an axis of members in front.",
        at=_place(module),
        got=f"a module stacked {module._tether.stacked} time(s)",
        fix=["tether.vmap(lambda member, x: member(x))(modules, xs)", "tether.index(modules, 0)(x)"],
    )
