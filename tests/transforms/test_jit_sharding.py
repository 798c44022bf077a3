# SPDX-License-Identifier: Apache-2.0
"""jit on a mesh: each written Variable keeps its sharding, call after call, and a step compiles once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import tether

ROWS = np.arange(16, dtype=np.float32).reshape(4, 4)


class Net(tether.Module):
    """total += x, weight += row sums: XLA would shard ``total`` as x is."""

    def __init__(self):
        self.weight = tether.Param(jnp.zeros((4, 2)))
        self.total = tether.State(jnp.zeros((4, 4)))
        self.calls = tether.State(0)

    def __call__(self, x):
        self.total = self.total + x
        self.weight = self.weight + jnp.repeat(x.sum(1, keepdims=True), 2, 1)
        self.calls = self.calls + 1
        return self.weight.sum()


def on_mesh(*axes, kind=AxisType.Auto):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    return NamedSharding(mesh, PartitionSpec(*axes))


def placed(total=(), weight=("d",), **options):
    model = Net()
    tether.place(model, on_mesh(**options))
    tether.place(model, on_mesh(*total, **options), "total")
    tether.place(model, on_mesh(*weight, **options), "weight")
    return model


def check(model, calls, **shardings):
    np.testing.assert_array_equal(model.total, calls * ROWS)
    np.testing.assert_array_equal(model.weight, calls * np.repeat(ROWS.sum(1, keepdims=True), 2, 1))
    assert int(model.calls) == calls
    for path, variable in tether.variables(model).items():
        expected = on_mesh(*shardings.get(path, ()))
        assert variable.value.sharding.is_equivalent_to(expected, variable.value.ndim), (path, variable.value.sharding)


def test_left_to_itself_xla_chooses_another_sharding():
    total, x = jax.device_put(jnp.zeros((4, 4)), on_mesh()), jax.device_put(ROWS, on_mesh("d"))
    assert not jax.jit(lambda total, x: total + x)(total, x).sharding.is_equivalent_to(total.sharding, 2)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("total", [(), (None, "d")], ids=["replicated", "columns"])
def test_kept_and_compiled_once(compiled, donate, total):
    models, x = [placed(total), placed(total)], jax.device_put(ROWS, on_mesh("d"))
    step = tether.jit(lambda model, x: model(x), donate_state=donate)
    before = len(compiled)
    for calls in range(1, 4):
        for model in models:
            step(model, x)
            check(model, calls, total=total, weight=("d",))
    assert sum("lambda" in name for name in compiled[before:]) == step.traces == 1


@pytest.mark.parametrize("donate", [False, True])
def test_state_that_lies_nowhere_yet_is_replicated(compiled, donate):
    model, x = Net(), jax.device_put(ROWS, on_mesh("d"))
    step = tether.jit(lambda x: model(x), donate_state=donate)
    for calls in range(1, 4):
        step(x)
        check(model, calls)
    assert sum("lambda" in name for name in compiled) == step.traces == 1


def test_explicit_axes():
    x = jax.device_put(ROWS, on_mesh("d", kind=AxisType.Explicit))
    model = placed(total=("d",), kind=AxisType.Explicit)
    step = tether.jit(lambda model, x: (setattr(model, "total", model.total + x), setattr(model, "calls", 1))[0])
    for _ in range(2):
        step(model, x)
        assert str(jax.typeof(model.total)) == "float32[4@d,4]"
        assert str(jax.typeof(model.calls)) == "int32[]"
    assert step.traces == 1


def test_another_placement_is_followed():
    model, x = placed(), jax.device_put(ROWS, on_mesh("d"))
    step = tether.jit(lambda model, x: model(x))
    step(model, x)
    tether.place(model, on_mesh(None, "d"), "total")
    for calls in (2, 3):
        step(model, x)
        check(model, calls, total=(None, "d"), weight=("d",))
    assert step.traces == 1
    tether.place(model, jax.devices()[1])
    step(model, ROWS)
    assert {value.sharding for value in jax.tree.leaves(model)} == {SingleDeviceSharding(jax.devices()[1])}
    tether.place(model, on_mesh())
    step(model, x)
    check(model, 5)


def test_after_a_call_inside_another_transformation():
    model, x = placed(), jax.device_put(ROWS, on_mesh("d"))
    inner = tether.jit(lambda x: model(x), donate_state=True)
    outer = tether.jit(lambda x: inner(x))
    for calls, step in enumerate([outer, inner, outer, inner], 1):
        step(x)
        check(model, calls, weight=("d",))
    assert (inner.traces, outer.traces) == (1, 1)


def test_lowering_shows_what_runs():
    model, x = placed(), jax.device_put(ROWS, on_mesh("d"))
    step = tether.jit(lambda model, x: model(x))
    lowered = step.lower(model, x)
    written = lowered.compile().output_shardings[:3]
    names = {path: variable.value for path, variable in tether.variables(model).items()}
    for path, sharding in zip(step.writes, written, strict=True):
        value = names[path.removeprefix("model.")]
        assert sharding.is_equivalent_to(value.sharding, value.ndim)


class TestInARef:
    """What plain JAX moved into a Ref stays on the Ref's device, and goes to the mesh for each call."""

    @pytest.fixture
    def net(self):
        net = Net()
        jax.jit(lambda x: net(x))(ROWS)
        assert all(isinstance(variable._value, jax.Ref) for variable in tether.variables(net).values())
        return net

    def is_right(self, net, calls):
        np.testing.assert_array_equal(net.total, calls * ROWS)
        np.testing.assert_array_equal(net.weight, calls * np.repeat(ROWS.sum(1, keepdims=True), 2, 1))
        assert all(v.value.sharding.device_set == {jax.devices()[0]} for v in tether.variables(net).values())
        return int(net.calls) == calls

    def test_jit_of_sharded_data(self, net):
        step = tether.jit(lambda x: net(x))
        for calls in (2, 3, 4):
            step(jax.device_put(ROWS, on_mesh("d")))
            assert self.is_right(net, calls)
        assert step.traces == 1

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
    def test_shard_map(self, net, compiled):
        rows = PartitionSpec("d")
        options = {"states": {"total": rows, "weight": rows}, "in_specs": rows, "out_specs": rows}
        step = tether.shard_map(lambda x: net(x)[None], mesh=on_mesh().mesh, **options)
        step = tether.jit(step) if compiled else step
        for calls in (2, 3, 4):
            step(ROWS)
            assert self.is_right(net, calls)

    def test_draws_in_lanes_of_shards_after_one_in_plain_jit(self):
        """Nothing that jit is given lies on the mesh: it learns of it from the shard_map inside."""
        jax.jit(lambda: tether.random.draw())()
        tether.seed(0)
        rows = PartitionSpec("d")
        f = lambda x: x + jax.random.uniform(tether.random.draw(), x.shape)
        split = tether.shard_map(f, mesh=on_mesh().mesh, in_specs=rows, out_specs=rows)
        step = tether.jit(tether.vmap(split))
        drawn = [np.asarray(step(jnp.zeros((3, 4)))) for _ in range(2)]
        assert len(np.unique(drawn)) == 24 and step.traces == 1

    def test_dropout_after_a_draw_in_plain_jit(self):
        jax.jit(lambda: tether.random.draw())()
        rows, drop = PartitionSpec("d"), tether.nn.Dropout(0.5)
        split = tether.shard_map(lambda x: drop(x, training=True), mesh=on_mesh().mesh, in_specs=rows, out_specs=rows)
        kept = [np.asarray(split(jnp.ones((4, 64)))) for _ in range(2)]
        assert set(np.unique(kept)) == {0, 2} and not np.array_equal(*kept)
        assert len({tuple(row) for row in kept[0]}) == 4
