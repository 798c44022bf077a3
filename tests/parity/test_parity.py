# SPDX-License-Identifier: Apache-2.0
"""What PyTorch, Flax NNX, Equinox and Haiku gave, and what Tether gives now."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.parity import harness
from tests.parity.make import PAGE, table
from tether import nn

ALL = [pytest.param(f, name, id=name) for f in harness.FAMILIES for name in harness.cases(f)]


@pytest.mark.parametrize(("family", "name"), ALL)
def test_layer_equals_those_of_others(family: str, name: str):
    case = harness.cases(family)[name]
    ours = harness.of_tether(case)
    assert case.peers
    for library in case.peers:
        right = harness.stored(family)[name, library]
        assert set(right) == set(harness.asked(case, library, ours)), f"{library}: something isn't compared"
        assert harness.difference(ours, right) <= case.bound, library


def test_a_difference_is_seen():
    right = {"0 output 0": np.asarray([1.0, 20.0])}
    for wrong, gap in [([1.0, 20.0], 0.0), ([1.0, 20.2], 0.01), ([np.nan, 20.0], np.inf), ([1.0, np.inf], np.inf)]:
        assert harness.difference({"0 output 0": np.asarray(wrong)}, right) == pytest.approx(gap)
    with pytest.raises(ValueError, match="here"):
        harness.difference({"0 output 0": np.zeros(1)}, right)


@pytest.mark.parametrize("family", harness.FAMILIES)
def test_nothing_is_stored_that_no_case_asks_for(family: str):
    asked = {(name, library) for name, case in harness.cases(family).items() for library in case.peers}
    assert set(harness.stored(family)) == asked


def test_the_page_has_every_layer_and_its_number_of_settings():
    counts: dict[tuple[str, str], list[float]] = {}
    for family in harness.FAMILIES:
        for case in harness.cases(family).values():
            for library in case.peers:
                counts.setdefault((case.layer, library), []).append(0.0)
    without_numbers = lambda text: re.sub(r": 1e-\d+", "", text)
    assert without_numbers(PAGE.read_text()).endswith(without_numbers(table(counts)))


def test_layers_are_those_of_the_library():
    names = {case.layer for family in harness.FAMILIES for case in harness.cases(family).values()}
    assert {name for name in names if not hasattr(nn, name)} == set()
