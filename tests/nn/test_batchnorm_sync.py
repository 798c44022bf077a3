# SPDX-License-Identifier: Apache-2.0
"""BatchNorm with its batch split over devices: what the whole batch gives in plain JAX, in float64."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tether
from tests.nn.batchnorm_oracle import STANDARD, close, step_by_hand
from tether import nn
from tether.errors import ArgumentError, ShapeError, VmapWriteError

ROWS = 16
MASKS = {
    "none": None,
    "ragged": np.arange(ROWS * 2).reshape(ROWS, 1, 2) % 7 < np.arange(ROWS)[:, None, None] // 2,
    "first shard alone": (np.arange(ROWS) < 2)[:, None, None],
    "first shard not": (np.arange(ROWS) > 4)[:, None, None],
    "one value": (np.arange(ROWS * 2) == 9).reshape(ROWS, 1, 2),
    "no value": np.zeros((ROWS, 1, 1), bool),
}


def line() -> Mesh:
    return Mesh(np.array(jax.devices()), "d")


def over_devices(norm: tether.Module) -> Callable:
    return tether.jit(tether.shard_map(norm, mesh=line(), in_specs=P("d"), out_specs=P("d")))


def sharded(mesh: Mesh | None = None, **options) -> Callable:
    """``(norm, x, mask or None) -> y``, the batch split over all axes of the mesh."""
    mesh = line() if mesh is None else mesh
    spec = P(mesh.axis_names)

    def call(norm, x, mask):
        masks = () if mask is None else (mask,)
        f = lambda norm, x, *masks: norm(x, mask=masks[0] if masks else None)
        specs = (P(), spec, *[spec] * len(masks))
        return tether.shard_map(f, mesh=mesh, in_specs=specs, out_specs=spec, **options)(norm, x, *masks)

    return call


def largest_difference(call: Callable, norm: nn.BatchNorm, mask: np.ndarray | None, steps: int = 2) -> float:
    """Of outputs, gradients and running statistics from those by hand, relative to the largest value or 1."""
    rng, worst = np.random.default_rng(0), 0.0
    norm.weight, norm.bias = np.float32([1, -2, 3]), np.float32([0.5, 0, -1])
    weight, bias, dtype = np.asarray(norm.weight), np.asarray(norm.bias), norm.mean.dtype
    old = (np.zeros(3), np.ones(3), 0)

    @tether.jit
    def gradients(norm, x, c, mask):
        loss = lambda norm, x: (lambda y: ((c * y).sum(), y))(call(norm, x, mask))
        (d_norm, d_x), y = tether.grad(loss, argnums=(0, 1), has_aux=True)(norm, x)
        return y, d_x, d_norm.weight, d_norm.bias

    def by_hand(x, weight, bias, c, valid, old):
        y, new = step_by_hand(x, weight, bias, valid, old, mode=norm.mode, variance=norm.variance)
        return (c * y).sum(), (y, new)

    for step in range(steps):
        x = (rng.normal(3, 2, (ROWS, 3, 2)) * (step + 1)).astype(dtype)
        c = rng.normal(size=x.shape).astype(dtype)
        ours = [*gradients(norm, x, c, mask), norm.mean, norm.var]
        valid = np.broadcast_to(True if mask is None else mask, x.shape)
        with jax.enable_x64(True):
            wide = [jnp.asarray(a, jnp.float64) for a in (x, weight, bias, c)]
            grads, (y, old) = jax.grad(by_hand, argnums=(0, 1, 2), has_aux=True)(*wide, valid, old)
            right = [np.asarray(a) for a in (y, *grads, *old[:2])]
        gaps = [np.abs(a - b).max() / max(1, np.abs(b).max()) for a, b in zip(ours, right, strict=True)]
        worst = max(worst, *map(float, gaps))
    return worst


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        *[({}, mask) for mask in MASKS],
        *[(options, mask) for options in ({"mode": "ema"}, {"variance": "unbiased"}) for mask in ("none", "ragged")],
    ],
    ids=str,
)
def test_as_if_on_one_device(options: dict, mask: str):
    norm = nn.BatchNorm(3, sync="d", **options)
    assert largest_difference(sharded(), norm, MASKS[mask]) < 1e-6


@pytest.mark.parametrize("options", [{}, {"check_vma": False}], ids=str)
def test_float64_and_unchecked_shards(options: dict):
    with jax.enable_x64(True):
        norm = nn.BatchNorm(3, sync="d", dtype=jnp.float64, variance="unbiased")
        assert largest_difference(sharded(**options), norm, MASKS["ragged"]) < 1e-13


def test_two_axes_of_a_mesh():
    grid = Mesh(np.reshape(jax.devices(), (2, 2)), ("i", "j"))
    norm = nn.BatchNorm(3, sync=["i", "j"])
    assert largest_difference(sharded(grid), norm, MASKS["ragged"]) < 1e-6


def test_lanes_of_one_example_in_the_shards():
    norm = nn.BatchNorm(3, axis_name="lane", sync="d")
    lanes = lambda norm, x, mask: tether.vmap(lambda x, m: norm(x, mask=m), axis_name="lane")(x, mask)
    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P("d")}
    call = tether.shard_map(lanes, mesh=line(), check_vma=False, **specs)
    assert largest_difference(call, norm, MASKS["ragged"]) < 1e-6


def test_channels_split_over_one_axis_and_the_batch_over_another():
    grid = Mesh(np.reshape(jax.devices(), (2, 2)), ("i", "j"))
    x = np.random.default_rng(0).normal(2, 3, (8, 4)).astype(np.float32)
    norm = nn.BatchNorm(4, sync="i")
    states = {tether.Param: P("j"), tether.State: P("j")}
    y = tether.shard_map(norm, mesh=grid, in_specs=P("i", "j"), out_specs=P("i", "j"), states=states)(x)
    close(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5))
    close([norm.mean, norm.var], [0.1 * x.mean(0), 0.9 + 0.1 * x.var(0)])


def test_eight_devices():
    """In a process of its own, since the number of devices is that of a process."""
    program = (
        "import jax; jax.config.update('jax_platforms', 'cpu'); jax.config.update('jax_num_cpu_devices', 8)\n"
        "from tests.nn.test_batchnorm_sync import MASKS, largest_difference, nn, sharded\n"
        "norm = nn.BatchNorm(3, sync='d', variance='unbiased')\n"
        "print(len(jax.devices()), largest_difference(sharded(), norm, MASKS['ragged']) < 1e-6)\n"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=300)
    assert ran.stdout.split() == ["8", "True"], ran.stderr


def test_ten_steps_on_skewed_shards_leave_one_statistic():
    norm, mean, var = nn.BatchNorm(3, sync="d"), np.zeros(3), np.ones(3)
    step = over_devices(norm)
    for seed in range(10):
        x = np.random.default_rng(seed).normal(np.repeat([0, 10, 20, 30], 4)[:, None], 1, (ROWS, 3)).astype(np.float32)
        y = step(x)
        mean, var = 0.9 * mean + 0.1 * x.mean(0), 0.9 * var + 0.1 * x.var(0)
    close(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5))
    close([norm.mean, norm.var], [mean, var])
    assert step.traces == 1
    copies = [np.asarray(shard.data) for shard in norm.mean.addressable_shards]
    assert len(copies) == 4 and all(np.array_equal(copy, copies[0]) for copy in copies)


@pytest.mark.parametrize("rows", [12, 4 * 999])
def test_precision_across_devices(rows: int):
    norm = nn.BatchNorm(1, sync="d", decay=0)
    call = over_devices(norm)
    x = np.tile(np.float32([[4096], [4097], [4098], [4099]]), (rows // 4, 1))
    close(call(x)[:4, 0], STANDARD, 1e-4)
    for value in (1e7, 0.1, 1e30):
        np.testing.assert_array_equal(call(jnp.full((rows, 1), value)), np.zeros((rows, 1)))
        np.testing.assert_array_equal([norm.mean[0], norm.var[0]], np.float32([value, 0]))
    half = (60000 + 32 * np.arange(rows) % 256).astype(np.float16)[:, None]
    wide = half.astype(np.float64)
    close(call(half).astype(np.float32), (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5), 2e-3)
    close([norm.mean[0], norm.var[0]], [wide.mean(), wide.var()])
    small = (1e4 + 0.01 * np.random.default_rng(0).normal(size=(rows, 1))).astype(np.float32)
    wide = small.astype(np.float64)
    close(call(small), (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5), 2e-6)
    np.testing.assert_allclose(norm.var, [wide.var()], rtol=2e-6)


def test_a_value_that_is_not_finite_in_one_shard_enters_no_statistic():
    norm = nn.BatchNorm(2, sync="d")
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    mean = 0.1 * x.mean(0)
    x[5, 0] = np.nan
    over_devices(norm)(x)
    close(norm.mean, [0, mean[1]])
    close(norm.var, [1, 0.9 + 0.1 * x[:, 1].var()])


def test_second_derivative_across_devices():
    rng = np.random.default_rng(0)
    x, c, v = (rng.normal(size=(8, 2)).astype(np.float32) for _ in range(3))
    norm = nn.BatchNorm(2, sync="d")
    call = over_devices(norm)

    def twice(f, grad, x, c, v):
        return grad(lambda x: (v * grad(lambda x: (c * f(x) ** 3).sum())(x)).sum())(x)

    ours = tether.jit(functools.partial(twice, call, tether.grad))(*map(jnp.asarray, (x, c, v)))
    with jax.enable_x64(True):
        hand = lambda x: step_by_hand(x, jnp.ones(2), jnp.zeros(2), np.ones(x.shape, bool))[0]
        close(ours, twice(hand, jax.grad, *(jnp.asarray(a, jnp.float64) for a in (x, c, v))), 1e-4)


def test_one_value_in_each_shard_and_the_global_count():
    x = np.float32([[1], [3], [5], [8]])
    norm = nn.BatchNorm(1, sync="d", decay=0, variance="unbiased")
    call = over_devices(norm)
    close(call(x), (x - 4.25) / np.sqrt(x.var() + 1e-5))
    close(norm.var, [x.var(ddof=1)])
    single = Mesh(np.array(jax.devices()[:1]), "d")
    with pytest.raises(ShapeError, match="this batch has 1"):
        tether.shard_map(nn.BatchNorm(1, sync="d"), mesh=single, in_specs=P("d"), out_specs=P("d"))(x[:1])


def test_a_view_brings_a_whole_model_in_step():
    model = nn.Sequential([nn.BatchNorm(3), nn.Identity(), nn.BatchNorm(3)])
    x = np.random.default_rng(0).normal(2, 3, (8, 3)).astype(np.float32)
    with pytest.raises(VmapWriteError, match="differs from shard to shard"):
        over_devices(model)(x)
    over_devices(tether.view(model, nn.BatchNorm, sync="d"))(x)
    close(model[0].mean, 0.1 * x.mean(0))
    close(model[2].var, 0.9 + 0.1 * ((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)).var(0))


def test_under_jit_alone_the_batch_of_many_devices_is_one():
    norm = nn.BatchNorm(3)
    x = np.random.default_rng(0).normal(2, 3, (8, 3)).astype(np.float32)
    y = tether.jit(norm)(jax.device_put(x, NamedSharding(line(), P("d"))))
    assert y.sharding.spec == P("d")
    close(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5))
    close(norm.mean, 0.1 * x.mean(0))


def test_shard_map_of_jax_on_a_pure_function_and_on_an_argument():
    norm = nn.BatchNorm(3, sync="d")
    x = np.random.default_rng(0).normal(2, 3, (8, 3)).astype(np.float32)
    f = tether.pure(norm)
    specs = {"mesh": line(), "in_specs": (P(), P("d")), "out_specs": (P("d"), P())}
    y, values = jax.jit(jax.shard_map(f, **specs))(f.values(), x)
    close(y, (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5))
    close(values["mean"], 0.1 * x.mean(0))
    y, copy = jax.jit(jax.shard_map(lambda norm, x: (norm(x), norm), **specs))(norm, x)
    close(copy.mean, 0.1 * x.mean(0))
    y = jax.shard_map(norm.eval(), mesh=line(), in_specs=P("d"), out_specs=P("d"))(x)
    close(y, x / np.sqrt(1 + 1e-5))


def test_vmap_binds_it_as_well():
    x = np.random.default_rng(0).normal(2, 3, (4, 5, 3)).astype(np.float32)
    norm = nn.BatchNorm(3, sync="shard")  # channels on axis 1: each lane holds a batch
    flat = x.reshape(-1, 3)
    y = tether.vmap(norm, axis_name="shard")(x)
    close(y.reshape(-1, 3), (flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5))


@pytest.mark.parametrize("wrap", [lambda f: f, tether.jit], ids=["eager", "jit"])
def test_training_outside_of_the_mesh(wrap):
    norm = nn.BatchNorm(3, axis_name="batch", sync=("i", "j"))
    with pytest.raises(ArgumentError) as error:
        wrap(norm)(jnp.ones(3))
    assert error.value.what == "BatchNorm: training outside of the mapped axis 'batch'."
    assert error.value.got == ("axis_name='batch', sync=('i', 'j'), and no axis 'batch' or 'i' or 'j' around this call")
    assert error.value.fixes[0] == (
        "tether.shard_map(tether.vmap(model, axis_name='batch'), mesh=mesh, in_specs=PartitionSpec(('i', 'j')), "
        "out_specs=PartitionSpec(('i', 'j')))(x)"
    )
    with pytest.raises(ArgumentError, match="outside of the mapped axis 'e'") as error:
        call = tether.shard_map(nn.BatchNorm(3, sync="e"), mesh=line(), in_specs=P("d"), out_specs=P("d"))
        wrap(call)(jnp.ones((8, 3)))
    assert error.value.fixes[-1] == "BatchNorm(3) without sync, for input that holds the whole batch"
    np.testing.assert_array_equal(norm.mean, np.zeros(3))
    assert wrap(norm.eval())(jnp.ones(3)).shape == (3,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": True}, "sync is not a name or a tuple of names"),
        ({"sync": ()}, "sync is not a name or a tuple of names"),
        ({"sync": ""}, "sync is not a name or a tuple of names"),
        ({"sync": ("d", "d")}, "an axis is named twice"),
        ({"sync": "d", "axis_name": ("b", "d")}, "an axis is named twice"),
    ],
    ids=str,
)
def test_bad_names(options: dict, message: str):
    with pytest.raises(ArgumentError, match=message) as error:
        nn.BatchNorm(3, **options)
    assert error.value.expected
    assert error.value.fixes
