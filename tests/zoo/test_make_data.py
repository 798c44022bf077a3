# SPDX-License-Identifier: Apache-2.0
"""What is stored is what PyTorch gives, where torch is installed."""

from __future__ import annotations

import pytest

from tests.zoo import make_data, oracle


def test_data_are_of_these_cases():
    assert oracle.stored().keys() == oracle.CASES.keys()


@pytest.mark.parametrize("name", oracle.CASES)
def test_stored_is_what_the_twin_gives(name: str):
    pytest.importorskip("torch")
    case = oracle.CASES[name]
    gaps = oracle.differences(make_data.of_twin(case), oracle.stored()[name])
    assert max(gaps.values()) < 1e-12, gaps
