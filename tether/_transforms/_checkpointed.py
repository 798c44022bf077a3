# SPDX-License-Identifier: Apache-2.0
"""Loops with reverse-mode gradients that keep some carries, and run the steps between them again.

These are functions of arrays. What their bodies close over are operands, too, so that gradients reach it. Where lanes
of a vmap go on for different numbers of steps, the loop goes on while any does, and the others stay as they are; so
the carries of the same steps are kept for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tether._transforms._hoisted import Hoisted, settled
from tether._transforms._lanes import any_lane, chosen, own_lane
from tether._transforms._one_way import SymbolicZero, forward_only, reverse_only
from tether._transforms._treeverse import NEVER, Schedule, default_checkpoints
from tether.errors import GradientError

Arrays = list[Any]


def checkpointed_while(
    test: Callable[[Any], Any], turn: Callable[[Any], Any], init: Any, *, most: int, checkpoints: int | None
) -> Any:
    """``jax.lax.while_loop``, of at most ``most`` steps, at least one."""
    leaves, treedef = jax.tree.flatten(init)
    schedule = Schedule(min(checkpoints or default_checkpoints(most), most), most)
    body, leaves = settled(lambda carry, _: (jax.tree.leaves(turn(treedef.unflatten(carry))), []), leaves, [])
    asks = Hoisted(lambda carry: test(treedef.unflatten(carry)), leaves)

    def goes_on(asked: Arrays, end: int, step: Any, carry: Arrays) -> Any:
        return any_lane(asks(asked, carry)) & (step < end)

    def once(consts: Arrays, asked: Arrays, carry: Arrays) -> tuple[Arrays, Any]:
        on = own_lane(asks(asked, carry))
        return chosen(on, body(consts, carry, [])[0], carry), on

    @jax.custom_vjp
    def loop(consts: Arrays, asked: Arrays, carry: Arrays) -> Arrays:
        run = lambda state: (state[0] + 1, once(consts, asked, state[1])[0])
        return jax.lax.while_loop(lambda state: goes_on(asked, most, *state), run, (jnp.int32(0), carry))[1]

    def forward(*operands: Any) -> tuple[Arrays, Any]:
        consts, asked, carry = _values(operands)

        def run(choice: Any, state: Any) -> Any:
            step, count, carry, kept = state
            new, on = once(consts, asked, carry)
            return step + 1, jnp.where(on, step + 1, count), new, kept.also(choice, step, carry)

        state = jnp.int32(0), jnp.int32(0), carry, Kept.begun(schedule.slots, carry)
        for end, choice in schedule.phases:
            more = lambda state, end=end: goes_on(asked, end, state[0], state[2])
            first = *state[:3], state[3]._replace(state=choice.entry())
            state = jax.lax.while_loop(more, functools.partial(run, choice), first)
        steps, count, carry, kept = state
        saved = Saved(consts, kept.in_order(), [], _as_shape(operands[0], operands[2]))
        return forward_only(carry, _twice("while_loop")), (saved, steps, count)

    def backward(residuals: tuple[Saved, Any, Any], cotangents: Arrays) -> Any:
        saved, steps, count = residuals
        back = Backward("while_loop", schedule, body, saved, cotangents, is_on=lambda step: own_lane(step < count))
        if back.is_zero:
            return None, None, None
        first = back.begun(steps)
        last = jax.lax.while_loop(lambda state: state[0] > 0, lambda state: back.step(state, [], [])[0], first)
        of_consts, of_carry, _ = back.of_operands(last, [])
        return of_consts, None, of_carry

    loop.defvjp(forward, backward, symbolic_zeros=True)
    return treedef.unflatten(_called("while_loop", loop, body.consts, asks.consts, leaves))


def checkpointed_scan(
    turn: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    length: int,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    checkpoints: int | None = None,
) -> tuple[Any, Any]:
    """``jax.lax.scan``."""
    if not length:
        return jax.lax.scan(turn, init, xs, length)
    (leaves, treedef), (rows, x_treedef) = jax.tree.flatten(init), jax.tree.flatten(xs)
    schedule = Schedule(min(checkpoints or default_checkpoints(length), length), length, is_known=True)
    ((_, choice),) = schedule.phases
    y_treedefs: list[Any] = []

    def flat(carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        new, y = turn(treedef.unflatten(carry), x_treedef.unflatten(x))
        y_leaves, y_treedef = jax.tree.flatten(y)
        y_treedefs[:] = [y_treedef]
        return jax.tree.leaves(new), y_leaves

    body, leaves = settled(flat, leaves, [jax.ShapeDtypeStruct(row.shape[1:], row.dtype) for row in rows])

    @jax.custom_vjp
    def loop(consts: Arrays, carry: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
        one = lambda carry, x: body(consts, carry, x)
        return jax.lax.scan(one, carry, rows, length, reverse=reverse, unroll=unroll)

    def forward(*operands: Any) -> tuple[Any, Any]:
        consts, carry, rows = _values(operands)

        def run(state: Any, x: Arrays) -> Any:
            step, carry, kept = state
            new, y = body(consts, carry, x)
            return (step + 1, new, kept.also(choice, step, carry)), y

        first = jnp.int32(0), carry, Kept.begun(schedule.slots, carry)._replace(state=choice.entry())
        (_, carry, kept), ys = jax.lax.scan(run, first, rows, length, reverse=reverse, unroll=unroll)
        count = len(carry)
        out = forward_only([*carry, *ys], _twice("scan"))
        return (out[:count], out[count:]), Saved(consts, kept.in_order(), rows, _as_shape(*operands))

    def backward(saved: Saved, cotangents: tuple[Arrays, Arrays]) -> Any:
        place = lambda step: length - 1 - step if reverse else step
        back = Backward("scan", schedule, body, saved, *cotangents, place=place)
        if back.is_zero:
            return None, None, None
        run = lambda state, row: back.step(state, *row)
        first = back.begun(jnp.int32(length))
        last, of_rows = jax.lax.scan(run, first, (saved.rows, back.of_ys), length, reverse=not reverse, unroll=unroll)
        return back.of_operands(last, of_rows)

    loop.defvjp(forward, backward, symbolic_zeros=True)
    carry, ys = _called("scan", loop, body.consts, leaves, rows)
    return treedef.unflatten(carry), y_treedefs[0].unflatten(ys)


class Kept(NamedTuple):
    """The carries that are kept.

    Attributes:
        slots: For each leaf of the carry a stack of them, [slots, ...].
        steps: int32[slots], of which step the slot holds the carry.
        state: In the forward pass that of the choice. In the backward pass the order of the slots, int32[slots],
            by their steps; ``steps`` are in that order then.
    """

    slots: Arrays
    steps: Any
    state: Any

    @classmethod
    def begun(cls, count: int, carry: Arrays) -> Kept:
        slots = [jnp.broadcast_to(leaf, (count, *leaf.shape)) for leaf in carry]
        return cls(slots, jnp.full(count, NEVER, jnp.int32), None)

    def also(self, choice: Any, step: Any, carry: Arrays) -> Kept:
        """In the forward pass: with this carry, if it is chosen."""
        save, slot, state = choice.place(step, self.steps, self.state)
        (*slots, steps) = _put([*self.slots, self.steps], slot, [*carry, step], save)
        return Kept(slots, steps, state)

    def in_order(self) -> Kept:
        order = jnp.argsort(self.steps).astype(jnp.int32)
        return Kept(self.slots, self.steps[order], order)

    def at(self, place: Any) -> Arrays:
        """In the backward pass: the carry at this place in order."""
        return [_row(stack, _row(self.state, place)) for stack in self.slots]

    def put(self, place: Any, step: Any, carry: Arrays, save: Any) -> Kept:
        """In the backward pass: with this carry, if it is to be saved."""
        slots = _put(self.slots, _row(self.state, place), carry, save)
        return self._replace(slots=slots, steps=_put([self.steps], place, [step], save)[0])


class Saved(NamedTuple):
    """What a forward pass saves for the backward pass.

    Attributes:
        consts: What the body closes over.
        kept: The kept carries, in order.
        rows: What a scan runs over.
        flags: Which of the constants, the entry and the rows are differentiated, from ``_as_shape``.
    """

    consts: Arrays
    kept: Kept
    rows: Arrays
    flags: Any


class Backward:
    """The backward pass of a loop, from its last step to its first.

    Its state is (number of steps to go back, kept carries, how many, cotangents of the carry, those of the constants so
    far).

    Args:
        name, schedule, body, saved: The loop, and what its forward pass saved.
        of_carry: Cotangents of the last carry.
        of_ys: Cotangents of what a scan stacks.
        place: In which row a step finds its x.
        is_on: Whether this lane makes a step; None where there is no test.
    """

    def __init__(
        self,
        name: str,
        schedule: Schedule,
        body: Hoisted,
        saved: Saved,
        of_carry: Arrays,
        of_ys: Arrays = (),  # type: ignore[assignment]
        place: Callable[[Any], Any] = lambda step: step,
        is_on: Callable[[Any], Any] | None = None,
    ):
        self._name, self._schedule, self._body, self._saved = name, schedule, body, saved
        self._place, self._is_on = place, is_on
        one = lambda stacks: [jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype) for stack in stacks]
        operands = saved.consts, one(saved.kept.slots), one(saved.rows)
        self._of_consts, self._of_init, self._of_rows = flags = _from_shape(saved.flags, tuple(map(len, operands)))
        self._of_carry = _reached(body, operands, flags)
        self._of_y = [not isinstance(ct, SymbolicZero) for ct in of_ys]
        self.of_ys, self._last = _part(self._of_y, of_ys), _part(self._of_carry, of_carry)
        self.is_zero = not self.of_ys and all(isinstance(ct, SymbolicZero) for ct in self._last)

    def begun(self, steps: Any) -> Any:
        zero = lambda ct: jnp.zeros(ct.aval.shape, ct.aval.dtype)
        cts = [zero(ct) if isinstance(ct, SymbolicZero) else ct for ct in self._last]
        sums = [jnp.zeros(const.shape, const.dtype) for const in _part(self._of_consts, self._saved.consts)]
        return steps, self._saved.kept, jnp.minimum(steps, self._schedule.slots), cts, sums

    def step(self, state: Any, x: Arrays, of_y: Arrays) -> tuple[Any, Arrays]:
        """One step back: the new state, and cotangents of the row."""
        end, kept, count, cts, sums = state
        carry, kept, count = self._carry_before(end, kept, count)
        end = end - 1
        flags, values = (self._of_consts, self._of_carry, self._of_rows), (self._saved.consts, carry, x)

        def varied(*some: Arrays) -> Any:
            new, y = self._body(*map(_merged, flags, some, values))
            return _part(self._of_carry, new), _part(self._of_y, y)

        of_consts, of_carry, of_x = jax.vjp(varied, *map(_part, flags, values))[1]((cts, of_y))
        if self._is_on is not None:
            on = self._is_on(end)
            of_consts = chosen(on, of_consts, [jnp.zeros_like(ct) for ct in of_consts])
            of_carry = chosen(on, of_carry, cts)
        sums = [total + ct for total, ct in zip(sums, of_consts, strict=True)]
        return (end, kept, jnp.where(_row(kept.steps, count - 1) == end, count - 1, count), of_carry, sums), of_x

    def _carry_before(self, end: Any, kept: Kept, count: Any) -> tuple[Arrays, Kept, Any]:
        """The carry of step ``end - 1``, from the last one kept; on the way to it some more are kept."""
        if self._schedule.keeps_all:
            return [_row(stack, end - 1) for stack in kept.slots], kept, count
        slots = self._schedule.slots

        def run(state: Any) -> Any:
            step, carry, kept, count, target = state
            x = [_row(row, self._place(step)) for row in self._saved.rows]
            new = self._body(self._saved.consts, carry, x)[0]
            if self._is_on is not None:
                new = chosen(self._is_on(step), new, carry)
            step = step + 1
            save = step == target
            kept, count = kept.put(count, step, new, save), jnp.where(save, count + 1, count)
            return step, new, kept, count, self._schedule.next(step, end, slots - count, save, target)

        step, carry = _row(kept.steps, count - 1), kept.at(count - 1)
        target = self._schedule.next(step, end, slots - count, True, NEVER)
        first = step, carry, kept, count, target
        _, carry, kept, count, _ = jax.lax.while_loop(lambda state: state[0] < end - 1, run, first)
        return carry, kept, count

    def of_operands(self, state: Any, of_rows: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """In the end: cotangents of constants, entry and rows, None for what isn't differentiated."""
        error = _twice(self._name)
        spread = lambda flags, cts: _merged(flags, forward_only(cts, error), [None] * len(flags))
        of_init = [
            ct if flag else None for ct, flag in zip(spread(self._of_carry, state[3]), self._of_init, strict=True)
        ]
        return spread(self._of_consts, state[4]), of_init, spread(self._of_rows, of_rows)


