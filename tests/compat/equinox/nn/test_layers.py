# SPDX-License-Identifier: Apache-2.0
"""What holds for all layers: Equinox's names, arguments and fields, and weights that are made when they are used."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.equinox as eqx

KEY = jax.random.key(0)
POOLS = [f"{kind}Pool{n}d" for kind in ("Avg", "Max", "AdaptiveAvg", "AdaptiveMax") for n in (1, 2, 3)]
CONVS = [f"{kind}{n}" for kind in ("Conv", "ConvTranspose") for n in ("", "1d", "2d", "3d")]
OLD = [f"{kind}Pool{n}D" for kind in ("Avg", "Max") for n in (1, 2, 3)]
OTHERS = (
    "MLP Sequential Lambda Linear Identity Dropout Embedding LayerNorm GroupNorm GRUCell LSTMCell MultiheadAttention "
    "Pool AdaptivePool"
).split()


def test_every_name_of_equinox_is_there():
    assert set(eqx.nn.__all__) == {*POOLS, *CONVS, *OLD, *OTHERS}
    for name in OLD:
        assert getattr(eqx.nn, name) is getattr(eqx.nn, name[:-1] + "d")
    for module in "attention composed conv dropout embedding linear normalisation pool rnn".split():
        owner = getattr(eqx.nn, module)
        for name in owner.__all__:
            assert getattr(eqx.nn, name, None) is getattr(owner, name) or name.startswith("dot_product")


def said(function):
    """The arguments of a function: a default after =, those by name alone after a star."""
    words, by_name = [], False
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not by_name:
            by_name = True
            words.append("*")
        words.append(("**" if parameter.kind is parameter.VAR_KEYWORD else "") + parameter.name)
        if parameter.default is not parameter.empty:
            words[-1] += f"={getattr(parameter.default, '__name__', parameter.default)}"
    return " ".join(words)


CONV = "kernel_size stride=1 padding=0 dilation=1 groups=1 use_bias=True * key **kwargs"
TRANSPOSED = "kernel_size stride=1 {}=0 {}=0 dilation=1 groups=1 use_bias=True * key **kwargs"
CELL = "input_size hidden_size use_bias=True * key **kwargs"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Linear", "in_features out_features use_bias=True * key"),
        ("Embedding", "num_embeddings embedding_size weight=None * key **kwargs"),
        ("Dropout", "p=0.5 inference=False * deterministic=None"),
        ("LayerNorm", "shape eps=1e-05 elementwise_affine=True **kwargs"),
        ("GroupNorm", "groups channels=None eps=1e-05 channelwise_affine=True **kwargs"),
        ("GRUCell", CELL),
        ("LSTMCell", CELL),
        ("Sequential", "layers"),
        ("Lambda", "fn"),
        ("MLP", "in_size out_size width_size depth activation=relu final_activation=_identity * key **kwargs"),
        (
            "MultiheadAttention",
            "num_heads query_size key_size=None value_size=None output_size=None qk_size=None vo_size=None "
            "use_query_bias=False use_key_bias=False use_value_bias=False use_output_bias=False dropout_p=0.0 "
            "inference=False * key **kwargs",
        ),
        ("Conv", f"num_spatial_dims in_channels out_channels {CONV}"),
        *((f"Conv{n}d", f"in_channels out_channels {CONV}") for n in (1, 2, 3)),
        (
            "ConvTranspose",
            "num_spatial_dims in_channels out_channels " + TRANSPOSED.format("padding", "output_padding"),
        ),
        *(  # the other way round, in Equinox too
            (f"ConvTranspose{n}d", "in_channels out_channels " + TRANSPOSED.format("output_padding", "padding"))
            for n in (1, 2, 3)
        ),
        ("Pool", "init operation num_spatial_dims kernel_size stride=1 padding=0 use_ceil=False **kwargs"),
        *((name, "kernel_size stride padding=0 use_ceil=False **kwargs") for name in POOLS[:6]),
        ("AdaptivePool", "target_shape num_spatial_dims operation **kwargs"),
        *((name, "target_shape **kwargs") for name in POOLS[6:]),
    ],
)
def test_arguments(name, arguments):
    assert said(getattr(eqx.nn, name).__init__) == arguments


def ones(*shape):
    return jnp.ones(shape)


LAYERS = {
    "Linear": (lambda: eqx.nn.Linear(2, 3, key=KEY), (ones(2),)),
    "Embedding": (lambda: eqx.nn.Embedding(5, 3, key=KEY), (jnp.array(2),)),
    "LayerNorm": (lambda: eqx.nn.LayerNorm(4), (jnp.arange(4.0),)),
    "GroupNorm": (lambda: eqx.nn.GroupNorm(2, 4), (jnp.arange(8.0).reshape(4, 2),)),
    "GRUCell": (lambda: eqx.nn.GRUCell(2, 3, key=KEY), (ones(2), ones(3))),
    "LSTMCell": (lambda: eqx.nn.LSTMCell(2, 3, key=KEY), (ones(2), (ones(3), ones(3)))),
    "MLP": (lambda: eqx.nn.MLP(2, 3, 4, 1, key=KEY), (ones(2),)),
    "Conv": (lambda: eqx.nn.Conv2d(2, 3, 2, key=KEY), (ones(2, 4, 4),)),
    "ConvTranspose": (lambda: eqx.nn.ConvTranspose2d(2, 3, 2, key=KEY), (ones(2, 4, 4),)),
    "MultiheadAttention": (lambda: eqx.nn.MultiheadAttention(2, 4, key=KEY), (ones(3, 4),) * 3),
    "Dropout": (lambda: eqx.nn.Dropout(inference=True), (ones(2),)),
    "Sequential": (lambda: eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=KEY)]), (ones(2),)),
    "Lambda": (lambda: eqx.nn.Lambda(jnp.tanh), (ones(2),)),
    "Identity": (lambda: eqx.nn.Identity(), (ones(2),)),
    "Pool": (lambda: eqx.nn.MaxPool1d(2, 2), (ones(2, 4),)),
    "AdaptivePool": (lambda: eqx.nn.AdaptiveAvgPool1d(2), (ones(2, 5),)),
}
WINDOW = "*in_channels *out_channels *kernel_size *stride *padding"


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Linear", "weight bias *in_features *out_features *use_bias"),
        ("Embedding", "*num_embeddings *embedding_size weight"),
        ("LayerNorm", "*shape *eps *elementwise_affine weight bias"),
        ("GroupNorm", "*groups *channels *eps *channelwise_affine weight bias"),
        ("GRUCell", "weight_ih weight_hh bias bias_n *input_size *hidden_size *use_bias"),
        ("LSTMCell", "weight_ih weight_hh bias *input_size *hidden_size *use_bias"),
        ("MLP", "layers activation final_activation *in_size *out_size *width_size *depth"),
        ("Conv", f"*num_spatial_dims weight bias {WINDOW} *dilation *groups *use_bias"),
        ("ConvTranspose", f"*num_spatial_dims weight bias {WINDOW} *output_padding *dilation *groups *use_bias"),
        (
            "MultiheadAttention",
            "query_proj key_proj value_proj output_proj dropout *num_heads *query_size *key_size *value_size "
            "*output_size *qk_size *vo_size *use_query_bias *use_key_bias *use_value_bias *use_output_bias",
        ),
        ("Dropout", "p inference"),
        ("Sequential", "layers"),
        ("Lambda", "fn"),
        ("Identity", ""),
        ("Pool", "init operation *num_spatial_dims *kernel_size *stride *padding *use_ceil"),
        ("AdaptivePool", "*target_shape operation"),
    ],
)
def test_fields(name, fields):
    layer = LAYERS[name][0]()
    found = [("*" if field.metadata.get("static") else "") + field.name for field in dataclasses.fields(layer)]
    assert found == fields.split()
    assert isinstance(layer, eqx.Module)
    hash(jax.tree.structure(layer))  # or a jit couldn't have it as an argument


class Made(eqx.Module):
    """A weight that is made when it is used, as that of SpectralNorm is."""

    array: jax.Array
    times: list = eqx.static_field()

    def __jax_array__(self):
        self.times.append(1)
        return 2 * self.array


@pytest.mark.parametrize("name", list(LAYERS)[:10])
def test_a_weight_can_be_an_object_that_makes_one_once_a_call(name):
    layer, inputs = LAYERS[name][0](), LAYERS[name][1]
    times: list = []
    made = jax.tree.map(lambda leaf: Made(leaf, times) if eqx.is_array(leaf) else leaf, layer)
    doubled = jax.tree.map(lambda leaf: 2 * leaf if eqx.is_array(leaf) else leaf, layer)
    expected = doubled(*inputs)
    calls = (made, jax.jit(lambda *inputs: made(*inputs)))
    for call in calls:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), call(*inputs), expected)
    assert len(times) == len(calls) * sum(map(eqx.is_array, jax.tree.leaves(layer)))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_ignores_or_takes_a_key(name):
    layer, inputs = LAYERS[name][0](), LAYERS[name][1]
    jax.tree.map(np.testing.assert_array_equal, layer(*inputs, key=KEY), layer(*inputs))


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("Dropout", "Identity", "Lambda")])
def test_gradients_go_through_vmap_to_each_array(name):
    layer, inputs = LAYERS[name][0](), LAYERS[name][1]
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), inputs)

    def total(arrays, batch):
        outputs = jax.vmap(eqx.combine(arrays, rest))(*batch)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs))

    gradients = jax.tree.leaves(jax.jit(jax.grad(total))(arrays, batch))
    single = jax.tree.leaves(jax.grad(total)(arrays, jax.tree.map(lambda x: x[:1], batch)))
    assert len(gradients) == len(jax.tree.leaves(arrays))
    for both, one in zip(gradients, single, strict=True):
        np.testing.assert_allclose(both, 2 * one, rtol=1e-4, atol=1e-5)


def test_a_subclass_passes_on_what_its_other_base_takes():
    class Named(eqx.Module):
        name: str

        def __init__(self, name, **kwargs):
            super().__init__(**kwargs)
            self.name = name

    class Block(eqx.nn.Conv1d, Named):
        pass

    block = Block(1, 2, 3, key=KEY, name="first")
    assert block.name == "first" and block(ones(1, 4)).shape == (2, 2)
