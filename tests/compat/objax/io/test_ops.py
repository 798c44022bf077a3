# SPDX-License-Identifier: Apache-2.0
"""Files of variables: their bytes, files that NumPy reads or wrote, and what stays after errors."""

from __future__ import annotations

import io
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax.io import load_var_collection, save_var_collection


def collection(scale: float = 1.0) -> objax.VarCollection:
    w, b = objax.TrainVar(jnp.full((2, 3), scale)), objax.TrainVar(jnp.arange(3.0) * scale)
    step = objax.StateVar(jnp.array(int(scale), jnp.uint32))
    return objax.VarCollection({"net.b": b, "net.w": w, "opt.step": step, "opt.ref": objax.TrainRef(b), "tied": w})


def by_hand(file: Any, names: list[str], *values: Any) -> None:
    """A file as NumPy writes it."""
    np.savez(file, names=np.array(names), **{str(k): value for k, value in enumerate(values)})


class TestSave:
    def test_numpy_reads_it(self, tmp_path: Path):
        save_var_collection(str(tmp_path / "a.npz"), collection(2.0))
        with np.load(tmp_path / "a.npz", allow_pickle=False) as data:
            assert data.files == ["names", "0", "1", "2"]
            assert data["names"].tolist() == ["net.b", "net.w", "opt.step"]
            assert data["names"].dtype.kind == "U"
            assert data["0"].tolist() == [0, 2, 4] and data["0"].dtype == np.float32
            assert data["1"].tolist() == [[2, 2, 2], [2, 2, 2]]
            assert data["2"] == 2 and data["2"].dtype == np.uint32 and data["2"].shape == ()
        assert os.listdir(tmp_path) == ["a.npz"]

    def test_bytes_are_those_of_numpy_where_it_can_not_seek(self, tmp_path: Path):
        class Stream(io.BytesIO):
            def seek(self, *_: Any) -> Any:
                raise AttributeError("seek")

        expected, handle = Stream(), io.BytesIO()
        by_hand(expected, ["net.b", "net.w", "opt.step"], np.arange(3, dtype="f4"), np.ones((2, 3), "f4"), np.uint32(1))
        save_var_collection(handle, collection())
        save_var_collection(str(tmp_path / "a.npz"), collection())
        assert handle.getvalue() == expected.getvalue() == (tmp_path / "a.npz").read_bytes()
        assert {entry.compress_type for entry in zipfile.ZipFile(handle).infolist()} == {zipfile.ZIP_STORED}

    def test_to_a_pipe(self):
        read, write = os.pipe()
        received: list[bytes] = []

        def drain() -> None:
            with os.fdopen(read, "rb") as stream:
                received.append(stream.read())

        thread = threading.Thread(target=drain)
        thread.start()
        with os.fdopen(write, "wb") as stream:
            save_var_collection(stream, collection(3.0))
        thread.join()
        new = collection(0.0)
        load_var_collection(io.BytesIO(received[0]), new)
        assert new["net.b"].value.tolist() == [0, 3, 6]

    def test_where_an_open_file_stands(self):
        file = io.BytesIO(b"before")
        file.seek(0, io.SEEK_END)
        save_var_collection(file, collection())
        assert file.getvalue().startswith(b"before") and file.tell() == len(file.getvalue())
        assert zipfile.ZipFile(file).testzip() is None

    def test_the_old_file_stays_if_the_new_one_can_not_be_written(self, tmp_path: Path):
        file = tmp_path / "a.npz"
        save_var_collection(str(file), collection())
        old = file.read_bytes()
        bad = objax.VarCollection(a=objax.StateVar(jnp.ones(2)), b=objax.StateVar(object()))
        with pytest.raises(ValueError) as caught:
            save_var_collection(str(file), bad)
        assert str(caught.value) == (
            "save_var_collection: this variable holds no array.\n"
            "  at:       b\n"
            "  got:      object object\n"
            "  expected: an array, or a number"
        )
        assert file.read_bytes() == old and os.listdir(tmp_path) == ["a.npz"]

    def test_half_a_file_is_taken_away(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def full(file: Any, **_: Any) -> None:
            file.write(b"half")
            raise OSError("no space")

        monkeypatch.setattr(np, "savez", full)
        with pytest.raises(OSError, match="no space"):
            save_var_collection(str(tmp_path / "a.npz"), collection())
        assert os.listdir(tmp_path) == []

    def test_nothing(self):
        file = io.BytesIO()
        save_var_collection(file, objax.VarCollection())
        load_var_collection(io.BytesIO(file.getvalue()), objax.VarCollection())


class TestLoad:
    def test_a_file_by_hand(self, tmp_path: Path):
        file = tmp_path / "hand.npz"
        by_hand(
            file,
            ["other", "opt.step", "net.w", "net.b"],
            np.zeros(7),
            np.uint32(8),
            np.full((2, 3), 5, "f4"),
            np.array([1, 2, 3], "f4"),
        )
        vc = collection()
        load_var_collection(str(file), vc)
        assert vc["net.w"].value.tolist() == [[5] * 3] * 2 and vc["net.b"].value.tolist() == [1, 2, 3]
        assert vc["opt.step"].value == 8 and vc["opt.step"].dtype == jnp.uint32
        assert all(isinstance(variable.value, jax.Array) for variable in vc)

    def test_by_any_of_its_names(self):
        file = io.BytesIO()
        by_hand(
            file, ["tied", "opt.ref", "opt.step"], np.full((2, 3), 5, "f4"), np.array([1, 2, 3], "f4"), np.uint32(8)
        )
        file.seek(0)
        vc = collection()
        load_var_collection(file, vc)
        assert vc["net.w"].value.tolist() == [[5] * 3] * 2 and vc["net.b"].value.tolist() == [1, 2, 3]

    def test_a_path_and_a_renamer(self, tmp_path: Path):
        save_var_collection(tmp_path / "a.npz", collection(2.0).rename(lambda name: f"old/{name}"))  # type: ignore[arg-type]
        vc = collection(0.0)
        load_var_collection(tmp_path / "a.npz", vc, renamer=objax.util.Renamer({"old/": ""}))  # type: ignore[arg-type]
        assert vc["net.b"].value.tolist() == [0, 2, 4]

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.bool_, jnp.complex64])
    def test_dtypes_come_back(self, dtype: Any):
        old = objax.VarCollection(v=objax.StateVar(jnp.array([0, 1, 1], dtype)))
        new = objax.VarCollection(v=objax.StateVar(jnp.zeros(3, dtype)))
        file = io.BytesIO()
        save_var_collection(file, old)
        load_var_collection(io.BytesIO(file.getvalue()), new)
        assert new["v"].dtype == dtype and new["v"].value.tolist() == old["v"].value.tolist()

    def test_random_states(self):
        old, new = objax.random.Generator(3), objax.random.Generator(4)
        file = io.BytesIO()
        save_var_collection(file, old.vars())
        load_var_collection(io.BytesIO(file.getvalue()), new.vars())
        assert new().tolist() == old().tolist()

    def test_a_whole_training_goes_on(self):
        def made() -> tuple[objax.Module, Any]:
            root = objax.Module()
            root.net = objax.nn.Linear(2, 1)
            root.opt = objax.optimizer.Adam(root.net.vars())
            root.ema = objax.optimizer.ExponentialMovingAverage(root.net.vars())

            def train(lr: float) -> None:
                root.opt(lr, [jnp.full(v.shape, 0.3) for v in root.net.vars()])
                root.ema()

            return root, train

        (a, train_a), (b, train_b) = made(), made()
        train_a(0.1)
        file = io.BytesIO()
        save_var_collection(file, a.vars())
        load_var_collection(io.BytesIO(file.getvalue()), b.vars())
        train_a(0.1)
        train_b(0.1)
        assert [v.tolist() for v in a.vars().tensors()] == [v.tolist() for v in b.vars().tensors()]


