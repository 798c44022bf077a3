# SPDX-License-Identifier: Apache-2.0
"""Sequential: who gets which arguments, and what errors say."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax._errors import MisuseError


def test_a_tuple_is_several_arguments_and_a_list_is_one():
    net = objax.nn.Sequential([lambda x: (x, x + 1), lambda a, b: [a, b], lambda pair: sum(pair)])
    assert net(2) == 5
    assert objax.nn.Sequential([lambda a, b: (a * b, a)])(3, 4) == (12, 3)


def test_without_layers_the_arguments_come_back():
    assert objax.nn.Sequential()(3) == 3
    assert objax.nn.Sequential()(3, 4) == (3, 4)


def test_each_layer_gets_the_keywords_that_it_names():
    def scaled(x, scale=1):
        return x * scale

    def recorded(x, **kwargs):
        return x + len(kwargs)

    net = objax.nn.Sequential([scaled, objax.nn.Dropout(0.5), jnp.negative, recorded, objax.functional.relu])
    assert net(jnp.array([-3.0, 1.0]), training=False, scale=2).tolist() == [8.0, 0.0]


@pytest.mark.parametrize("pad", [jnp.pad, objax.functional.pad])
def test_pad_is_spared_the_keywords_of_others(pad):
    padded = functools.partial(functools.partial(pad, pad_width=((0, 0), (1, 2))), mode="edge")
    net = objax.nn.Sequential([padded, objax.nn.BatchNorm0D(5)])
    y = net(jnp.ones((2, 2)), training=False)
    np.testing.assert_allclose(y, np.ones((2, 5)), rtol=1e-5)
    whole = objax.nn.Sequential([pad])
    assert whole(jnp.ones(1), 1, constant_values=7, training=True).tolist() == [7.0, 1.0, 7.0]


def test_jax_numpy_is_left_as_it_is():
    assert inspect.signature(jnp.pad).parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD


def test_slices_are_sequential_and_share_their_layers():
    net = objax.nn.Sequential([objax.nn.Linear(2, 3), objax.functional.relu, objax.nn.Linear(3, 1)])
    x = jnp.ones((4, 2))
    assert type(net[1:]) is objax.nn.Sequential and net[0] is net[:1][0]
    np.testing.assert_array_equal(net[1:](net[:1](x)), net(x))
    net.insert(1, objax.nn.GroupNorm0D(3))
    assert list(net.vars().keys()) == [
        "(Sequential)[0](Linear).b",
        "(Sequential)[0](Linear).w",
        "(Sequential)[1](GroupNorm0D).gamma",
        "(Sequential)[1](GroupNorm0D).beta",
        "(Sequential)[3](Linear).b",
        "(Sequential)[3](Linear).w",
    ]


def test_a_function_without_arguments_fails_as_any_other():
    with pytest.raises(TypeError, match=r"Sequential layer\[0\] <function .* takes 0 positional arguments"):
        objax.nn.Sequential([lambda: 1])(2)


def test_an_error_says_which_layer_it_was_in():
    net = objax.nn.Sequential([objax.functional.relu, objax.nn.Linear(3, 2)])
    with pytest.raises(MisuseError) as error:
        net(jnp.ones((1, 4)))
    layer = "objax.nn.Linear(nin=3, nout=2, use_bias=True, w_init=xavier_normal(*, gain=1))"
    assert str(error.value) == (
        f"Sequential layer[1] {layer} Linear: the last axis of x is not nin, 3.\n"
        "  got:      float32[1, 4]\n"
        "  expected: [..., 3]"
    )
    assert isinstance(error.value.__cause__, MisuseError)
    assert error.value.__cause__.what == "Linear: the last axis of x is not nin, 3."


def test_nested_errors_name_both_layers():
    inner = objax.nn.Sequential([objax.functional.relu, lambda x: x["missing"]])
    with pytest.raises(TypeError, match=r"(?s)^Sequential layer\[0\] .*Sequential layer\[1\] "):
        objax.nn.Sequential([inner])(jnp.ones(2))


class Located(Exception):
    def __init__(self, row, column):
        super().__init__(f"at {row}, {column}")
        self.row = row


class Rated(Exception):
    rate = 0


def test_an_error_that_cant_be_made_of_a_text_gets_a_note():
    def fails(x):
        raise Located(3, 4)

    with pytest.raises(Located) as error:
        objax.nn.Sequential([fails])(1)
    assert error.value.row == 3 and error.value.__cause__ is None
    assert error.value.__notes__[0].startswith("Sequential layer[0] <function")


def test_attributes_of_an_error_are_kept():
    def fails(x):
        error = Rated("slow")
        error.rate = 7
        raise error

    with pytest.raises(Rated, match=r"^Sequential layer\[0\] .* slow$") as error:
        objax.nn.Sequential([fails])(1)
    assert error.value.rate == 7


def test_run_layer_is_public():
    assert objax.nn.Sequential.run_layer(0, lambda x, y: x - y, [5, 3], {"other": 1}) == 2


def test_representation_shows_functions_and_nests():
    net = objax.nn.Sequential([objax.functional.tanh, objax.nn.Sequential([functools.partial(jnp.sum, axis=0)])])
    assert repr(net).splitlines()[:3] == ["objax.nn.Sequential(", "  [0] tanh", "  [1] objax.nn.Sequential("]


def test_a_network_learns_in_a_compiled_step():
    net = objax.nn.Sequential([objax.nn.Linear(1, 1)])
    net[0].w.assign(jnp.zeros((1, 1)))
    x = jnp.array([[0.0], [1.0], [2.0]])

    @objax.Jit
    def step():
        loss = lambda: ((net(x) - (3 * x + 1)) ** 2).mean()
        gradients, values = objax.GradValues(loss, net.vars())()
        for variable, gradient in zip(net.vars(), gradients, strict=True):
            variable.assign(variable.value - 0.2 * gradient)
        return values[0]

    assert [float(step()) for _ in range(1)] == [pytest.approx((1 + 16 + 49) / 3)]
    for _ in range(200):
        step()
    np.testing.assert_allclose([net[0].b.value[0], net[0].w.value[0, 0]], [1, 3], rtol=1e-3)
