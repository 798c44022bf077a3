# SPDX-License-Identifier: Apache-2.0
"""Recurrent networks: a cell over the time axis of a sequence, in one direction or in both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from tether._modules import Module
from tether._transforms import scan
from tether.errors import ArgumentError, DtypeError, ShapeError, StructureError, describe
from tether.nn._inputs import as_array, at_least_float32, integer, name_of


class RNN(Module):
    """Runs a cell over the time axis of x.

    carry, y[t] = cell(carry, x[t]) for t = 0, 1, ...; with reverse, for t = T - 1, T - 2, ...

    A cell is any Module with ``init_carry(batch_shape) -> carry`` and ``__call__(carry, x) -> (carry, y)``, where carry
    and y are arrays or trees of arrays with the batch axes in front. Its Python runs once (``tether.scan``); a State
    that it writes is handed on from step to step, and Dropout in it draws anew in each.

    Where the call of a cell takes ``projected=`` as those of this library do, its ``project`` is applied to the whole
    of x before the loop, and ``init_carry`` is told the dtype, too.

    Layers on top of each other are several RNNs, in ``nn.Sequential`` or, where carries or lengths go in or out, one
    call after the other.

    Args:
        cell: What is run; shared, not copied.
        reverse: Whether time runs from the end. y[t] stays beside x[t].
        unroll: Steps in one turn of the compiled loop, at least 1; True is all of them.
        time_axis: Axis of x along which time runs, from the end: batch axes are before it, those of one step after it.
            It is -2 for vectors, -4 for images.
    Shapes:
        x: float[..., time, features] -> float[..., time, hidden_size]; with return_carry, (carry, y)
        carry: as ``cell.init_carry(batch_shape)`` gives it, which stands in for None.
        lengths: int[...], the number of steps of each row, from 0 to time; traced ones beyond count as 0 or time. From
            there on y is zero, and the carry stays; with reverse, a row begins at its own last step. What x holds in
            the padding doesn't matter: the cell runs there on zeros, which a State that it writes sees.
    Raises:
        ShapeError: x lacks axes, lengths aren't one for each row, or y or (with lengths) the carry doesn't begin with
            the batch axes.
        DtypeError: x is not an array of numbers, or lengths are not an array of integers.
        StructureError: the cell doesn't return a pair.
        ArgumentError: what is no cell, a number out of its range, a known length out of its range.
        Others come from the cell, and from tether.scan where the cell returns another carry than it was given.
    Example:
        >>> rnn = nn.RNN(nn.LSTMCell(3, 4, key=jax.random.key(0)))
        >>> carry, y = rnn(jnp.ones((2, 7, 3)), lengths=jnp.asarray([7, 5]), return_carry=True)
        >>> y.shape, carry.h.shape, float(abs(y[1, 5:]).max())
        ((2, 7, 4), (2, 4), 0.0)
        >>> two = nn.Sequential([rnn, nn.RNN(nn.GRUCell(4, 5))])
        >>> two(jnp.ones((2, 7, 3))).shape
        (2, 7, 5)
    References:
        torch.nn.LSTM, PyTorch 2.13, with pack_padded_sequence for lengths.
    """

    def __init__(self, cell: Module, *, reverse: bool = False, unroll: int | bool = 1, time_axis: int = -2):
        name = name_of(self)
        self.cell = _checked_cell(name, cell)
        self.reverse = bool(reverse)
        self.unroll = unroll if isinstance(unroll, bool) else integer(name, "unroll", unroll)
        self.time_axis = _time_axis(name, time_axis)

    def __call__(
        self,
        x: ArrayLike,
        carry: Any = None,
        *,
        lengths: ArrayLike | None = None,
        return_carry: bool = False,
    ) -> Any:
        x = as_array(self, x)
        batch = self._batch_shape(x)
        cell: Any = self.cell
        valid = None if lengths is None else self._valid(lengths, x, batch)
        if valid is not None:  # else NaN in the padding reaches the gradient as 0 * NaN
            x = _where(valid, x, jnp.zeros((), x.dtype))
        step, dtype = cell, ()
        if "projected" in inspect.signature(type(cell).__call__).parameters:
            x = cell.project(x)
            step, dtype = functools.partial(cell, projected=True), (at_least_float32(jax.tree.leaves(x)[0].dtype),)
        if carry is None:
            carry = cell.init_carry(batch, *dtype)

        def one_step(step: Any, carry: Any, now: Any) -> Any:
            x, valid = now
            new, y = _pair(self, step(carry, x), batch)
            return (new, y) if valid is None else (_held(self, valid, new, carry), y)

        time_first = jax.tree.map(lambda a: jnp.moveaxis(a, len(batch), 0), (x, valid))
        # partial: in a closure of the library's own functions, nobody would look for the cell.
        turn = functools.partial(one_step, step)
        carry, y = scan(turn, carry, time_first, reverse=self.reverse, unroll=self.unroll)
        y = jax.tree.map(lambda a: jnp.moveaxis(a, 0, len(batch)), y)
        if valid is not None:
            y = jax.tree.map(lambda a: _where(valid, a, jnp.zeros((), a.dtype)), y)
        return (carry, y) if return_carry else y

    def _batch_shape(self, x: jax.Array) -> tuple[int, ...]:
        if x.ndim < -self.time_axis:
            features = f", {-1 - self.time_axis} of one step" if self.time_axis < -1 else ""
            raise ShapeError(
                f"{name_of(self)}: x has no axis {self.time_axis}, which is that of time.",
                got=describe(x),
                expected=f"{-self.time_axis} axes or more: batch axes, time{features}",
                fix=[f"x[{'None, ' * (-self.time_axis - x.ndim)}...]", "cell(carry, x) for a single step"],
            )
        return x.shape[: self.time_axis]

    def _valid(self, lengths: ArrayLike, x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
        """Tells which steps are within the lengths, bool[*batch, time]."""
        name, time = name_of(self), x.shape[self.time_axis]
        expected = f"int[{', '.join(map(str, batch))}], one for each row of x"
        is_array = isinstance(lengths, jax.Array | np.ndarray | np.generic)
        if not is_array or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise DtypeError(
                f"{name}: lengths are not an array of integers.",
                got=describe(lengths),
                expected=expected,
                fix=["jnp.asarray([3, 5])", "mask.sum(-1), if they are a mask of the steps"],
            )
        if lengths.shape != batch:
            raise ShapeError(
                f"{name}: lengths don't have the batch axes of x.",
                got=f"lengths {describe(lengths)}, x {describe(x)} with time on axis {self.time_axis}",
                expected=expected,
                fix=f"jnp.full({batch}, {time}) for rows that are all of full length",
            )
        if not isinstance(lengths, Tracer) and lengths.size and getattr(lengths, "is_fully_addressable", True):
            known = np.asarray(lengths)  # np.min of a jax.Array would be a step of a trace around
            least, most = int(known.min()), int(known.max())
            if least < 0 or most > time:
                raise ArgumentError(
                    f"{name}: a length is outside the time axis of x.",
                    got=f"lengths {describe(lengths)} from {least} to {most}, x {describe(x)}",
                    expected=f"lengths from 0 to {time}",
                    fix=f"jnp.clip(lengths, 0, {time})",
                )
        steps = lax.broadcasted_iota(jnp.int32, (*batch, time), len(batch))
        return steps < jnp.asarray(lengths, jnp.int32)[..., None]


class Bidirectional(Module):
    """Runs one RNN forward and one backward over the same x, and merges what they give at each step.

    y[t] = merge(forward y[t], backward y[t])

    Carries are pairs, of forward and of backward.

    Args:
        forward: An RNN.
        backward: An RNN with reverse=True.
        merge: Function of the two y, or a Module; by default, one after the other along the last axis. ``jnp.add`` is
            usual, too.
    Shapes:
        x: float[..., time, features] -> float[..., time, forward + backward hidden_size]; with return_carry, (carry, y)
        carry, lengths: as in RNN.
    Raises:
        StructureError: the carry is not a pair.
        ArgumentError: what is no RNN, or an RNN in the wrong direction, or a merge that can't be called.
        Others as in RNN.
    Example:
        >>> forward, backward = nn.RNN(nn.GRUCell(3, 4)), nn.RNN(nn.GRUCell(3, 4), reverse=True)
        >>> nn.Bidirectional(forward, backward)(jnp.ones((2, 7, 3))).shape
        (2, 7, 8)
    References:
        Schuster and Paliwal 1997, Bidirectional recurrent neural networks, IEEE Trans. Signal Process. 45.
    """

    def __init__(self, forward: RNN, backward: RNN, *, merge: Callable[[Any, Any], Any] | None = None):
        name = name_of(self)
        self.forward = _directed(name, "forward", forward, False)
        self.backward = _directed(name, "backward", backward, True)
        self.merge = concatenate if merge is None else merge
        if not callable(self.merge) or (isinstance(merge, type) and issubclass(merge, Module)):
            raise ArgumentError(
                f"{name}: merge can't be called with two arrays.",
                got=f"merge={describe(merge)}",
                expected="a function of two arrays, or a Module",
                fix="merge=jnp.add",
            )

    def __call__(
        self,
        x: ArrayLike,
        carry: Any = None,
        *,
        lengths: ArrayLike | None = None,
        return_carry: bool = False,
    ) -> Any:
        if carry is None:
            carry = (None, None)
        elif not (type(carry) in (tuple, list) and len(carry) == 2):
            raise StructureError(
                f"{name_of(self)}: the carry is not a pair.",
                got=describe(carry),
                expected="(carry of forward, carry of backward)",
                fix="(model.forward.cell.init_carry(batch_shape), model.backward.cell.init_carry(batch_shape))",
            )
        there, y_there = self.forward(x, carry[0], lengths=lengths, return_carry=True)
        back, y_back = self.backward(x, carry[1], lengths=lengths, return_carry=True)
        y = self.merge(y_there, y_back)
        return ((there, back), y) if return_carry else y


def concatenate(a: Any, b: Any) -> Any:
    """Joins two outputs along the last axis; named, so that a repr can say it."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), a, b)


