# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: which files are kept, which is restored, and what is said."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax
from tether.compat.objax.io.checkpoint import Checkpoint


def state(value: float) -> objax.VarCollection:
    return objax.VarCollection(v=objax.StateVar(jnp.array(value)))


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "ckpt"))


def test_the_last_ones_are_kept_and_the_last_is_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint = Checkpoint(str(tmp_path), keep_ckpts=2)
    for idx in (1, 2, 10, 3):
        checkpoint.save(state(idx), idx)
    assert files(tmp_path) == ["0000000003.npz", "0000000010.npz"]
    vc = state(0)
    path = str(tmp_path / "ckpt" / "0000000010.npz")
    assert checkpoint.restore(vc) == (10, path)
    assert vc["v"].value == 10
    assert capsys.readouterr().out == f"Resuming from {path}\n"
    assert checkpoint.restore(vc, 3) == (3, str(tmp_path / "ckpt" / "0000000003.npz"))
    assert vc["v"].value == 3


def test_zero_keeps_all(tmp_path: Path):
    checkpoint = Checkpoint(str(tmp_path), keep_ckpts=0)
    for idx in range(4):
        checkpoint.save(state(idx), idx)
    assert len(files(tmp_path)) == 4


def test_beyond_ten_digits_the_number_counts(tmp_path: Path):
    checkpoint = Checkpoint(str(tmp_path), keep_ckpts=1, verbose=False)
    checkpoint.save(state(1), 9_999_999_999)
    checkpoint.save(state(2), 10_000_000_000)
    assert checkpoint.restore(state(0))[0] == 10_000_000_000
    assert files(tmp_path) == ["10000000000.npz"]


def test_other_files_stay(tmp_path: Path):
    checkpoint = Checkpoint(str(tmp_path), keep_ckpts=1, verbose=False)
    np.savez(tmp_path / "ckpt" / "best.npz", x=np.ones(1))
    for idx in (1, 2):
        checkpoint.save(state(idx), idx)
    assert files(tmp_path) == ["0000000002.npz", "best.npz"]
    assert checkpoint.restore(state(0))[0] == 2


def test_a_folder_whose_name_is_a_pattern(tmp_path: Path):
    checkpoint = Checkpoint(str(tmp_path / "lr[0.1]*"), keep_ckpts=1, verbose=False)
    checkpoint.save(state(1), 1)
    checkpoint.save(state(2), 2)
    assert checkpoint.restore(state(0))[0] == 2
    assert files(tmp_path / "lr[0.1]*") == ["0000000002.npz"]


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    vc = state(7)
    assert Checkpoint(str(tmp_path), 1).restore(vc) == (0, "")
    assert Checkpoint(str(tmp_path), 1, verbose=False).restore(vc) == (0, "")
    assert capsys.readouterr().out == "No checkpoints found. Skipping restoring variables.\n"
    assert vc["v"].value == 7
    with pytest.raises(FileNotFoundError):
        Checkpoint(str(tmp_path), 1, verbose=False).restore(vc, 5)


def test_without_making_folders(tmp_path: Path):
    checkpoint = Checkpoint(str(tmp_path / "a"), 1, makedir=False)
    assert not (tmp_path / "a").exists()
    with pytest.raises(FileNotFoundError):
        checkpoint.save(state(1), 1)


def test_a_subclass_with_its_own_files(tmp_path: Path):
    seen = []

    class Own(Checkpoint):
        DIR_NAME = "mine"
        FILE_MATCH = "*.txt"
        FILE_FORMAT = "%d.txt"
        SAVE_FN = staticmethod(lambda file, vc: Path(file).write_text(str(vc["v"].value)))
        LOAD_FN = staticmethod(lambda file, vc: seen.append(Path(file).read_text()))

    checkpoint = Own(str(tmp_path), 1, verbose=False)
    checkpoint.save(state(1), 9)
    checkpoint.save(state(2.0), 10)
    assert os.listdir(tmp_path / "mine") == ["10.txt"]
    checkpoint.restore(state(0))
    assert seen == ["2.0"]


def test_number_of_a_file():
    assert Checkpoint.checkpoint_idx("/a/b/0000000123.npz") == 123


class TestMistakes:
    @pytest.mark.parametrize("verb", ["save", "restore"])
    def test_a_module_for_its_variables(self, verb: str, tmp_path: Path):
        with pytest.raises(AssertionError) as caught:
            getattr(Checkpoint(str(tmp_path), 1), verb)(objax.nn.Linear(1, 1), 1)
        assert str(caught.value) == (
            f"Must pass a VarCollection to {verb}; received type {objax.nn.Linear}.\n"
            "  got:      Linear object\n"
            "  expected: a VarCollection\n"
            "  fix:      module.vars()"
        )

    def test_a_negative_number_of_files(self, tmp_path: Path):
        with pytest.raises(AssertionError) as caught:
            Checkpoint(str(tmp_path), -1)
        assert str(caught.value) == (
            "Checkpoint: keep_ckpts is negative.\n  got:      -1\n  expected: a number of files, or 0 for all"
        )
