# SPDX-License-Identifier: Apache-2.0
"""The transformations of the table, each with what it does to the same model written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import tether
from tests.laws.kinds import LANES, Values, dropout_by_hand, lane, loss_by_hand


def plain_oracle(kind, state, x):
    return loss_by_hand(kind, state, x)


def grad_oracle(kind, state, x):
    return jax.grad(lambda x: loss_by_hand(kind, state, x), has_aux=True)(x)


def value_and_grad_oracle(kind, state, x):
    names = [n for n in ("scale", "net.weight", "net.bias", "net.encoder.weight") if n in state]
    fun = lambda params: loss_by_hand(kind, {**state, **params}, x)
    (value, new), gradients = jax.value_and_grad(fun, has_aux=True)({name: state[name] for name in names})
    return (value, gradients), new


def second_oracle(kind, state, x):
    def inner(x):
        gradient, new = jax.grad(lambda x: loss_by_hand(kind, state, x), has_aux=True)(x)
        return (gradient**2).sum(), new

    return jax.grad(inner, has_aux=True)(x)


def shared_oracle(kind, state, xs):
    if kind.joint:
        return loss_by_hand(kind, state, xs)
    lanes = [loss_by_hand(kind, lane(state, i), x) for i, x in enumerate(xs)]
    return jnp.stack([loss for loss, _ in lanes]), {**mean_of(lanes), "rng": advanced(kind, state)}


def mean_of(lanes):
    """The state after lanes that share it."""
    new = dict(lanes[0][1])
    if "net.mean" in new:  # reduce="mean"
        new["net.mean"] = jnp.stack([state["net.mean"] for _, state in lanes]).mean(0)
    return new


def members_oracle(kind, state, xs):
    members = [{name: value[i] for name, value in state.items() if name != "rng"} for i in range(LANES)]
    members = [{**member, "rng": lane(state, i)["rng"]} for i, member in enumerate(members)]
    losses, states = zip(*[loss_by_hand(kind, s, x) for s, x in zip(members, xs, strict=True)], strict=True)
    new = {name: jnp.stack([s[name] for s in states]) for name in states[0] if name != "rng"}
    return jnp.stack(losses), {**new, "rng": advanced(kind, state)}


def advanced(kind, state):
    return jax.random.split(state["rng"])[0] if kind.by_hand is dropout_by_hand else state["rng"]


def inside(kind, state):
    """The state that a loop or branch begins with: its random stream is a private child."""
    return {**state, "rng": jax.random.split(state["rng"])[1]}


def turns_oracle(kind, state, xs):
    now, total = inside(kind, state), jnp.float32(0)
    for x in xs:
        loss, now = loss_by_hand(kind, now, x)
        total = total + loss
    return total, {**now, "rng": advanced(kind, state)}


def grad_turns_oracle(kind, state, xs):
    return jax.grad(lambda xs: turns_oracle(kind, state, xs), has_aux=True)(xs)


def taken_oracle(kind, state, x):
    loss, new = loss_by_hand(kind, inside(kind, state), x)
    return loss, {**new, "rng": advanced(kind, state)}


def grad_taken_oracle(kind, state, x):
    return jax.grad(lambda x: taken_oracle(kind, state, x), has_aux=True)(x)


def untaken_oracle(kind, state, x):
    return jnp.float32(0), state


def shared_taken_oracle(kind, state, xs):
    if kind.joint:
        return taken_oracle(kind, state, xs)
    lanes = [taken_oracle(kind, lane(state, i), x) for i, x in enumerate(xs)]
    return jnp.stack([loss for loss, _ in lanes]), {**mean_of(lanes), "rng": advanced(kind, state)}


def jvp_oracle(kind, state, x):
    value, tangent, new = jax.jvp(lambda x: loss_by_hand(kind, state, x), (x,), (jnp.ones_like(x),), has_aux=True)
    return (value, tangent), new


def hessian_oracle(kind, state, x):
    return jax.hessian(lambda x: loss_by_hand(kind, state, x), has_aux=True)(x)


def own_rule_oracle(kind, state, x):
    return jnp.full(x.shape, 2.0), loss_by_hand(kind, state, x)[1]


# Transformations of the library: (function, holder of the task, way) -> function of the same arguments.


def value_and_grad_of(fun, holder, way):
    if way == "by_argument":
        return tether.value_and_grad(fun)
    return lambda *args: tether.value_and_grad(fun, wrt=holder[0])(*args)


def second_of(fun, holder, way):
    first = tether.grad(fun, argnums=-1)
    return tether.grad(lambda *args: (first(*args) ** 2).sum(), argnums=-1)


def jit_of(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda fun, holder, way: tether.jit(inner(fun, holder, way))


def of_jit(outer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda fun, holder, way: outer(tether.jit(fun), holder, way)


@dataclass(frozen=True)
class Transform:
    """One column.

    Args:
        apply: ``(function, holder of the task, way)`` -> a function of the same arguments.
        oracle: ``(kind, state, x)`` -> the result and the state.
        compiled: Whether a second call runs no Python of the function.
        lanes: "shared" or "members", where x has lanes.
        turns: Whether x has one row for each turn of a loop.
        few: Whether one more way to come by the model than the argument will do.
        traced: Whether the function is traced before it runs, once more if a read was missed.
        runs: How often its Python runs in one trace or call.
    """

    apply: Callable[..., Callable[..., Any]]
    oracle: Callable[..., tuple[Any, Values]]
    compiled: bool = False
    lanes: str = ""
    turns: bool = False
    few: bool = False
    traced: bool = False
    runs: int = 1


def grad_of(fun, holder, way):
    return tether.grad(fun, argnums=-1)


def checkpoint_of(fun, holder, way):
    return tether.checkpoint(fun)


def shared_of(fun, holder, way):
    return tether.vmap(fun, axis_name="lanes")


def members_of(fun, holder, way):
    return tether.vmap(fun)


TRANSFORMS = {
    "eager": Transform(lambda fun, holder, way: fun, plain_oracle),
    "jit": Transform(jit_of(lambda fun, holder, way: fun), plain_oracle, True),
    "grad": Transform(grad_of, grad_oracle),
    "value_and_grad": Transform(value_and_grad_of, value_and_grad_oracle),
    "grad of grad": Transform(second_of, second_oracle),
    "vmap shared": Transform(shared_of, shared_oracle, lanes="shared"),
    "vmap ensemble": Transform(members_of, members_oracle, lanes="members"),
    "checkpoint": Transform(checkpoint_of, plain_oracle),
    "grad in jit": Transform(jit_of(value_and_grad_of), value_and_grad_oracle, True),
    "vmap in jit": Transform(jit_of(shared_of), shared_oracle, True, "shared"),
    "ensemble in jit": Transform(jit_of(members_of), members_oracle, True, "members"),
    "jit in grad": Transform(of_jit(value_and_grad_of), value_and_grad_oracle, True),
    "jit in vmap": Transform(of_jit(shared_of), shared_oracle, True, "shared"),
    "checkpoint in grad": Transform(lambda f, h, w: grad_of(tether.checkpoint(f), h, w), grad_oracle),
    "grad in checkpoint": Transform(lambda f, h, w: tether.checkpoint(grad_of(f, h, w)), grad_oracle),
    "grad of grad in jit": Transform(jit_of(second_of), second_oracle, True),
}


def turns_of(fun, holder, way):
    return lambda *args: tether.scan(lambda c, x: (c + fun(*args[:-1], x), None), 0.0, args[-1])[0]


def map_of(fun, holder, way):
    return lambda *args: tether.map(lambda x: fun(*args[:-1], x), args[-1]).sum()


def fori_of(fun, holder, way):
    def run(*args):
        xs = jnp.asarray(args[-1])
        return tether.fori_loop(0, len(xs), lambda i, c: c + fun(*args[:-1], xs[i]), 0.0)

    return run


def while_of(fun, holder, way):
    def run(*args):
        xs = jnp.asarray(args[-1])
        turn = lambda c: (c[0] + 1, c[1] + fun(*args[:-1], xs[c[0]]))
        return tether.while_loop(lambda c: c[0] < len(xs), turn, (0, 0.0))[1]

    return run


def cond_of(fun, holder, way):
    branches = lambda args: (lambda x: fun(*args[:-1], x), lambda x: jnp.float32(0))
    return lambda *args: tether.cond(jnp.asarray(len(args)) > 0, *branches(args), args[-1])


def switch_of(fun, holder, way):
    run = lambda args: lambda x: fun(*args[:-1], x)
    zero = lambda x: jnp.float32(0)
    return lambda *args: tether.switch(jnp.int32(0), [zero, run(args), zero], args[-1])


def vjp_of(fun, holder, way):
    return lambda *args: tether.vjp(lambda x: fun(*args[:-1], x), args[-1])[1](jnp.float32(1))[0]


def jvp_of(fun, holder, way):
    return lambda *args: tether.jvp(lambda x: fun(*args[:-1], x), (args[-1],), (jnp.ones(args[-1].shape),))


def linearize_of(fun, holder, way):
    def run(*args):
        value, push = tether.linearize(lambda x: fun(*args[:-1], x), args[-1])
        return value, push(jnp.ones(args[-1].shape))

    return run


def hessian_of(fun, holder, way):
    return lambda *args: tether.hessian(lambda x: fun(*args[:-1], x))(args[-1])


def own_rule_of(fun, holder, way):
    """The gradient by a rule of one's own: twos."""

    def run(*args):
        ruled = tether.custom_vjp(lambda x: fun(*args[:-1], x))
        ruled.defvjp(lambda x: (fun(*args[:-1], x), x.shape), lambda shape, ct: (jnp.full(shape, 2.0) * ct,))
        return tether.grad(ruled)(args[-1])

    return run