def _checked_cell(name: str, cell: Any) -> Any:
    if not isinstance(cell, Module) or not (callable(cell) and callable(getattr(cell, "init_carry", None))):
        raise ArgumentError(
            f"{name}: cell is not a recurrent cell.",
            got=f"cell={describe(cell)}",
            expected="a Module with init_carry(batch_shape) and __call__(carry, x) -> (carry, y)",
            fix=f"nn.{name}(nn.LSTMCell(input_size, hidden_size))",
        )
    return cell


def _time_axis(name: str, axis: Any) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int) or axis >= 0:
        raise ArgumentError(
            f"{name}: time_axis is not an axis counted from the end.",
            got=f"time_axis={describe(axis)}",
            expected="a negative int, so that any number of batch axes may lead",
            fix="jnp.moveaxis(x, 0, -2) if x is time first",
        )
    return axis


def _directed(name: str, argument: str, rnn: Any, reverse: bool) -> RNN:
    if not isinstance(rnn, RNN) or rnn.reverse != reverse:
        raise ArgumentError(
            f"{name}: {argument} is not an RNN that runs {argument}.",
            got=f"{argument}={describe(rnn)}" + (f", reverse={rnn.reverse}" if isinstance(rnn, RNN) else ""),
            expected=f"nn.RNN(cell, reverse={reverse})",
            fix=f"nn.{name}(nn.RNN(cell), nn.RNN(other_cell, reverse=True))",
        )
    return rnn


