# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays of what PyTorch holds, in memory or in a file."""

from __future__ import annotations

import pickle

import jax.numpy as jnp
import numpy as np
import pytest

from tether import errors, nn
from tether.interop._arrays import tensors, torch_tensor, write_file

USER = "interop.torch.load"


def refused(source) -> errors.ArgumentError:
    with pytest.raises(errors.ArgumentError) as error:
        {name: get() for name, get in tensors(source, USER).items()}
    return error.value


class TestWrongSources:
    @pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "ckpt", "pkl", "PT"])
    def test_pickled_file_is_never_opened(self, suffix: str, tmp_path):
        class Trap:
            def __reduce__(self):
                return (exec, ("raise SystemExit('a pickled program ran')",))

        path = tmp_path / f"weights.{suffix}"
        path.write_bytes(pickle.dumps(Trap()))
        message = str(refused(path))
        assert message == str(refused(str(path)))
        assert message == (
            "interop.torch.load: a pickled file is not read, because unpickling runs whatever program is in it.\n"
            f"  at:       {path}\n"
            f"  got:      the suffix '.{suffix}', under which PyTorch pickles\n"
            "  expected: a path that ends in .safetensors\n"
            "  fix:      one of\n"
            f"    1. convert it, where PyTorch is: tensors = torch.load('weights.{suffix}', map_location='cpu', "
            "weights_only=True); safetensors.torch.save_file({n: x.contiguous().clone() for n, x in tensors.items()}, "
            "'weights.safetensors')\n"
            "    2. load(model, torch_module), with a module that you have filled yourself"
        )

    def test_file_of_another_format(self):
        assert str(refused("weights.npz")) == (
            "interop.torch.load: this is no .safetensors file by its name.\n"
            "  at:       weights.npz\n"
            "  got:      the suffix '.npz'\n"
            "  expected: a path that ends in .safetensors\n"
            "  fix:      arrays of another format as a mapping: load(model, {name: array})"
        )

    @pytest.mark.parametrize(
        ("source", "got", "fix"),
        [
            (3, "3", "the path of a .safetensors file"),
            (None, "None", "the path of a .safetensors file"),
            ([], "list of 0", "the path of a .safetensors file"),
            ([np.ones(2)], "list of 1", "the path of a .safetensors file"),
            (nn.Linear, "the class Linear", "make one: Linear(...)"),
            (nn.Linear(1, 1), "Linear object", "tether.update(model, other), from a model of Tether"),
        ],
    )
    def test_no_source(self, source, got, fix):
        error = refused(source)
        assert (error.what, error.got, error.fixes[0]) == (
            "interop.torch.load: the source holds no tensors by name.",
            got,
            fix,
        )

    def test_no_names(self):
        assert refused({}).got == "an empty mapping"
        assert str(refused({"a": np.ones(2), 3: np.ones(2)})) == (
            "interop.torch.load: the source is no mapping from names to tensors.\n"
            "  got:      a key that is 3\n"
            "  expected: {'layer.weight': tensor}\n"
            "  fix:      torch_module.state_dict()"
        )

    def test_a_whole_checkpoint(self):
        assert str(refused({"epoch": 3, "state_dict": {"weight": np.ones(2)}})) == (
            "interop.torch.load: what stands under a name is no tensor.\n"
            "  at:       'state_dict'\n"
            "  got:      dict of 1\n"
            "  expected: a tensor or an array\n"
            "  fix:      give source['state_dict'] alone"
        )

    def test_no_tensor(self):
        assert refused({"a._extra_state": b"bytes"}).fixes == [r"leave it out: rules={'^a\\._extra_state$': None}"]


def test_arrays_of_a_mapping():
    given = {"a": np.ones(2, np.float16), "b": jnp.arange(3), "c": 1.5, "d": np.float32(2)}
    found = {name: get() for name, get in tensors(given, USER).items()}
    assert all(isinstance(x, np.ndarray) for x in found.values()) and found["a"] is given["a"]
    assert {name: x.dtype.name for name, x in found.items()} == {
        "a": "float16",
        "b": "int32",
        "c": "float64",
        "d": "float32",
    }


class TestTorch:
    @pytest.mark.parametrize(
        "dtype",
        "float16 bfloat16 float32 float64 int64 uint8 bool complex64 float8_e4m3fn float8_e5m2".split(),
    )
    def test_there_and_back(self, dtype: str):
        torch = pytest.importorskip("torch")
        given = torch.arange(6).reshape(2, 3).t().to(getattr(torch, dtype))  # not contiguous
        array = tensors({"x": given}, USER)["x"]()
        assert array.dtype.name == dtype and array.shape == (3, 2)
        np.testing.assert_array_equal(np.asarray(array, np.complex64), given.to(torch.complex64).numpy())
        back = torch_tensor(array)
        assert back.dtype == given.dtype and torch.equal(back.to(torch.complex64), given.to(torch.complex64))

    def test_parameters_and_views(self):
        torch = pytest.importorskip("torch")
        conj = torch.tensor([1 + 2j]).conj()
        given = {"p": torch.nn.Parameter(torch.ones(2)), "c": conj, "s": torch.tensor(3)}
        found = {name: get() for name, get in tensors(given, USER).items()}
        assert found["p"].tolist() == [1, 1] and found["c"].tolist() == [1 - 2j] and found["s"].shape == ()

    def test_a_tensor_has_memory_of_its_own(self):
        pytest.importorskip("torch")
        array = np.ones(2, np.float32)
        torch_tensor(array)[0] = 5
        assert array.tolist() == [1, 1]


