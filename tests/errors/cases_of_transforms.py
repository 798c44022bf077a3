# SPDX-License-Identifier: Apache-2.0
"""Programs with a fault in them, as in cases.py: derivatives, loops, branches, shards, rules, and looks inside."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import tether
from tests.errors.cases import Held, X
from tether import nn

P = jax.sharding.PartitionSpec
ROWS = jnp.ones((8, 3))
X1 = jnp.ones(2)


def two() -> Any:
    return tether.stack([nn.LayerNorm(3), nn.LayerNorm(3)])


def tangent(value: Any) -> Callable[[Any], Any]:
    """A jvp of a model with this as its tangent."""
    return lambda net: tether.jvp(lambda m: m.linear(X), (net,), (value,))


def sharded(f: Any = lambda x: x, x: Any = ROWS, **options: Any) -> Any:
    mesh = jax.sharding.Mesh(jax.devices(), ("d",))
    return tether.shard_map(f, **{"mesh": mesh, "in_specs": P("d"), "out_specs": P("d"), **options})(x)


CHECKPOINTED = {"kind": "checkpointed", "checkpoints": 2}


def counted(**options: Any) -> Any:
    return tether.while_loop(lambda n: n < 3, lambda n: n + 1, 0, **options)


def sines(**options: Any) -> Callable[[Any], Any]:
    return lambda x: tether.while_loop(lambda x: x > 0.5, jnp.sin, x, **options)


def placed_elsewhere() -> Any:
    layer = nn.Linear(3, 4)
    tether.place(layer, jax.devices()[0])
    return sharded(layer)


def total_of_shards() -> Any:
    total: Any = tether.State(0.0)
    return sharded(lambda x: setattr(total, "value", total.value + x.sum()) or x)


def block_of_shards() -> Any:
    last = Held(tether.State(jnp.zeros((2, 3))))
    return sharded(lambda x: setattr(last, "part", x) or x)


def always_another() -> Any:
    made = [Held(tether.State(float(n))) for n in range(100)]
    hidden = types.MappingProxyType({"left": made})
    return tether.jit(lambda x: x + hidden["left"].pop().part)(1.0)


def written_where_carried_as_a_value() -> Any:
    norm = nn.BatchNorm(3)
    body = lambda c, x: (jax.tree.map(lambda v: v + 1, c), c(x))
    return tether.scan(body, norm, jnp.ones((2, 4, 3)))


def with_rules(fun: Any, fwd: Any = lambda x: (x, None), bwd: Any = lambda _, g: (g,)) -> Any:
    f = tether.custom_vjp(fun)
    f.defvjp(fwd, bwd)
    return f


def with_vjp(fun: Any, fwd: Any, bwd: Any, *args: Any, wrt: Any = None) -> Any:
    """The gradient of a function with this rule, compiled."""
    f = with_rules(fun, fwd, bwd)
    return tether.jit(tether.grad(lambda *args: jnp.sum(f(*args)), wrt=wrt))(*args)


def with_bwd(bwd: Any, x: Any = 1.0, fun: Any = lambda x: jnp.sin(jax.tree.leaves(x)[0])) -> Any:
    return with_vjp(fun, lambda x: (fun(x), None), lambda _, g: bwd(g), x)


def with_jvp(rule: Any) -> Any:
    f = tether.custom_jvp(jnp.sin)
    f.defjvp(rule)
    return tether.jit(tether.grad(f))(1.0)


def rule_for_each_argument(*rules: Any, nondiff_argnums: Any = ()) -> Any:
    f = tether.custom_jvp(lambda x, y: x * y, nondiff_argnums=nondiff_argnums)
    f.defjvps(*rules)
    return tether.grad(f)(1.0, 2.0)


def hidden_in_bwd(net: Any) -> Any:
    hidden = types.MappingProxyType({"net": net})
    return with_bwd(lambda g: (g * hidden["net"].linear.bias.sum(),))


def noise() -> Any:
    return jax.random.normal(tether.random.draw())


def write(net: Any) -> None:
    net.flag = True


def times_bias(net: Any) -> Callable[[Any], Any]:
    return lambda x: (net.linear.bias * x).sum()


class Checked(tether.Module):
    def __init__(self):
        self.calls = tether.State(0)

    def __call__(self, x: Any) -> Any:
        self.calls = self.calls + 1
        return tether.error_if(x, x < 0, "the rate is negative.")


def donated_and_failed() -> Any:
    step = tether.jit(Checked(), donate_state=True)
    step(X1), step(X1)
    step(-X1)


def kind_of_number(x: Any) -> Any:
    return tether.branched_error_if(x, x != 0, jnp.where(x < 0, 0, 1), ["x is negative.", "x is positive."])


def traced_twice() -> Any:
    f = tether.jit(tether.debug.assert_max_traces(lambda net, x: net(x), max_traces=1))
    f(nn.Dropout(0.1), X1)
    f(nn.Dropout(0.2), X)


def look(net: Any, select: Any, **options: Any) -> Any:
    return tether.capture(lambda x: net.linear(x), select, **options)(X)


def look_in_a_loop(net: Any) -> Any:
    turn = lambda i, x: net.by_name["a"](x)
    return tether.capture(lambda x: tether.fori_loop(0, 2, turn, x), nn.Linear)(X)


def look_in_a_rule(net: Any) -> Any:
    f = with_rules(lambda x: tether.tap("inside", x))
    return tether.jit(tether.grad(lambda x: tether.capture(f, "inside")(x)[0]))(1.0)


CASES: dict[str, Callable[[Any], Any]] = {
    "result that is a module": lambda net: tether.vjp(lambda x: net, X1),
    "result that is no array": lambda net: tether.jvp(lambda x: {"a": "text"}, (X1,), (X1,)),
    "Jacobian of an int result": lambda net: tether.jacfwd(lambda x: (x, 3))(X1),
    "Jacobian of a complex input": lambda net: tether.jacfwd(lambda z: z)(2j),
    "holomorphic of a float": lambda net: tether.jacrev(lambda z: z, holomorphic=True)(2.0),
    "Jacobian of nothing": lambda net: tether.jacrev(lambda x: None)(X1),
    "jvp without tuples": lambda net: tether.jvp(lambda x: x, X1, X1),
    "number of tangents": lambda net: tether.jvp(lambda x: x, (X1,), ()),
    "tangent of another structure": lambda net: tether.jvp(lambda t: t["a"], ({"a": X1, "b": X1},), ({"a": X1},)),
    "tangent module of another structure": tangent(nn.Linear(2, 3)),
    "tangent of no known form": tangent(3.0),
    "tangent at no path": tangent({"linear.bais": jnp.ones(3)}),
    "tangent of another shape": tangent({"linear.bias": jnp.ones(2)}),
    "tangent of another dtype": tangent({"linear.bias": jnp.ones(3, jnp.bfloat16)}),
    "tangent that is no array": tangent({"linear.bias": "text"}),
    "tangent of a State": tangent({"count": 1}),
    "tangent of an integer": lambda net: tether.jvp(lambda n: n, (3,), (1,)),
    "two tangents for one cell": lambda net: tether.jvp(
        lambda a, b: a.linear(X), (net, net), ({"linear.bias": jnp.ones(3)}, {"linear.bias": jnp.zeros(3)})
    ),
    "cotangent of another structure": lambda net: tether.vjp(lambda x: (x, x), X1)[1](X1),
    "while_loop of no function": lambda net: tether.while_loop(3, lambda n: n, 0),  # type: ignore[arg-type]
    "scan: no pair": lambda net: tether.scan(lambda c, x: c, 0.0, X1),
    "scan: nothing to carry": lambda net: tether.scan(lambda c, x: (c, None), ["a"], X1),
    "scan: carry of another structure": lambda net: tether.scan(lambda c, x: ((c, c), x), 0.0, X1),
    "scan: carry of another shape": lambda net: tether.scan(
        lambda c, x: ({"h": c["h"] + x}, None), {"h": jnp.zeros(())}, jnp.ones((2, 3))
    ),
    "scan: carry of another dtype": lambda net: tether.scan(
        lambda c, x: (c.astype(jnp.float32), None), jnp.int32(0), X1
    ),
    "scan: carry of another kind": lambda net: tether.scan(lambda c, x: ("a", None), 0.0, X1),
    "scan: carry of another module": lambda net: tether.scan(lambda c, x: (nn.Linear(2, 3), None), net, length=2),
    "scan: carry in another mode": lambda net: tether.scan(lambda c, x: (c.eval(), None), net, length=2),
    "scan: carry with another cell": lambda net: tether.scan(
        lambda c, x: (Held(tether.Param(jnp.ones(3))), None), Held(tether.Param(X1)), length=2
    ),
    "scan: a value and an object": lambda net: tether.scan(
        lambda mean, x: (tether.lerp(mean, net, 0.5), None), net, length=2
    ),
    "scan: a value that is written": lambda net: written_where_carried_as_a_value(),
    "scan: a value at two places": lambda net: tether.scan(
        lambda c, x: ((tether.clone(c[0]), c[1]), None), (net, net), length=2
    ),
    "scan: unstacked": lambda net: tether.scan(lambda c, layer: (layer(c), None), X1, net),
    "scan: no axis": lambda net: tether.scan(lambda c, x: (c, None), 0.0, [X1, 3.0]),
    "scan: different lengths": lambda net: tether.scan(lambda c, x: (c, None), 0.0, (two(), jnp.ones(3))),
    "scan: no length": lambda net: tether.scan(lambda c, x: (c, None), 0.0),
    "scan: computed length": lambda net: tether.jit(lambda n: tether.scan(lambda c, x: (c, None), 0.0, length=n))(3),
    "map: batch_size 0": lambda net: tether.map(jnp.sin, X1, batch_size=0),
    "map: batches of modules": lambda net: tether.map(lambda layer: layer.scale, two(), batch_size=2),
    "fori_loop: bound of no integer": lambda net: tether.fori_loop(0.0, 3, lambda i, c: c, 0),
    "fori_loop: two dtypes": lambda net: tether.fori_loop(jnp.int32(0), jnp.int8(3), lambda i, c: c, 0),
    "while_loop: no truth value": lambda net: tether.while_loop(lambda n: 3 - n, lambda n: n + 1, 0),
    "cond: no scalar": lambda net: tether.cond(X1 > 0, jnp.sin, jnp.cos, 1.0),
    "cond: different structures": lambda net: tether.cond(True, lambda x: (x, x), lambda x: [x, x], 1.0),
    "cond: different dtypes": lambda net: tether.cond(True, lambda: (X1, 1.0), lambda: (X1, 1)),
    "cond: different modules": lambda net: tether.cond(True, lambda: net.linear, lambda: net.by_name["a"]),
    "switch: no index": lambda net: tether.switch(1.5, [jnp.sin, jnp.cos], 1.0),
    "switch: no branches": lambda net: tether.switch(0, [], 1.0),
    "endless missed reads": lambda net: always_another(),
    "shard_map: no mesh": lambda net: sharded(mesh=None),
    "shard_map: axis_names of no axis": lambda net: sharded(axis_names={"q"}),
    "shard_map: spec of no axis": lambda net: sharded(in_specs=P("q")),
    "shard_map: no PartitionSpec": lambda net: sharded(nn.Linear(3, 4), states={"weight": "d"}),
    "shard_map: in_specs of another structure": lambda net: sharded(x={"b": ROWS}, in_specs=({"a": P("d")},)),
    "shard_map: too many in_specs": lambda net: sharded(in_specs=(P("d"), P())),
    "shard_map: no in_specs": lambda net: tether.shard_map(
        lambda x: x, mesh=jax.sharding.Mesh(jax.devices(), ("d",)), out_specs=P("d")
    )(ROWS),
    "shard_map: spec of a module": lambda net: sharded(lambda net: ROWS, nn.Linear(3, 4), in_specs=("d",)),
    "shard_map: result that differs": lambda net: sharded(lambda x: x.sum(), out_specs=P()),
    "shard_map: no such rule": lambda net: sharded(writes={"total": "average"}),
    "shard_map: other devices": lambda net: placed_elsewhere(),
    "shard_map: indivisible": lambda net: sharded(x=ROWS[:6]),
    "shard_map: spec with too many entries": lambda net: sharded(in_specs=P("d", None, None)),
    "shard_map: result with too few axes": lambda net: sharded(lambda x: x.sum()),
    "shard_map: states of no path": lambda net: sharded(nn.Linear(3, 4), states={"wieght": P()}),
    "shard_map: writes of nothing": lambda net: sharded(writes={"total": "mean"}),
    "shard_map: write that differs": lambda net: total_of_shards(),
    "shard_map: block that differs": lambda net: block_of_shards(),
    "explain of no compiled function": lambda net: tether.explain(jax.jit(lambda x: x)),
    "custom_vjp: no rule": lambda net: tether.custom_vjp(jnp.sin)(1.0),
    "custom_vjp: argument by name alone": lambda net: with_rules(lambda *, x: x)(x=1.0),
    "custom_vjp: wrong arguments": lambda net: with_rules(lambda x: x)(1.0, 2.0),
    "custom_vjp: fwd without a pair": lambda net: with_vjp(jnp.sin, jnp.sin, lambda _, g: (g,), 1.0),
    "custom_vjp: bwd without a tuple": lambda net: with_bwd(lambda g: g),
    "custom_vjp: cotangent of another structure": lambda net: with_bwd(lambda g: ({"a": g},), {"a": 1.0, "b": 2.0}),
    "custom_vjp: cotangent of another shape": lambda net: with_bwd(lambda g: (g[None],)),
    "custom_vjp: cotangent of another kind": lambda net: with_bwd(lambda g: (g * 1j,)),
    "custom_vjp: cotangent of no module": lambda net: with_bwd(lambda g: (g,), net.linear),
    "custom_vjp: cotangent at no path": lambda net: with_bwd(lambda g: ({"bais": g},), net.linear),
    "custom_vjp: bwd that writes": lambda net: with_bwd(lambda g: (g, write(net))[:1]),
    "custom_vjp: bwd that draws": lambda net: with_bwd(lambda g: (g * noise(),), fun=lambda x: x * noise()),
    "custom_vjp: bwd that draws alone": lambda net: with_bwd(lambda g: (g * noise(),)),
    "custom_vjp: hidden in bwd": hidden_in_bwd,
    "custom_vjp: closed over": lambda net: with_vjp(
        times_bias(net), lambda x: (times_bias(net)(x), x), lambda x, g: (g,), 1.0, wrt=net
    ),
    "custom_vjp: fwd of another structure": lambda net: with_vjp(
        jnp.sin, lambda x: ((x, x), None), lambda _, g: (g,), 1.0
    ),
    "custom_vjp: fwd of another shape": lambda net: with_vjp(
        jnp.sin, lambda x: (x[None], None), lambda _, g: (g,), 1.0
    ),
    "custom_vjp: fwd that writes more": lambda net: with_vjp(
        jnp.sin, lambda x: (jnp.sin(x), write(net)), lambda _, g: (g,), 1.0
    ),
    "custom_jvp: no rule": lambda net: tether.custom_jvp(jnp.sin)(1.0),
    "custom_jvp: rule without a pair": lambda net: with_jvp(lambda primals, tangents: 1.0),
    "custom_jvp: tangents as a tuple": lambda net: with_jvp(lambda primals, tangents: (primals[0], tangents)),
    "custom_jvp: rules for nondiff_argnums": lambda net: rule_for_each_argument(None, nondiff_argnums=1),
    "custom_jvp: too few rules": lambda net: rule_for_each_argument(lambda dx, out, x, y: dx),
    "capture of no function": lambda net: tether.capture(3, "linear"),  # type: ignore[arg-type]
    "capture of nothing called": lambda net: look(net, "liner"),
    "capture of no selection": lambda net: look(net, 3),
    "capture of Variables": lambda net: look(net, tether.Param),
    "capture: added of another structure": lambda net: look(net, "linear", add={"linear": (X1, X1)}),
    "capture: added of another shape": lambda net: look(net, "linear", add={"linear": X1}),
    "capture: added to nothing": lambda net: look(net, "linear", add={"liner": X1}),
    "capture in fori_loop": look_in_a_loop,
    "capture in a rule": look_in_a_rule,
    "intercept of no function": lambda net: tether.intercept(net, "linear", 3),  # type: ignore[arg-type]
    "while_loop: no such kind": lambda net: counted(kind="scan"),
    "while_loop: bounded by nothing": lambda net: counted(kind="bounded"),
    "while_loop: checkpoints of nothing": lambda net: counted(kind="checkpointed"),
    "while_loop: max_steps below 0": lambda net: counted(max_steps=-1),
    "while_loop: in reverse mode": lambda net: tether.grad(sines())(0.9),
    "while_loop: checkpointed in forward mode": lambda net: tether.jacfwd(sines(**CHECKPOINTED))(0.9),
    "while_loop: checkpointed in reverse mode twice": lambda net: tether.grad(tether.grad(sines(**CHECKPOINTED)))(0.9),
    "scan: no such kind": lambda net: tether.scan(lambda c, x: (c, x), 0.0, length=2, kind="bounded"),
    "scan: checkpoints 0": lambda net: tether.scan(
        lambda c, x: (c, x), 0.0, length=2, kind="checkpointed", checkpoints=0
    ),
    "scan: checkpointed in forward mode": lambda net: tether.jacfwd(
        lambda x: tether.scan(lambda c, _: (jnp.sin(c), None), x, length=2, kind="checkpointed")[0]
    )(0.9),
    "check that fails": lambda net: tether.jit(lambda x: (net(x), tether.error_if(x, x > 0, "x is positive."))[1])(X),
    "check that fails in a module": lambda net: Held([nn.Lambda(jnp.sin), Checked()]).part[1](-X1),
    "check that fails in lanes": lambda net: tether.jit(jax.vmap(Checked()))(jnp.arange(-12.0, 3.0)),
    "check that fails in lanes, two ways": lambda net: tether.jit(tether.vmap(kind_of_number))(jnp.arange(-2.0, 3.0)),
    "check that fails in a donated call": lambda net: donated_and_failed(),
    "check without its message": lambda net: tether.branched_error_if(X, True, 2, ["one.", "two."]),
    "check of no bools": lambda net: tether.error_if(X, X, "X is wrong."),
    "check of no array": lambda net: jax.jit(lambda x: tether.error_if(net, x > 0, "x is positive."))(1.0),
    "check with no such index": lambda net: tether.branched_error_if(X, True, 0.5, ["one.", "two."]),
    "check with no such way on": lambda net: tether.error_if(X, True, "X is wrong.", on_error="warn"),
    "NaN on the way back": lambda net: tether.grad(lambda x: 0 * jnp.sqrt(tether.debug.backward_nan(x, "x")))(0.0),
    "traced twice": lambda net: traced_twice(),
    "traces of what is compiled": lambda net: tether.debug.assert_max_traces(tether.jit(jnp.sin), max_traces=1),
    "traces that nobody counts": lambda net: tether.debug.get_num_traces(jnp.sin),
    "pure of no values": lambda net: tether.pure(net.linear)(3, X),
    "draw from a key": lambda net: tether.random.draw(net.rng),
}