def shards_of(fun, holder, way):
    def run(*args):
        mesh = jax.make_mesh((LANES,), ("lanes",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:LANES])
        shard = lambda xs: fun(*args[:-1], xs[0])[None]
        out = jax.sharding.PartitionSpec("lanes")
        return tether.shard_map(shard, mesh=mesh, in_specs=out, out_specs=out)(args[-1])

    return run


def of(outer, inner):
    """One in another."""
    return lambda fun, holder, way: outer(inner(fun, holder, way), holder, way)


def grad_by_x(fun, holder, way):
    return lambda *args: tether.grad(lambda x: fun(*args[:-1], x))(args[-1])


TRANSFORMS |= {
    "scan": Transform(turns_of, turns_oracle, turns=True, few=True, traced=True),
    "map": Transform(map_of, turns_oracle, turns=True, few=True, traced=True),
    "fori_loop": Transform(fori_of, turns_oracle, turns=True, few=True, traced=True),
    "while_loop": Transform(while_of, turns_oracle, turns=True, few=True, traced=True),
    "cond": Transform(cond_of, taken_oracle, few=True, traced=True),
    "switch, untaken": Transform(switch_of, untaken_oracle, few=True, traced=True),
    "vjp": Transform(vjp_of, grad_oracle, few=True),
    "jvp": Transform(jvp_of, jvp_oracle, few=True),
    "linearize": Transform(linearize_of, jvp_oracle, few=True),
    "hessian": Transform(hessian_of, hessian_oracle, few=True),
    "custom_vjp in grad": Transform(own_rule_of, own_rule_oracle, few=True),
    "shard_map": Transform(shards_of, shared_oracle, lanes="shards", few=True, traced=True),
    "scan in jit": Transform(jit_of(turns_of), turns_oracle, True, turns=True, traced=True),
    "scan in grad": Transform(of(grad_by_x, turns_of), grad_turns_oracle, turns=True, traced=True),
    "checkpoint in scan in grad in jit": Transform(
        jit_of(of(grad_by_x, of(turns_of, checkpoint_of))), grad_turns_oracle, True, turns=True, traced=True
    ),
    "jit in scan": Transform(of_jit(turns_of), turns_oracle, True, turns=True, traced=True),
    "cond in vmap in jit": Transform(jit_of(of(shared_of, cond_of)), shared_taken_oracle, True, "shared", traced=True),
    "cond in grad": Transform(of(grad_by_x, cond_of), grad_taken_oracle, traced=True),
    "shard_map in jit": Transform(jit_of(shards_of), shared_oracle, True, "shards", traced=True),
}
