# SPDX-License-Identifier: Apache-2.0
"""Files of leaves: NumPy makes and reads the records, and what can go wrong goes wrong as a whole."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tether
from tests.tree.records import records
from tether import nn
from tether.errors import ArgumentError, StructureError


def written(tree: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    tether.tree_serialise_leaves(file, tree, **options)
    return file.getvalue()


def read(data: bytes, like: Any, **options: Any) -> Any:
    return tether.tree_deserialise_leaves(io.BytesIO(data), like, **options)


class Everything(tether.Module):
    def __init__(self, seed: int = 0, fill: float = 0.0):
        self.layers = [nn.Linear(2, 3, key=jax.random.key(seed)), nn.BatchNorm(3)]
        self.tied = self.layers[0]
        self.half = tether.Constant(jnp.full(2, fill, jnp.bfloat16))
        self.rng = tether.Rng(jax.random.key(seed))
        self.cache = tether.State({"k": jnp.full(2, fill)})


# leaf, what NumPy is given for it, a leaf like it
LEAVES = [
    (jnp.ones((2, 3)), np.ones((2, 3), np.float32), jnp.zeros((2, 3))),
    (jnp.array(True), True, jnp.array(False)),
    (jnp.zeros((0, 2), jnp.int8), np.zeros((0, 2), np.int8), jnp.ones((0, 2), jnp.int8)),
    (jnp.ones(2, jnp.bfloat16), np.ones(2, ml_dtypes.bfloat16), jnp.zeros(2, jnp.bfloat16)),
    (jnp.ones(2, jnp.float8_e4m3fn), np.ones(2, ml_dtypes.float8_e4m3fn), jnp.zeros(2, jnp.float8_e4m3fn)),
    (jnp.ones(2), np.ones(2, np.float32), jax.ShapeDtypeStruct((2,), jnp.float32)),
    (np.array([1.5, 2.0]), np.array([1.5, 2.0]), np.zeros(2)),
    (np.float32(1.5), np.float32(1.5), np.float32(0)),
    (np.float64(1.5), np.float64(1.5), np.float64(0)),
    (ml_dtypes.bfloat16(1.5), np.array(1.5, ml_dtypes.bfloat16), ml_dtypes.bfloat16(0)),
    (True, True, False),
    (3, 3, 0),
    (1.5, 1.5, 0.0),
    (2j, 2j, 0j),
]


class TestLeaves:
    @pytest.mark.parametrize(("leaf", "array", "like"), LEAVES)
    def test_one(self, leaf: Any, array: Any, like: Any):
        data = records(array)
        assert written(leaf) == data
        loaded = read(data, like)
        assert type(loaded) is type(leaf)
        assert tether.tree_equal(loaded, leaf, typematch=True)

    @pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
    def test_typed_keys(self, impl: str):
        keys = jax.random.split(jax.random.key(3, impl=impl), 2)
        data = records(np.asarray(jax.random.key_data(keys)))
        assert written(keys) == data
        for like in (jax.random.split(jax.random.key(0, impl=impl), 2), jax.ShapeDtypeStruct(keys.shape, keys.dtype)):
            assert tether.tree_equal(read(data, like), keys)

    def test_what_is_no_number_is_left_out(self):
        assert written(["text", len, None, object, 1]) == records(1)
        assert read(records(1), ["other", max, None, int, 0]) == ["other", max, None, int, 1]


class TestModules:
    def test_by_value_with_ties_kinds_and_keys(self):
        model, like = Everything(1, fill=2.0), Everything(0)
        before = tether.snapshot(like)
        loaded = read(written(model), like)
        assert tether.tree_equal(loaded, model) and not tether.tree_equal(loaded, like)
        assert tether.tree_equal(like, before)
        assert loaded.tied is loaded.layers[0]
        loaded.layers[1].mean = jnp.ones(3)
        assert like.layers[1].mean.tolist() == [0, 0, 0]

    def test_the_records_are_the_leaves_in_order(self):
        layer = nn.Linear(2, 3)
        assert written((layer, 1)) == records(np.asarray(layer.weight), np.asarray(layer.bias), 1)

    def test_into_a_model_and_from_shapes(self):
        model, other = nn.Linear(2, 3), nn.Linear(2, 3)
        data = written(model)
        tether.update(other, read(data, other))
        assert tether.tree_equal(other, model)
        assert tether.tree_equal(read(data, tether.eval_shape(lambda: nn.Linear(2, 3))), model)

    def test_what_was_written_since(self):
        norm = nn.BatchNorm(2)
        norm(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        assert tether.tree_equal(read(written(norm), nn.BatchNorm(2)), norm)


class TestSpecs:
    def test_one_function(self):
        skip = lambda f, x: None if isinstance(x, int) else tether.default_serialise_filter_spec(f, x)
        assert written([1, 2.0], filter_spec=skip) == records(2.0)
        keep = lambda f, x: x if isinstance(x, int) else tether.default_deserialise_filter_spec(f, x)
        assert read(records(2.0), [5, 0.0], filter_spec=keep) == [5, 2.0]

    def test_a_prefix_of_functions(self):
        save, load = tether.default_serialise_filter_spec, tether.default_deserialise_filter_spec
        data = written({"a": [1, 2], "b": 3}, filter_spec={"a": lambda f, x: save(f, -x), "b": save})
        assert data == records(-1, -2, 3)
        spec = {"a": lambda f, x: -load(f, x), "b": load}
        assert read(data, {"a": [0, 0], "b": 0}, filter_spec=spec) == {"a": [1, 2], "b": 3}

    def test_one_that_converts(self):
        spec = lambda f, x: tether.default_deserialise_filter_spec(f, x).astype(x.dtype)
        assert read(records(np.ones(2)), jnp.zeros(2, jnp.bfloat16), filter_spec=spec).tolist() == [1, 1]

    def test_is_leaf(self):
        is_pair = lambda node: isinstance(node, tuple)
        save = lambda f, pair: tether.default_serialise_filter_spec(f, sum(pair))
        data = written([(1, 2), (3, 4)], filter_spec=save, is_leaf=is_pair)
        assert data == records(3, 7)
        load = lambda f, pair: (tether.default_deserialise_filter_spec(f, 0), 0)
        assert read(data, [(0, 0), (0, 0)], filter_spec=load, is_leaf=is_pair) == [(3, 0), (7, 0)]


class TestFiles:
    def test_names(self, tmp_path: Path):
        tether.tree_serialise_leaves(str(tmp_path / "model"), 1)
        tether.tree_serialise_leaves(tmp_path / "model.npy", 2)
        assert sorted(os.listdir(tmp_path)) == ["model.eqx", "model.npy"]
        assert tether.tree_deserialise_leaves(tmp_path / "model", 0) == 1
        assert int(np.load(tmp_path / "model.npy")) == 2

    def test_the_old_file_stays_until_the_new_one_is_whole(self, tmp_path: Path):
        path = tmp_path / "model.eqx"
        tether.tree_serialise_leaves(path, 1)

        def spec(f: Any, x: Any) -> None:
            tether.default_serialise_filter_spec(f, x)
            f.flush()
            assert path.read_bytes() == records(1)
            if x == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tether.tree_serialise_leaves(path, [2, 3], spec)
        assert os.listdir(tmp_path) == ["model.eqx"] and path.read_bytes() == records(1)
        tether.tree_serialise_leaves(path, [2, 4], spec)
        assert os.listdir(tmp_path) == ["model.eqx"] and path.read_bytes() == records(2, 4)

    def test_it_is_on_the_disk_before_it_has_its_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        calls = []
        replace, fsync = os.replace, os.fsync
        monkeypatch.setattr(os, "fsync", lambda f: (calls.append(os.fstat(f).st_size), fsync(f)))
        monkeypatch.setattr(os, "replace", lambda a, b: (calls.append(Path(a).parent == Path(b).parent), replace(a, b)))
        tether.tree_serialise_leaves(tmp_path / "model", [1.0, 2])
        assert calls == [len(records(1.0, 2)), True]

    def test_a_link_stays_a_link(self, tmp_path: Path):
        (tmp_path / "best.eqx").symlink_to(tmp_path / "real.eqx")
        tether.tree_serialise_leaves(tmp_path / "best.eqx", 1)
        assert (tmp_path / "best.eqx").is_symlink() and (tmp_path / "real.eqx").read_bytes() == records(1)

    def test_it_has_the_rights_of_any_new_file(self, tmp_path: Path):
        (tmp_path / "plain").touch()
        tether.tree_serialise_leaves(tmp_path / "model", 1)
        assert (tmp_path / "model.eqx").stat().st_mode == (tmp_path / "plain").stat().st_mode

    def test_several_trees_in_one_open_file(self):
        file = io.BytesIO()
        tether.tree_serialise_leaves(file, [1, 2])
        tether.tree_serialise_leaves(file, 3.0)
        file.seek(0)
        assert tether.tree_deserialise_leaves(file, [0, 0]) == [1, 2]
        assert tether.tree_deserialise_leaves(file, 0.0) == 3.0


SIZES = {"a": jnp.zeros((2, 3)), "b": [jnp.zeros(4), 0]}
A = np.ones((2, 3), np.float32)
FIX = "  fix:      a tree of the structure that was saved, or a filter_spec that converts"
ANOTHER = "tree_deserialise_leaves: the file has another leaf here.\n"


class TestMistakes:
    @pytest.mark.parametrize(
        ("data", "text"),
        [
            (
                records(A, A),
                f"{ANOTHER}  at:       tree['b'][0]\n  got:      float32[2, 3]\n  expected: float32[4]\n{FIX}",
            ),
            (
                records(np.ones((2, 3), np.float16)),
                f"{ANOTHER}  at:       tree['a']\n  got:      float16[2, 3]\n  expected: float32[2, 3]\n{FIX}",
            ),
            (
                records(np.ones((2, 3))),  # which JAX would round
                f"{ANOTHER}  at:       tree['a']\n  got:      float64[2, 3]\n  expected: float32[2, 3]\n{FIX}",
            ),
            (
                records(A, np.ones(4, np.float32), 1.0),
                f"{ANOTHER}  at:       tree['b'][1]\n  got:      float\n  expected: int\n{FIX}",
            ),
            (
                records(A, np.ones(4, np.float32), A),
                f"{ANOTHER}  at:       tree['b'][1]\n  got:      float32[2, 3]\n  expected: int\n{FIX}",
            ),
        ],
    )
    def test_another_leaf(self, data: bytes, text: str):
        with pytest.raises(StructureError) as caught:
            read(data, SIZES)
        assert str(caught.value) == text

    def test_another_type_of_equal_words(self):
        with pytest.raises(
            StructureError, match=r"got:      float32\[2\] \(Array\)\n  expected: float32\[2\] \(ndarray\)"
        ):
            read(b"", np.ones(2, np.float32), filter_spec=lambda f, x: jnp.asarray(x))

    def test_keys_of_another_generator(self):
        with pytest.raises(StructureError, match=r"got:      uint32\[2\]\n  expected: key<rbg>\[\]"):
            read(written(jax.random.key(0)), jax.random.key(0, impl="rbg"))

    @pytest.mark.parametrize("cut", [0, 3, 60, 130, 152, 170])
    def test_a_file_that_ends_early(self, cut: int, tmp_path: Path):
        data = records(A, np.ones(4, np.float32), 1)
        (tmp_path / "cut.eqx").write_bytes(data[:cut])
        for source in (tmp_path / "cut.eqx", io.BytesIO(data[:cut])):
            with pytest.raises(StructureError) as caught:
                tether.tree_deserialise_leaves(source, SIZES)
            error = caught.value
            assert error.what == "tree_deserialise_leaves: the file ends before the last leaf."
            assert error.at == ("tree['a']" if cut < 152 else "tree['b'][0]")
            assert error.got.startswith("the end of the file (")
            assert error.fixes == ["a tree of the structure that was saved, and a file that was written to its end"]

    def test_a_file_of_something_else(self):
        with pytest.raises(StructureError) as caught:
            read(b"PK\x03\x04, say, of an npz", SIZES)
        text = str(caught.value)
        assert text.startswith("tree_deserialise_leaves: this is no file of leaves.\n  at:       tree['a']\n")
        assert text.endswith("expected: an .npy record for each leaf, as tree_serialise_leaves writes it")

    def test_objects_are_not_unpickled(self):
        with pytest.raises(StructureError, match="this is no file of leaves"):
            read(records(np.array([print], object)) + records(1), [np.array([None]), 0])

    def test_a_file_that_goes_on(self, tmp_path: Path):
        path = tmp_path / "more.eqx"
        path.write_bytes(records(1, 2))
        with pytest.raises(StructureError) as caught:
            tether.tree_deserialise_leaves(path, [0])
        assert str(caught.value) == (
            "tree_deserialise_leaves: the file goes on after the last leaf.\n"
            f"  at:       {path}\n"
            "  got:      136 of 272 bytes are those of the leaves\n"
            "  expected: a tree of the structure that was saved\n"
            "  fix:      an open file in place of the path, if only the first leaves are wanted"
        )
        with open(path, "rb") as file:
            assert tether.tree_deserialise_leaves(file, [0]) == [1]

    @pytest.mark.parametrize(
        ("leaf", "text"),
        [
            (
                tether.State(0),
                "a Variable lies in the tree by itself.\n  at:       tree['x']\n  got:      a State\n"
                "  expected: a module, which is written by value; or an array\n"
                "  fix:      one of\n    1. give its .value\n    2. hold it in a module",
            ),
            (
                tether.State({"k": 0}),
                "a Variable lies in the tree by itself.\n  at:       tree['x']\n  got:      the Variables of a pytree\n"
                "  expected: a module, which is written by value; or an array\n"
                "  fix:      one of\n    1. give its .value\n    2. hold it in a module",
            ),
            (
                jax.ShapeDtypeStruct((2,), jnp.float32),
                "a leaf has no numbers, only a shape.\n  at:       tree['x']\n  got:      float32[2] of eval_shape\n"
                "  expected: arrays\n  fix:      make the model, and save that",
            ),
            (
                np.array([None]),
                "NumPy has no dtype for this leaf.\n  at:       tree['x']\n  got:      object[1]\n"
                "  expected: numbers of a fixed size\n  fix:      a filter_spec that leaves this leaf out",
            ),
            (
                2**70,
                "NumPy has no dtype for this leaf.\n  at:       tree['x']\n  got:      1180591620717411303424\n"
                "  expected: numbers of a fixed size\n  fix:      a filter_spec that leaves this leaf out",
            ),
        ],
    )
    def test_what_can_not_be_written(self, leaf: Any, text: str):
        with pytest.raises(ArgumentError) as caught:
            written({"x": leaf})
        assert str(caught.value) == f"tree_serialise_leaves: {text}"

    def test_a_variable_can_not_be_read_either(self):
        with pytest.raises(ArgumentError, match="tree_deserialise_leaves: a Variable lies in the tree by itself"):
            read(records(1), [tether.State(0)])

    def test_a_spec_that_does_not_fit(self):
        save = tether.default_serialise_filter_spec
        with pytest.raises(StructureError) as caught:
            written({"a": (1, 2)}, filter_spec={"a": (save, save, save)})
        assert str(caught.value) == (
            "tree_serialise_leaves: filter_spec is not a prefix of the tree.\n"
            "  at:       tree['a']\n  got:      tuple of 2\n  expected: tuple of 3\n"
            "  fix:      one function for all leaves"
        )
        with pytest.raises(StructureError) as caught:
            read(b"", [1, 2], filter_spec=[save, True])
        assert str(caught.value) == (
            "tree_deserialise_leaves: a leaf of filter_spec is no function.\n"
            "  at:       filter_spec[1]\n  got:      True\n  expected: a function of the file and a leaf\n"
            "  fix:      lambda f, x: x, for leaves that are not in the file"
        )

    @pytest.mark.parametrize("name", ["tree_serialise_leaves", "tree_deserialise_leaves"])
    def test_no_file(self, name: str):
        with pytest.raises(ArgumentError) as caught:
            getattr(tether, name)([1], "model")
        assert str(caught.value) == (
            f"{name}: this is neither a path nor an open file.\n  got:      list of 1\n"
            f"  expected: a str, a path, or a binary file\n  fix:      {name}(path, tree)"
        )

    def test_an_error_of_ones_own_says_where(self):
        def spec(f: Any, x: Any) -> None:
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError) as caught:
            written({"a": [1]}, filter_spec=spec)
        assert caught.value.__notes__ == ["at the leaf tree['a'][0]"]
