# SPDX-License-Identifier: Apache-2.0
"""Layers that PyTorch names or lays out in another way: loaded from its layer they compute what it does, and go back.

What PyTorch gives was stored by make_layouts.py; where torch is installed, it is asked again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether
from tests.interop import layers
from tether import nn
from tether.interop import torch as interop
from tether.interop._layouts import LAYOUTS, layouts_of
from tether.interop._names import links
from tether.nn._attention import MultiHeadAttention


@pytest.mark.parametrize("name", layers.CASES)
class TestCase:
    def test_computes_what_pytorch_does(self, name: str):
        case, (tensors, y) = layers.CASES[name], layers.stored()[name]
        model = case.make()
        report = interop.load(model, tensors)
        assert not report.missing and set(report.updated) == set(tether.variables(model))
        np.testing.assert_allclose(model.eval()(*map(jnp.asarray, case.inputs())), y, rtol=2e-5, atol=2e-5)

    def test_goes_back(self, name: str):
        case, (tensors, _) = layers.CASES[name], layers.stored()[name]
        model = case.make()
        interop.load(model, tensors)
        back = interop.state_dict(model)
        tensors = {n: x for n, x in tensors.items() if not n.endswith("num_batches_tracked") or n in back}
        if not case.old_names:
            assert set(back) == set(tensors)
            for n, x in back.items():
                np.testing.assert_array_equal(x, tensors[n], err_msg=n)

    def test_stored_is_what_pytorch_gives(self, name: str):
        pytest.importorskip("torch")
        tensors, y = layers.of_torch(layers.CASES[name])
        stored, expected = layers.stored()[name]
        np.testing.assert_allclose(y, expected, atol=1e-6)
        assert tensors.keys() == stored.keys()


def test_every_row_has_a_case():
    classes = {
        cls for case in layers.CASES.values() for m in tether.modules(case.make()).values() for cls in type(m).__mro__
    }
    assert set(LAYOUTS) <= classes


def test_every_layout_gives_back_what_it_took():
    for case in layers.CASES.values():
        model = case.make()
        for link in links(model):
            values = [np.asarray(variable.value) for variable in link.variables]
            tensors = link.write(values)
            assert [t.shape for t in tensors] == [spec.shape for spec in link.specs()]
            for one, two in zip(values, link.read(tensors), strict=True):
                np.testing.assert_array_equal(one, two)


def test_a_subclass_has_the_rows_of_its_base():
    class Mine(nn.BatchNorm):
        """One of the user's."""

    assert [layout.names for layout in layouts_of(Mine(2))][:2] == [("running_mean",), ("running_var",)]
    assert layouts_of(nn.Linear(2, 2)) == []


def test_projections_may_come_apart():
    """As most models outside of torch.nn have them; rules bring their names to ours."""
    attention, other = (MultiHeadAttention(4, 2, key=jax.random.key(i)) for i in (0, 1))
    tensors = {path.replace("query_proj", "q"): v.value for path, v in tether.variables(attention).items()}
    report = interop.load(other, tensors, rules={r"^q\.": "query_proj."})
    assert not report.missing and tether.tree_equal(attention, other)
    del tensors["q.weight"]
    missing = interop.load(other, tensors, rules={r"^q\.": "query_proj."}, strict=False).missing
    assert missing == ("in_proj_weight",)


def test_grouped_attention_has_a_fused_projection():
    attention = MultiHeadAttention(8, 4, num_kv_heads=2, key=jax.random.key(0))
    fused = interop.state_dict(attention)["in_proj_weight"]
    assert fused.shape == (16, 8)
    np.testing.assert_array_equal(fused[8:12], attention.key_proj.weight)


def test_attention_with_some_biases():
    names = list(interop.state_dict(MultiHeadAttention(4, 2, use_bias=("query",))))
    assert names == ["in_proj_weight", "query_proj.bias", "out_proj.weight"]
