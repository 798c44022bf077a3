# SPDX-License-Identifier: Apache-2.0
"""The programs written for Objax, run as its users would run them: each learns what it is there to learn."""

from __future__ import annotations

import pytest

from tests.examples.programs import numbers, run


def test_digits_cnn_learns_and_is_restored():
    pytest.importorskip("sklearn")
    text = run("objax/digits_cnn.py", "--epochs", "6")
    losses = numbers(r"loss (\d\.\d+)", text)
    assert losses[-1] < losses[0] / 4 and numbers(r"accuracy (\d\.\d+)", text)[-1] > 0.9
    assert "Resuming from" in text and "restored: True" in text


def test_digits_dp_learns_and_spends_its_budget():
    pytest.importorskip("sklearn")
    text = run("objax/digits_dp.py", "--steps", "120")
    epsilon = numbers(r"epsilon (\d+\.\d+)", text)
    assert numbers(r"accuracy (\d\.\d+)", text)[-1] > 0.75
    assert len(epsilon) == 4 and epsilon == sorted(set(epsilon)) and 2 < epsilon[0] < epsilon[-1] < 10


def test_maml_learns_to_learn():
    text = run("objax/maml.py", "--steps", "800")
    before, first, *_ = numbers(r"(\d\.\d{4})(?:,|$)", text.splitlines()[-1])
    assert first < before / 2


def test_text_rnn_predicts_letters():
    text = run("objax/text_rnn.py", "--epochs", "8")
    nats, chance = numbers(r"(\d\.\d+) nats", text), numbers(r"of (\d\.\d+) by chance", text)[0]
    assert nats[-1] < 0.65 * chance and nats[-1] < nats[0] and len(text.splitlines()[-1]) == 68


def test_gpt2_samples_alike_with_and_without_a_past():
    text = run("objax/gpt2_sampling.py", "--tokens", "3")
    assert text.startswith("Hello, ") and "the same with a past: True" in text
