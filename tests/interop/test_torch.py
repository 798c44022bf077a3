# SPDX-License-Identifier: Apache-2.0
"""Weights from and to PyTorch. What a twin computes with them is in tests/zoo; here is what is written, and where."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tether
from tether import errors, nn
from tether.interop import torch as interop


def small(**options) -> nn.Sequential:
    return nn.Sequential([nn.Linear(2, 4, **options), nn.BatchNorm(4), nn.Linear(4, 2, **options)])


def tensors(dtype=np.float32) -> dict[str, np.ndarray]:
    shapes = {"0.weight": (4, 2), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
    shapes |= {f"1.{name}": (4,) for name in ("weight", "bias", "running_mean", "running_var")}
    rng = np.random.default_rng(0)
    return {name: rng.uniform(1, 2, shape).astype(dtype) for name, shape in shapes.items()}


def values(model: tether.Module) -> dict[str, np.ndarray]:
    return {path: np.asarray(variable.value) for path, variable in tether.variables(model).items()}


class TestLoad:
    def test_writes_in_place(self):
        model, given = small(), tensors()
        weight = tether.cell(model, "[0].weight")
        report = interop.load(model, given)
        assert report.updated == tuple(tether.variables(model)) and not report.missing + report.unexpected
        np.testing.assert_array_equal(weight.value, given["0.weight"])
        np.testing.assert_array_equal(model[1].mean, given["1.running_mean"])
        np.testing.assert_array_equal(model[1].var, given["1.running_var"])

    def test_writes_nothing_unless_everything_fits(self):
        model = small()
        before = values(model)
        for wrong in ({"2.bias": np.ones(3)}, {"3.bias": np.ones(2)}):
            with pytest.raises(errors.StructureError):
                interop.load(model, tensors() | wrong)
        with pytest.raises(errors.StructureError):
            interop.load(model, {name: x for name, x in tensors().items() if name != "2.bias"})
        for path, value in values(model).items():
            np.testing.assert_array_equal(value, before[path])

    def test_not_strict_reports_names(self):
        model, given = small(), tensors() | {"3.bias": np.ones(2), "1.num_batches_tracked": np.asarray(3)}
        del given["1.running_var"]
        report = interop.load(model, given, strict=False)
        assert (report.missing, report.unexpected) == (("1.running_var",), ("3.bias",))
        assert "[1].var" not in report.updated and "[1].mean" in report.updated
        with pytest.raises(errors.StructureError, match="mismatched  2.bias"):
            interop.load(model, tensors() | {"2.bias": np.ones(3)}, strict=False)

    def test_rules_transforms_and_selection(self):
        given = {f"net.{name}": x.T if name == "0.weight" else x for name, x in tensors().items()}
        given["net.2.weight"] = np.ones((1000, 4))
        model = small()
        before = np.asarray(model[2].weight)
        report = interop.load(
            model, given, rules={"^net.": ""}, transforms={r"^net\.0\.weight": np.transpose}, select=["[0]", "[1]"]
        )
        assert not any(path.startswith("[2]") for path in report.updated)
        np.testing.assert_array_equal(model[0].weight, tensors()["0.weight"])
        np.testing.assert_array_equal(model[2].weight, before)

    @pytest.mark.mixed_dtypes
    @pytest.mark.parametrize("given", [np.float64, jnp.bfloat16, np.float16])
    @pytest.mark.parametrize("own", [jnp.float32, jnp.bfloat16])
    def test_casts_to_the_dtype_of_the_cell(self, given, own):
        model = small(dtype=own)
        interop.load(model, tensors(given))
        assert model[0].weight.dtype == own and model[1].var.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(model[0].weight), tensors(given)["0.weight"].astype(own))

    def test_batches_that_are_counted(self):
        norm = nn.BatchNorm(2, mode="ema")
        given = {name: np.ones(2) for name in ("weight", "bias", "running_mean", "running_var")}
        with pytest.raises(errors.StructureError, match=r"missing     num_batches_tracked  int64\[\], at count"):
            interop.load(norm, given)
        interop.load(norm, given | {"num_batches_tracked": np.asarray(5)})
        assert norm.count.tolist() == [5, 5]
        assert interop.state_dict(norm)["num_batches_tracked"] == 5

    def test_fills_a_model_of_shapes(self):
        model = tether.eval_shape(lambda: small(key=jax.random.key(0)))
        assert isinstance(model[0].weight, jax.ShapeDtypeStruct)
        interop.load(model, tensors())
        np.testing.assert_allclose(model.eval()(jnp.ones((3, 2))), filled().eval()(jnp.ones((3, 2))), rtol=1e-6)

    def test_keeps_device_and_sharding(self):
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        model = small()
        tether.place(model, jax.devices()[3])
        tether.place(model[0], sharding)
        interop.load(model, tensors())
        assert model[0].weight.sharding == sharding and model[2].weight.devices() == {jax.devices()[3]}
        np.testing.assert_array_equal(model[0].weight, tensors()["0.weight"])
        np.testing.assert_array_equal(interop.state_dict(model)["0.weight"], tensors()["0.weight"])

    def test_fills_shapes_with_a_sharding(self):
        mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
        sharding = NamedSharding(mesh, PartitionSpec("x"))
        shapes = tether.eval_shape(lambda: nn.Linear(2, 4, key=jax.random.key(0)))
        model = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
        interop.load(model, {"weight": np.ones((4, 2)), "bias": np.ones(4)})
        assert model.weight.sharding == sharding == model.bias.sharding

    def test_compiled_functions_see_it_and_are_not_compiled_anew(self):
        model = small()
        step = tether.jit(lambda model, x: model(x, training=False))
        step(model, jnp.ones((3, 2)))
        interop.load(model, tensors())
        np.testing.assert_allclose(step(model, jnp.ones((3, 2))), filled().eval()(jnp.ones((3, 2))), rtol=1e-6)
        assert step.traces == 1

    def test_fills_a_model_whose_buffers_are_gone(self):
        model = small()
        tether.place(model, jax.devices()[1])
        for variable in tether.variables(model).values():
            variable.value.delete()
        interop.load(model, tensors())
        assert model[0].weight.devices() == {jax.devices()[1]}
        np.testing.assert_array_equal(model[0].weight, tensors()["0.weight"])

    def test_inside_of_a_transformation(self):
        model = small()
        tether.jit(lambda model: interop.load(model, tensors()) and None)(model)
        np.testing.assert_array_equal(model[2].weight, tensors()["2.weight"])

    def test_wrong_model(self):
        with pytest.raises(errors.ArgumentError, match="a Module was expected"):
            interop.load({"weight": jnp.ones(2)}, tensors())

    def test_error_names_the_file(self, tmp_path):
        pytest.importorskip("safetensors")
        interop.save(small(), tmp_path / "small.safetensors")
        with pytest.raises(errors.StructureError) as error:
            interop.load(nn.Linear(2, 4), tmp_path / "small.safetensors")
        assert error.value.at == str(tmp_path / "small.safetensors")
        assert error.value.fixes[0] == "rules={'^0\\\\.': ''} takes the prefix off"


def filled() -> nn.Sequential:
    model = small()
    tether.update(model, {"[0].weight": tensors()["0.weight"], "[0].bias": tensors()["0.bias"]})
    tether.update(model, {"[2].weight": tensors()["2.weight"], "[2].bias": tensors()["2.bias"]})
    names = {"weight": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}
    tether.update(model, {f"[1].{path}": tensors()[f"1.{name}"] for path, name in names.items()})
    return model


class Tied(tether.Module):
    def __init__(self):
        self.embed = nn.Embedding(5, 3)
        self.noise = tether.Rng(0)
        self.head = nn.Linear(3, 5)
        self.head.weight = tether.cell(self.embed, "weight")

    def __call__(self, ids):
        return self.head(self.embed(ids))


class TestStateDict:
    def test_names_values_and_dtypes(self):
        model = filled()
        found = interop.state_dict(model)
        assert sorted(found) == sorted(tensors()) and next(iter(found)) == "0.weight"
        for name, array in found.items():
            assert type(array) is np.ndarray
            np.testing.assert_array_equal(array, tensors()[name])
        assert interop.state_dict(nn.Linear(2, 3, dtype=jnp.bfloat16))["bias"].dtype == jnp.bfloat16

    def test_load_takes_it_back(self):
        model, other = filled(), small()
        interop.load(other, interop.state_dict(model))
        assert tether.tree_equal(model, other)

    def test_ties_under_both_names(self):
        found = interop.state_dict(Tied())
        assert list(found) == ["embed.weight", "head.weight", "head.bias"]
        np.testing.assert_array_equal(found["embed.weight"], found["head.weight"])

    def test_rules_transforms_and_selection(self):
        found = interop.state_dict(
            filled(), rules={"^0": "first", "bias": None}, transforms={"^first": np.transpose}, select=nn.Linear
        )
        assert {name: x.shape for name, x in found.items()} == {"first.weight": (2, 4), "2.weight": (2, 4)}
        np.testing.assert_array_equal(found["first.weight"], tensors()["0.weight"].T)

    def test_of_shapes(self):
        with pytest.raises(errors.DtypeError) as error:
            interop.state_dict(tether.eval_shape(lambda: nn.Linear(2, 3, key=jax.random.key(0))))
        assert str(error.value) == (
            "interop.torch.state_dict: a cell holds no array.\n"
            "  at:       weight  (Param)\n"
            "  got:      ShapeDtypeStruct\n"
            "  expected: a model with its values\n"
            "  fix:      outside of transformations, and after the model has been filled: load(model, source)"
        )

    def test_in_a_transformation(self):
        model = nn.Linear(2, 3)
        with pytest.raises(errors.DtypeError, match=r"got:      a traced float32\[3, 2\]"):
            tether.jit(lambda model: interop.state_dict(model)["weight"])(model)


class TestWithTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    def twin(self, torch):
        twin = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        with torch.no_grad():
            twin[1].running_mean.normal_()
            twin[1].running_var.uniform_(1, 2)
        return twin

    def test_from_a_module_and_its_state_dict(self, torch):
        twin, x = self.twin(torch), np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
        for source in (twin, twin.state_dict(), dict(twin.named_parameters()) | dict(twin.named_buffers())):
            model = small()
            interop.load(model, source)
            np.testing.assert_allclose(model.eval()(x), twin.eval()(torch.tensor(x)).detach().numpy(), rtol=1e-5)

    def test_in_bfloat16(self, torch):
        twin = self.twin(torch).to(torch.bfloat16)
        model = small(dtype=jnp.bfloat16)
        interop.load(model, twin)
        back = interop.state_dict(model, as_torch=True)
        assert back["0.weight"].dtype == torch.bfloat16 and torch.equal(back["0.weight"], twin[0].weight)
        assert twin.load_state_dict(back, strict=True)

    def test_to_a_module(self, torch):
        model, twin = filled(), self.twin(torch)
        x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
        twin.load_state_dict(interop.state_dict(model, as_torch=True), strict=True)
        np.testing.assert_allclose(model.eval()(x), twin.eval()(torch.tensor(x)).detach().numpy(), rtol=1e-5)

    def test_through_files(self, torch, tmp_path):
        from safetensors.torch import load_model, save_model

        twin, model, x = self.twin(torch), small(), np.ones((3, 2), np.float32)
        save_model(twin, str(tmp_path / "theirs.safetensors"))
        interop.load(model, tmp_path / "theirs.safetensors")
        np.testing.assert_allclose(model.eval()(x), twin.eval()(torch.tensor(x)).detach().numpy(), rtol=1e-5)
        tether.update(model, {"[0].bias": jnp.ones(4)})
        interop.save(model, str(tmp_path / "ours.safetensors"))
        load_model(twin, str(tmp_path / "ours.safetensors"), strict=False)
        np.testing.assert_allclose(model.eval()(x), twin.eval()(torch.tensor(x)).detach().numpy(), rtol=1e-5)

    def test_ties_both_ways(self, torch, tmp_path):
        from safetensors.torch import save_model

        twin = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5)})
        twin["head"].weight = twin["embed"].weight
        save_model(twin, str(tmp_path / "tied.safetensors"))
        for source in (twin, tmp_path / "tied.safetensors"):
            model = Tied()
            interop.load(model, source)
            np.testing.assert_array_equal(model.head.weight, twin["embed"].weight.detach().numpy())
        tether.update(model, {"embed.weight": jnp.ones((5, 3))})
        twin.load_state_dict(interop.state_dict(model, as_torch=True), strict=True)
        assert twin["head"].weight is twin["embed"].weight and bool((twin["head"].weight == 1).all())

    def test_untied_model_of_a_tied_twin(self, torch, tmp_path):
        from safetensors.torch import save_model

        class Untied(tether.Module):
            def __init__(self):
                self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

        twin = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5)})
        twin["head"].weight = twin["embed"].weight
        save_model(twin, str(tmp_path / "tied.safetensors"))
        model = Untied()
        interop.load(model, tmp_path / "tied.safetensors")
        np.testing.assert_array_equal(model.head.weight, model.embed.weight)
        assert model.head.weight is not model.embed.weight

    def test_convolution_of_gpt2(self, torch):
        """Conv1D there is a Linear whose weight is [in, out]."""
        weight, bias = np.random.default_rng(0).normal(size=(3, 9)), np.ones(9)
        model = nn.Linear(3, 9)
        source = {"transformer.h.0.attn.c_attn.weight": torch.tensor(weight), "transformer.h.0.attn.c_attn.bias": bias}
        source["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        interop.load(
            model,
            source,
            rules={r"\.attn\.bias$": None, r"^transformer\.h\.0\.attn\.c_attn\.": ""},
            transforms={r"c_attn\.weight$": np.transpose},
        )
        x = np.ones((2, 3), np.float32)
        np.testing.assert_allclose(model(x), x @ weight + bias, rtol=1e-5)

    def test_message_without_safetensors(self, tmp_path, monkeypatch):
        import sys

        monkeypatch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(errors.ArgumentError, match="the package safetensors is not installed"):
            interop.load(small(), tmp_path / "a.safetensors")