def _reached(body: Hoisted, operands: Any, flags: Any) -> list[bool]:
    """Which leaves of the carry come to depend on the operands that are flagged."""
    reached = [False] * len(operands[1])

    @jax.custom_jvp
    def look(carry: Arrays) -> Arrays:
        return carry

    def rule(carry: Any, tangents: Any) -> Any:
        reached[:] = [not isinstance(tangent, SymbolicZero) for tangent in tangents[0]]
        return carry[0], tangents[0]

    look.defjvp(rule, symbolic_zeros=True)
    leaves, treedef = jax.tree.flatten(operands)
    flags = jax.tree.leaves(flags)

    def run(varied: Arrays, leaves: Arrays) -> Any:
        def last(varied: Arrays) -> Arrays:
            consts, carry, x = treedef.unflatten(_merged(flags, varied, leaves))
            return look(jax.lax.scan(lambda carry, _: (body(consts, carry, x)[0], None), carry, length=1)[0])

        return jax.jvp(last, (varied,), (varied,))

    with jax.disable_jit(False):  # scan goes on until no more is reached
        jax.eval_shape(run, _part(flags, leaves), leaves)
    return reached


def _row(stack: Any, place: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, place, 0, keepdims=False)


def _put(stacks: Arrays, place: Any, rows: Arrays, save: Any) -> Arrays:
    if save is not True:
        rows = [jax.lax.select(save, row, _row(stack, place)) for row, stack in zip(rows, stacks, strict=True)]
    put = jax.lax.dynamic_update_index_in_dim
    return [put(stack, row, place, 0) for stack, row in zip(stacks, rows, strict=True)]