class TestMistakes:
    def test_a_missing_value(self):
        file = io.BytesIO()
        by_hand(file, ["opt.step", "net.b", "net.v"], np.uint32(8), np.array([7, 7, 7], "f4"), np.zeros((2, 3), "f4"))
        file.seek(0)
        vc = collection()
        with pytest.raises(ValueError) as caught:
            load_var_collection(file, vc)
        assert str(caught.value) == (
            "Missing value for variables currently in the model: ['net.w', 'tied'].\n"
            "  got:      a file whose other values were not used: ['net.v']\n"
            "  expected: a value for each variable, under one of its names\n"
            "  fix:      renamer=objax.util.Renamer({name in the file: name in the model})"
        )
        assert vc["net.b"].value.tolist() == [0, 1, 2] and vc["opt.step"].value == 1

    def test_another_shape(self):
        file = io.BytesIO()
        by_hand(file, ["net.b", "net.w", "opt.step"], np.array([7, 7, 7], "f4"), np.zeros((3, 2), "f4"), np.uint32(8))
        file.seek(0)
        vc = collection()
        with pytest.raises(AssertionError) as caught:
            load_var_collection(file, vc)
        assert str(caught.value) == (
            "Error when restoring variable net.w: Assign can not change shape of variable.\n"
            "  at:       net.w\n"
            "  got:      float32[3, 2] in the file\n"
            "  expected: float32[2, 3]"
        )
        assert vc["net.b"].value.tolist() == [0, 1, 2]

    def test_another_kind_of_file(self, tmp_path: Path):
        np.savez(tmp_path / "a.npz", weights=np.ones(2))
        with pytest.raises(ValueError) as caught:
            load_var_collection(str(tmp_path / "a.npz"), collection())
        assert str(caught.value) == (
            "load_var_collection: this is no file of variables.\n"
            "  got:      weights\n"
            "  expected: an npz file of names, 0, 1 ..., as save_var_collection writes it"
        )
        np.save(tmp_path / "a.npy", np.ones(2))
        with pytest.raises(ValueError, match=r"got: +float64\[2\]"):
            load_var_collection(str(tmp_path / "a.npy"), collection())

    def test_no_pickles(self):
        file = io.BytesIO()
        by_hand(file, ["v"], np.array([{}], dtype=object))
        file.seek(0)
        with pytest.raises(ValueError, match="allow_pickle=False"):
            load_var_collection(file, objax.VarCollection(v=objax.StateVar(jnp.zeros(1))))
