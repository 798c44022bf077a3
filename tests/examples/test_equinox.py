# SPDX-License-Identifier: Apache-2.0
"""The programs written for Equinox, run as its users would run them: each does what it is there to show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples.programs import numbers, run


def test_cnn_reads_digits():
    pytest.importorskip("sklearn")
    text = run("equinox/cnn.py", "--steps", "100")
    losses = numbers(r"loss (\d\.\d+)", text)
    assert losses[-1] < losses[0] / 2 and numbers(r"accuracy (\d\.\d+)", text)[-1] > 0.95


def test_rnn_tells_which_way():
    text = run("equinox/rnn.py", "--steps", "120")
    losses = numbers(r"loss (\d\.\d+)", text)
    assert losses[-1] < 0.1 * losses[0] and numbers(r"accuracy (\d\.\d+)", text)[-1] > 0.98


def test_wgan_draws_all_clusters():
    text = run("equinox/wgan.py", "--steps", "300")
    distances, least = numbers(r"distance to the data (\d\.\d+)", text), numbers(r"data: distance (\d\.\d+)", text)[0]
    assert least < distances[-1] < 0.4 * distances[0]
    near, rarest = numbers(r"(\d\.\d{3})", text.splitlines()[-2])
    assert near > 0.25 and rarest > 0.005  # 0.05 and 0 before training
    first, *_, last = numbers(r"(\d\.\d{3})", text.splitlines()[-1])
    assert abs(first - 1) < 0.1 and abs(last - 1) < 0.01  # about 4 and 0.6 of layers without the norm


def test_frozen_layers_stay_and_help():
    pytest.importorskip("sklearn")
    text = run("equinox/frozen_layer.py", "--steps", "200")
    digits, before, by_spec, by_parts, without = numbers(r"(\d\.\d{4})", text)
    assert digits > 0.95 and by_spec == by_parts > max(0.87, before, without + 0.02)
    assert text.count("all else as it was: True") == 2 and "bit for bit: True" in text


def test_serialisation_goes_on(tmp_path: Path):
    pytest.importorskip("sklearn")
    path = tmp_path / "half.eqx"
    text = run("equinox/serialisation.py", "--steps", "100", "--path", str(path))
    assert "loaded at step 50" in text and "moments True and running statistics True" in text
    first, straight, resumed = numbers(r"loss (\d\.\d+)", text)
    assert straight == resumed != first and numbers(r"accuracy (\d\.\d+)", text)[0] > 0.9
    header, _, rest = path.read_bytes().partition(b"\n")
    assert json.loads(header) == {"width": 64, "dropout": 0.2, "seed": 0}
    assert rest.count(b"\x93NUMPY") > 3 * 6  # each of the six weights, and its two moments


def test_stateful_keeps_its_leaves_and_its_state():
    text = run("equinox/stateful.py", "--steps", "200")
    early, late = numbers(r"(\d+\.\d+) (?:at first|in the last)", text)
    before, after = numbers(r"(\d+) (?:before|after)", text)
    assert late < early / 10 and before == after
    assert "batches counted: 200" in text and "off by less than 0.001: True" in text
    assert numbers(r"error: (\d\.\d+)", text)[0] < 0.1
    assert "the same answer alone: True" in text and "moves the state: True" in text
