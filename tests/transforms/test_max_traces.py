# SPDX-License-Identifier: Apache-2.0
"""assert_max_traces counts what jax.jit and tether.jit trace, and says what made the last one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import tether
from tether import nn
from tether.debug import assert_max_traces, get_num_traces
from tether.errors import ArgumentError, CheckError

X = jnp.ones(3)


def double(x, scale=2.0):
    return scale * x


@pytest.mark.parametrize("jit", [jax.jit, tether.jit])
class TestCount:
    def test_traces_are_counted(self, jit):
        f = jit(assert_max_traces(double, max_traces=None))
        for count, x in enumerate((X, jnp.ones(4), jnp.ones((1, 3))), 1):
            assert f(x).tolist() == f(x).tolist() == (2 * x).tolist()
            assert get_num_traces(f) == count

    def test_one_too_many(self, jit):
        f = jit(assert_max_traces(max_traces=2)(double))
        f(X), f(jnp.ones(4)), f(X)
        with pytest.raises(CheckError, match=r"traced 3 times\.\n  got:      x: float32\[4\] -> float32\[5\]\n"):
            f(jnp.ones(5))
        assert f(X).tolist() == [2, 2, 2]

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (((X, X),), r"x: float32\[3\] -> absent; x\[0\], x\[1\]: absent -> float32\[3\]"),
            ((X.astype(int),), r"x: float32\[3\] -> int32\[3\]"),
            ((X, 3.0), "scale: absent -> "),
        ],
    )
    def test_argument_is_named(self, jit, args, said):
        f = jit(assert_max_traces(lambda x, scale=None: x, max_traces=1))
        f(X)
        with pytest.raises(CheckError, match=said):
            f(*args)


def test_two_functions_are_counted_apart():
    f, g = (assert_max_traces(double, max_traces=1) for _ in range(2))
    f(X), g(X)
    assert get_num_traces(f) == get_num_traces(g) == 1


class TestModules:
    def test_module_is_counted_and_its_state_written(self):
        norm = nn.BatchNorm(3)
        f = tether.jit(assert_max_traces(norm, max_traces=1))
        for _ in range(3):
            f(jnp.ones((4, 3)))
        assert get_num_traces(f) == f.traces == 1 and f.writes
        with pytest.raises(CheckError, match=r"BatchNorm is traced 2 times\.\n  got:      x: float32\[4, 3\] -> "):
            f(jnp.ones((5, 3)))

    def test_settings_are_named(self):
        f = tether.jit(assert_max_traces(lambda net, x: net(x), max_traces=1))
        f(nn.Dropout(0.1), X)
        with pytest.raises(CheckError, match=r"got:      net.p: 0\.1 -> 0\.2"):
            f(nn.Dropout(0.2), X)

    def test_method(self):
        class Net(tether.Module):
            @tether.jit
            @assert_max_traces(max_traces=1)
            def __call__(self, x):
                return x

        net = Net()
        net(X), net(X)
        assert get_num_traces(net) == get_num_traces(net.__call__) == 1
        with pytest.raises(CheckError, match=r"__call__ is traced 2 times"):
            net(jnp.ones(4))


def test_number_of_what_is_jitted_alone():
    f = tether.jit(double)
    f(X), f(jnp.ones(4))
    assert get_num_traces(f) == get_num_traces(functools.partial(f, scale=1.0)) == f.traces == 2


def test_name_and_signature_are_those_of_the_function():
    f = assert_max_traces(double, max_traces=1)
    assert f.__name__ == "double" and f.__wrapped__ is double
    assert assert_max_traces(nn.Linear(2, 2), max_traces=1).__name__ == "Linear"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: assert_max_traces(tether.jit(double), max_traces=1), r"compiled already(?s:.*)tether.jit\(double\)"),
        (lambda: assert_max_traces(3, max_traces=1), "is no function"),
        (lambda: get_num_traces(double), "nobody counts(?s:.*)the function double"),
        (lambda: get_num_traces(3), "got:      3"),
    ],
)
def test_wrong_arguments(call, text):
    with pytest.raises(ArgumentError, match=text):
        call()
