# SPDX-License-Identifier: Apache-2.0
"""Summaries, read back from the event files with TensorBoard's own reader."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import PIL.Image as PIL
import pytest

import tether.compat.objax as objax
from tether.compat.objax import jaxboard
from tether.errors import ArgumentError


def events(folder: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (file,) = os.listdir(folder)
    return list(LegacyEventFileLoader(str(folder / file)).Load())


class TestScalars:
    def test_reduced_when_asked_for(self):
        summary = jaxboard.Summary()
        for value in (1.0, jnp.float32(2.0), np.float64(6.0)):
            summary.scalar("mean", value)
            summary.scalar("first", value, reduce=jaxboard.Reducer.FIRST)
            summary.scalar("last", value, jaxboard.Reducer.LAST)
            summary.scalar("most", value, reduce=max)
        assert {entry.tag: entry.simple_value for entry in summary().value} == {
            "mean": 3.0,
            "first": 1.0,
            "last": 6.0,
            "most": 6.0,
        }

    def test_the_first_reduce_of_a_tag_counts(self):
        summary = jaxboard.Summary()
        summary.scalar("x", 1.0, jaxboard.Reducer.LAST)
        summary.scalar("x", 5.0, jaxboard.Reducer.FIRST)
        assert summary().value[0].simple_value == 5.0

    def test_reducers_are_functions(self):
        assert jaxboard.Reducer.MEAN([1, 3]) == 2 and list(jaxboard.Reducer) == []


def test_a_file_as_tensorboard_reads_it(tmp_path: Path):
    image = np.full((1, 2, 3), -1.0)
    image[0, 1, 2] = 1
    with jaxboard.SummaryWriter(str(tmp_path / "new" / "run")) as writer:
        for step in range(3):
            summary = jaxboard.Summary()
            summary.scalar("loss", step * 0.5)
            writer.write(summary, jnp.array(step))
        summary = jaxboard.Summary()
        summary.image("picture", image)
        summary.text("note", "größer")
        writer.write(summary, step=7)
    first, *rest = events(tmp_path / "new" / "run")
    assert first.file_version == "brain.Event:2"
    assert [(e.step, e.summary.value[0].simple_value) for e in rest[:3]] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    picture, note = rest[3].summary.value
    assert rest[3].step == 7 and abs(rest[3].wall_time - os.path.getmtime(tmp_path)) < 60
    assert (picture.tag, picture.image.height, picture.image.width, picture.image.colorspace) == ("picture", 2, 3, 1)
    pixels = np.asarray(PIL.open(io.BytesIO(picture.image.encoded_image_string)))
    assert pixels[..., 0].tolist() == [[0, 0, 0], [0, 0, 255]]
    assert (note.tag, note.metadata.plugin_data.plugin_name) == ("note", "text")
    assert note.tensor.string_val[0].decode() == "größer"
    assert [d.size for d in note.tensor.tensor_shape.dim] == [1]


def test_closed_by_hand(tmp_path: Path):
    writer = jaxboard.SummaryWriter(str(tmp_path), queue_size=1, write_interval=1)
    writer.write(jaxboard.Summary(), 1)
    writer.close()
    assert [event.step for event in events(tmp_path)] == [0, 1]


class TestMistakes:
    def test_an_entry_of_another_kind(self):
        with pytest.raises(AssertionError) as caught:
            jaxboard.Summary(loss=jnp.ones(()))()
        assert str(caught.value) == (
            "jaxboard.Summary: this entry is of no known kind.\n"
            "  at:       loss\n"
            "  got:      float32[]\n"
            "  expected: a DelayedScalar, an Image or a Text\n"
            "  fix:      one of\n"
            "    1. summary.scalar(tag, value)\n"
            "    2. summary.image(tag, image)\n"
            "    3. summary.text(tag, text)"
        )

    def test_without_tensorboard(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
            monkeypatch.delitem(sys.modules, name)

        def find_spec(name: str, *_: Any) -> None:
            if name == "tensorboard":
                raise ModuleNotFoundError(name=name)

        monkeypatch.setattr(sys, "meta_path", [types.SimpleNamespace(find_spec=find_spec), *sys.meta_path])
        with pytest.raises(ArgumentError) as caught:
            jaxboard.SummaryWriter(str(tmp_path / "run"))
        assert str(caught.value) == (
            "objax.jaxboard.SummaryWriter: the package tensorboard is not installed.\n"
            "  got:      no module 'tensorboard'\n"
            "  expected: tensorboard, which Tether itself doesn't need\n"
            "  fix:      pip install tensorboard"
        )
        assert not (tmp_path / "run").exists()


def test_what_the_import_leaves_alone():
    program = (
        "import sys, tether.compat.objax as objax\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'PIL', 'tensorboard', 'tensorflow',"
        " 'dp_accounting'}), 'scipy.stats' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout == "[] False\n"
    assert objax.jaxboard is jaxboard
