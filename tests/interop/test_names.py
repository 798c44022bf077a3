# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a state_dict are which cells."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tether import errors, nn
from tether.interop._names import Names, Spec, links, spec_of


class Net(tether.Module):
    def __init__(self):
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = tether.cell(self.embed, "weight")
        self.parts = {
            "a": nn.Linear(3, 3, use_bias=False),
            "b": [tether.Param(jnp.ones(2)), tether.Constant(jnp.zeros(1))],
        }
        self.norm = nn.BatchNorm(3)
        self.noise = tether.Rng(0)
        self.calls = tether.State(0)


def names_of(model: tether.Module) -> dict[tuple[str, ...], tuple[str, ...]]:
    return {link.names: link.paths for link in links(model)}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("weight", "weight"),
        ("layers[0].weight", "layers.0.weight"),
        ("[0].weight", "0.weight"),
        ("[0][12].norm.bias", "0.12.norm.bias"),
        ("parts['a'].weight", "parts.a.weight"),
        ("parts['a.b'][1]", "parts.a.b.1"),
    ],
)
def test_name_of_a_path(path: str, name: str):
    assert Names(nn.Linear(1, 1)).of(path) == name


def test_links_of_a_model():
    assert names_of(Net()) == {
        ("embed.weight",): ("embed.weight",),
        ("head.weight",): ("head.weight",),
        ("head.bias",): ("head.bias",),
        ("parts.a.weight",): ("parts['a'].weight",),
        ("parts.b.0",): ("parts['b'][0]",),
        ("parts.b.1",): ("parts['b'][1]",),
        ("norm.weight",): ("norm.weight",),
        ("norm.bias",): ("norm.bias",),
        ("norm.running_mean",): ("norm.mean",),
        ("norm.running_var",): ("norm.var",),
        ("calls",): ("calls",),
    }


def test_tied_cells_have_a_link_at_each_place():
    tied = [link for link in links(Net()) if link.paths[0] in ("embed.weight", "head.weight")]
    assert tied[0].variables == tied[1].variables


def test_a_module_in_two_places():
    norm = nn.BatchNorm(2)
    found = names_of(nn.Sequential([norm, nn.Identity(), norm]))
    assert ("2.running_var",) in found and found["0.running_mean",] == ("[0].mean",)


def test_batchnorm_that_counts_its_batches():
    norm = nn.BatchNorm(3, debias=True)
    (count,) = (link for link in links(norm) if link.paths == ("count",))
    assert count.names == ("num_batches_tracked",) and count.specs() == [Spec((), np.dtype(np.int64))]
    np.testing.assert_array_equal(count.read([np.asarray(7)])[0], [7, 7, 7])
    np.testing.assert_array_equal(count.write([np.array([3, 7, 5])])[0], 7)


def test_subclass_of_a_layer_has_its_layout():
    class Mine(nn.BatchNorm):
        """One of the user's."""

    assert ("running_mean",) in names_of(Mine(2))


def test_a_layer_of_the_same_cells_has_no_layout():
    class Other(tether.Module):
        def __init__(self):
            self.mean = tether.State(jnp.zeros(2))

    assert names_of(Other()) == {("mean",): ("mean",)}


class TestStacked:
    """A stacked module is the list of its members."""

    def model(self) -> tether.Module:
        class Net(tether.Module):
            def __init__(self, blocks):
                self.blocks, self.head = blocks, nn.Linear(2, 1)

        return Net(tether.stack([nn.Sequential([nn.Linear(2, 2), nn.BatchNorm(2, mode="ema")]) for _ in range(3)]))

    def test_names(self):
        found = names_of(self.model())
        assert found[tuple(f"blocks.{i}.0.weight" for i in range(3))] == ("blocks[0].weight",)
        assert found[tuple(f"blocks.{i}.1.num_batches_tracked" for i in range(3))] == ("blocks[1].count",)
        assert found["head.weight",] == ("head.weight",)

    def test_values_there_and_back(self):
        for link in links(self.model()):
            values = [np.asarray(variable.value) for variable in link.variables]
            tensors = link.write(values)
            assert len(tensors) == len(link.names) == len(link.specs())
            assert [t.shape for t in tensors] == [s.shape for s in link.specs()]
            np.testing.assert_array_equal(link.read(tensors)[0], values[0])

    def test_twice(self):
        ensemble = tether.stack([tether.stack([nn.Linear(2, 3) for _ in range(2)]) for _ in range(2)])
        link = links(ensemble)[0]
        assert link.names == ("0.0.weight", "0.1.weight", "1.0.weight", "1.1.weight")
        value = np.asarray(link.variables[0].value)
        np.testing.assert_array_equal(link.write([value])[2], value[1, 0])
        np.testing.assert_array_equal(link.read(link.write([value]))[0], value)


def test_gradients_have_links_for_what_is_there():
    grads = tether.grad(lambda norm: norm(jnp.eye(3, 2)).sum())(nn.BatchNorm(2))
    assert list(names_of(grads)) == [("weight",), ("bias",)]


def test_spec_is_that_of_the_cell():
    model = tether.eval_shape(lambda: nn.Linear(2, 3, dtype=jnp.bfloat16, key=jax.random.key(0)))
    spec = spec_of(tether.cell(model, "weight"))
    assert spec == Spec((3, 2), np.dtype(jnp.bfloat16))
    assert spec.zeros().shape == (3, 2) and spec.zeros().strides == (0, 0)


def test_two_cells_of_one_name():
    class Same(tether.Module):
        def __init__(self):
            self.parts = {
                "0": tether.Param(jnp.ones(1)),
                "a": [tether.Param(jnp.ones(1))],
                "a.0": tether.Param(jnp.ones(1)),
            }

    with pytest.raises(errors.ArgumentError) as error:
        links(Same())
    assert str(error.value) == (
        "interop.torch: two cells of the model would have one name in PyTorch.\n"
        "  at:       parts['a'][0] and parts['a.0']\n"
        "  got:      'parts.a.0'\n"
        "  expected: a name for each\n"
        "  fix:      rename one of the attributes, lists or keys that lead to them"
    )