def _pair(rnn: RNN, out: Any, batch: tuple[int, ...]) -> tuple[Any, Any]:
    """Makes sure of what a cell returns: (carry, y), where y has the batch axes in front of which time is put."""
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise StructureError(
            f"{name_of(rnn)}: the cell doesn't return a pair.",
            got=f"{describe(out)} from {name_of(rnn.cell)}",
            expected="(carry, y)",
            fix="return carry, y in the cell; carry, carry where the output is the hidden state",
        )
    carry, y = out
    jax.tree.map(lambda a: _check_leads(rnn, "y", a, batch), y)
    return carry, y


def _check_leads(rnn: RNN, what: str, a: Any, batch: tuple[int, ...]) -> None:
    if jnp.shape(a)[: len(batch)] != batch:
        raise ShapeError(
            f"{name_of(rnn)}: {what} of the cell doesn't begin with the batch axes of x.",
            got=f"{describe(a)} from {name_of(rnn.cell)}",
            expected=f"[{', '.join(map(str, (*batch, '...')))}]",
            fix="tether.scan(cell, carry, x), which asks for no batch axes",
        )


def _held(rnn: RNN, valid: jax.Array, new: Any, old: Any) -> Any:
    """Gives the new carry where a step is valid, and else the old one."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new  # here and below: tether.scan says what is wrong

    def held(new: Any, old: Any) -> Any:
        if (jnp.shape(new), jnp.result_type(new)) != (jnp.shape(old), jnp.result_type(old)):
            return new
        _check_leads(rnn, "with lengths, the carry", old, valid.shape)
        return _where(valid, new, old)

    return jax.tree.map(held, new, old)


def _where(valid: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Chooses by the leading axes, which are those of valid."""
    return jnp.where(valid.reshape(valid.shape + (1,) * (a.ndim - valid.ndim)), a, b)