class TestFiles:
    def test_there_and_back(self, tmp_path):
        pytest.importorskip("safetensors")
        arrays = {
            "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
            "narrow": np.ones(3, jnp.bfloat16),
            "scalar": np.asarray(3, np.int64),
            "none": np.zeros((0, 4), np.float16),
        }
        write_file(tmp_path / "a.safetensors", arrays, "save")
        found = {name: get() for name, get in tensors(tmp_path / "a.safetensors", USER).items()}
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(np.asarray(found[name], np.float64), np.asarray(array, np.float64))
        assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]

    def test_several_files_are_one_source(self, tmp_path):
        pytest.importorskip("safetensors")
        paths = [tmp_path / f"{i}.safetensors" for i in (1, 2)]
        for i, path in enumerate(paths):
            write_file(path, {f"{i}.weight": np.full(2, i)}, "save")
        assert {name: get()[0] for name, get in tensors([paths[0], str(paths[1])], USER).items()} == {
            "0.weight": 0,
            "1.weight": 1,
        }
        assert str(refused([paths[0], paths[0]])).splitlines()[:3] == [
            "interop.torch.load: a tensor is in two of the files.",
            "  at:       '0.weight'",
            "  got:      '0.weight' in 1.safetensors and in one before it",
        ]

    def test_a_pickle_under_another_name(self, tmp_path):
        pytest.importorskip("safetensors")
        path = tmp_path / "renamed.safetensors"
        path.write_bytes(pickle.dumps({"weight": [1.0] * 100}))
        error = refused(path)
        assert (error.what, error.at) == ("interop.torch.load: this is no whole safetensors file.", str(path))
        assert error.fixes[0].startswith("a file that was only renamed has to be converted")

    def test_half_a_file(self, tmp_path):
        pytest.importorskip("safetensors")
        path = tmp_path / "a.safetensors"
        write_file(path, {"a": np.ones(100)}, "save")
        path.write_bytes(path.read_bytes()[:-8])
        assert refused(path).what == "interop.torch.load: this is no whole safetensors file."

    def test_no_file(self, tmp_path):
        pytest.importorskip("safetensors")
        with pytest.raises(FileNotFoundError):
            tensors(tmp_path / "nothing.safetensors", USER)

    def test_what_safetensors_wrote_once_is_found_under_both_names(self, tmp_path):
        torch = pytest.importorskip("torch")
        from safetensors.torch import save_model

        twin = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
        twin["b"].weight = twin["a"].weight
        save_model(twin, str(tmp_path / "tied.safetensors"))
        found = tensors(tmp_path / "tied.safetensors", USER)
        assert set(found) == {"a.weight", "a.bias", "b.weight", "b.bias"}
        np.testing.assert_array_equal(found["a.weight"](), found["b.weight"]())

    def test_dtype_that_numpy_lacks(self, tmp_path):
        torch = pytest.importorskip("torch")
        from safetensors.torch import save_file

        path = tmp_path / "narrow.safetensors"
        save_file({"w": torch.ones(2, dtype=torch.float8_e4m3fn)}, path)
        with pytest.raises(errors.DtypeError) as error:
            tensors(path, USER)["w"]()
        assert str(error.value) == (
            "interop.torch.load: NumPy lacks the dtype of a tensor.\n"
            f"  at:       'w' in {path}\n"
            "  got:      F8_E4M3\n"
            "  expected: a dtype of NumPy, or bfloat16\n"
            "  fix:      convert the file, where PyTorch is: {n: x.to(torch.bfloat16) for n, x in tensors.items()}"
        )

    def test_another_suffix_to_write(self, tmp_path):
        with pytest.raises(errors.ArgumentError) as error:
            write_file("weights.pt", {}, "interop.torch.save")
        assert str(error.value) == (
            "interop.torch.save: the path doesn't end in .safetensors.\n"
            "  at:       weights.pt\n"
            "  got:      the suffix '.pt'\n"
            "  expected: a path that ends in .safetensors, the one format that is written\n"
            "  fix:      weights.safetensors"
        )

    def test_a_write_that_fails_leaves_the_old_file(self, tmp_path):
        pytest.importorskip("safetensors")
        path = tmp_path / "a.safetensors"
        write_file(path, {"a": np.ones(2)}, "save")
        with pytest.raises(Exception, match=r"."):
            write_file(path, {"a": np.array([object()])}, "save")
        assert tensors(path, USER)["a"]().tolist() == [1, 1]
        assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
