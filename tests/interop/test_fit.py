# SPDX-License-Identifier: Apache-2.0
"""What doesn't fit is found at once and said in one error."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import nn
from tether._modules.module import variables_of
from tether.interop._fit import Fit
from tether.interop._names import links


class Tied(tether.Module):
    def __init__(self):
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = tether.cell(self.embed, "weight")


def fit(model: tether.Module, tensors: dict[str, np.ndarray], select=tether.Variable) -> Fit:
    chosen = {v for v in variables_of(model) if tether.variables(model, select).get(v.label) is v}
    return Fit(links(model), tensors, chosen)


def values(found: Fit) -> dict[str, np.ndarray]:
    return {variable.label: value for variable, value in found.values.items()}


def ones(*shape: int, dtype=np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def test_all_fits():
    found = fit(nn.Linear(2, 3), {"weight": ones(3, 2), "bias": ones(3, dtype=np.float64)})
    assert found.faults(strict=True) == []
    assert {path: (x.shape, x.dtype.name) for path, x in values(found).items()} == {
        "weight": ((3, 2), "float32"),
        "bias": ((3,), "float32"),
    }


def test_one_error_says_everything():
    model = nn.Sequential([nn.Linear(2, 3), nn.BatchNorm(3), nn.Linear(3, 1)])
    tensors = {
        "0.weight": ones(2, 3),
        "0.bias": ones(3, dtype=np.complex64),
        "1.weight": ones(3),
        "1.bias": ones(3),
        "1.running_var": ones(3),
        "1.num_batches_tracked": np.asarray(4),
        "2.weight": ones(1, 3),
        "2.bias": ones(1),
        "3.gamma": ones(7),
    }
    found = fit(model, tensors)
    assert str(found.error(True, "net.safetensors", "interop.torch.load")) == (
        "interop.torch.load: the tensors don't fit the model; nothing was written.\n"
        "  at:       net.safetensors\n"
        "  got:      4 faults, with 9 tensors given\n"
        "    mismatched  0.weight        float32[2, 3], and the model has float32[3, 2], at [0].weight\n"
        "    mismatched  0.bias          complex64[3], and the model has float32[3], at [0].bias\n"
        "    missing     1.running_mean  float32[3], at [1].mean\n"
        "    unexpected  3.gamma         float32[7]\n"
        "  expected: for each cell a tensor of its shape, and no others\n"
        "  fix:      one of\n"
        "    1. a model of the sizes of the tensors; transforms={pattern: np.transpose} for another layout\n"
        "    2. rules={pattern: replacement} for other names, None to leave a tensor out\n"
        "    3. strict=False to load what is there; the result tells of the rest\n"
        "    4. select=... for the cells to load, if others shall keep their values"
    )
    assert [line.split()[:2] for line in found.faults(strict=False)] == [
        ["mismatched", "0.weight"],
        ["mismatched", "0.bias"],
    ]


def test_one_fault():
    found = fit(nn.Linear(2, 3), {"weight": ones(3, 2)})
    assert str(found.error(True, None, "load")).splitlines()[1:3] == [
        "  got:      1 fault, with 1 tensor given",
        "    missing     bias  float32[3]",
    ]


@pytest.mark.parametrize(
    ("tensors", "fix"),
    [
        ({"net.weight": ones(3, 2), "net.bias": ones(3)}, "rules={'^net\\\\.': ''} takes the prefix off"),
        ({"net.weight": ones(3, 2), "net.bias": ones(3), "x": ones(1)}, "rules={'^net\\\\.': ''} takes the prefix off"),
        ({"net.weight": ones(3, 2)}, "rules={pattern: replacement} for other names, None to leave a tensor out"),
        ({"a.weight": ones(3, 2), "b.bias": ones(3)}, "rules={pattern: replacement} for other names, None to leave"),
    ],
)
def test_a_prefix_too_many_is_found(tensors, fix):
    assert fit(nn.Linear(2, 3), tensors).error(True, None, "load").fixes[0].startswith(fix)


def test_a_prefix_too_few_is_found():
    class Net(tether.Module):
        def __init__(self):
            self.body = nn.Linear(2, 3)

    error = fit(Net(), {"weight": ones(3, 2), "bias": ones(3)}).error(True, None, "load")
    assert error.fixes[0] == "rules={'^': 'body.'} puts the prefix on"


class TestTies:
    def test_one_name_is_enough(self):
        for name in ("embed.weight", "head.weight"):
            found = fit(Tied(), {name: ones(5, 3), "head.bias": ones(5)})
            assert found.faults(strict=True) == [] and set(values(found)) == {"embed.weight", "head.bias"}

    def test_equal_under_both_names(self):
        x = np.array([[np.nan] * 3] * 5, np.float32)
        assert fit(Tied(), {"embed.weight": x, "head.weight": x.copy(), "head.bias": ones(5)}).faults(True) == []

    def test_not_equal(self):
        found = fit(Tied(), {"embed.weight": ones(5, 3), "head.weight": 2 * ones(5, 3), "head.bias": ones(5)})
        error = found.error(False, None, "load")
        assert error.got.splitlines()[1:] == [
            "    different   head.weight  not equal to embed.weight, to which it is tied"
        ]
        assert error.fixes == ["a model in which the two are not tied"]

    def test_missing_once(self):
        assert list(fit(Tied(), {"head.bias": ones(5)}).missing) == ["embed.weight"]


class TestKindsOfNumbers:
    @pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float64, np.int32, np.bool_])
    def test_float_of_what_it_can_hold(self, dtype):
        (value,) = values(fit(nn.Linear(2, 3, use_bias=False), {"weight": np.ones((3, 2), dtype)})).values()
        assert value.dtype == np.float32

    def test_integer_that_fits(self):
        class Count(tether.Module):
            def __init__(self):
                self.n = tether.State(0)

        assert values(fit(Count(), {"n": np.asarray(7, np.int64)}))["n"].dtype == np.int32
        for value in (np.asarray(2**31, np.int64), np.asarray(2**32, np.uint64), np.asarray(0.5), np.asarray([7])):
            assert [row.split()[0] for row in fit(Count(), {"n": value}).faults(True)] == ["mismatched"]

    def test_float_that_is_too_large_is_infinite(self):
        (value,) = values(fit(nn.Linear(1, 1, use_bias=False), {"weight": np.full((1, 1), 1e300)})).values()
        assert np.isinf(value).all()


class TestSelection:
    def test_tensors_of_others_are_passed_over(self):
        model = nn.Sequential([nn.Linear(2, 3), nn.Linear(3, 1)])
        tensors = {"0.weight": ones(3, 2), "0.bias": ones(3), "1.weight": ones(1000, 3)}
        found = fit(model, tensors, "[0]")
        assert found.faults(strict=True) == [] and set(values(found)) == {"[0].weight", "[0].bias"}

    def test_what_is_chosen_is_missed(self):
        assert list(fit(nn.Linear(2, 3), {}, "bias").missing) == ["bias"]