def _part(flags: list[bool], leaves: Any) -> Arrays:
    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]


def _merged(flags: list[bool], some: Arrays, leaves: Arrays) -> Arrays:
    """The leaves, with some in place of those that are flagged."""
    new = iter(some)
    return [next(new) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]


def _values(operands: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf.value), operands)  # a literal is no array


_BITS = 30


def _as_shape(*operands: Arrays) -> Any:
    """Which operands are differentiated, as the shape of an empty array.

    A residual's shape is the only thing that is known of it in the backward pass, whatever is traced: JAX mixes up the
    trees of the residuals when one traced call is differentiated in two ways.
    """
    flags = [leaf.perturbed for part in operands for leaf in part]
    parts = [flags[start : start + _BITS] for start in range(0, len(flags), _BITS)]
    return jnp.zeros((0, *(sum(flag << place for place, flag in enumerate(part)) for part in parts)))


def _from_shape(flags: Any, sizes: tuple[int, ...]) -> tuple[list[bool], ...]:
    bits = [bool(number >> place & 1) for number in flags.shape[1:] for place in range(_BITS)]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(bits[start : start + size] for start, size in zip(starts, sizes, strict=True))


def _called(name: str, loop: Callable[..., Any], *operands: Arrays) -> Any:
    leaves, treedef = jax.tree.flatten(operands)
    try:
        return loop(*treedef.unflatten(reverse_only(leaves, _forward(name))))
    except TypeError as error:
        if "forward-mode autodiff (jvp) to a custom_vjp" in str(error):  # in lanes of a compiled jacfwd JAX is first
            raise _forward(name)() from None
        raise


_BOTH = {
    "while_loop": "kind='bounded', max_steps=n, which can be differentiated in any way",
    "scan": "kind='lax', which can be differentiated in any way; tether.checkpoint(f) saves memory there",
}


@functools.cache
def _forward(name: str) -> Callable[[], GradientError]:
    return lambda: GradientError(
        f"{name}: a checkpointed loop is differentiated in forward mode.",
        got="jvp, jacfwd or linearize; or hessian of a loop in a loop",
        expected="reverse mode: grad, vjp, jacrev",
        fix=_BOTH[name],
    )


@functools.cache
def _twice(name: str) -> Callable[[], GradientError]:
    return lambda: GradientError(
        f"{name}: a checkpointed loop is differentiated in reverse mode twice.",
        got="the gradient of a gradient",
        expected="reverse mode once, and forward mode of that",
        fix=["tether.jacfwd(tether.grad(f)), tether.hessian(f)", _BOTH[name]],
    )
