# SPDX-License-Identifier: Apache-2.0
"""The small helpers."""

from __future__ import annotations

import re

import pytest

import tether.compat.objax as objax
from tether.compat.objax.util import EasyDict, Renamer, dummy_context_mgr, ilog2, to_interpolate, to_padding, to_tuple


def test_easy_dict():
    d = EasyDict(a=1)
    d.b = 2
    assert d == {"a": 1, "b": 2} and d["b"] == d.b
    with pytest.raises(AttributeError):
        _ = d.c


def test_renamer():
    assert Renamer({"ab": "x", "a": "y", ".": "-"})("ab.a") == "x-y"
    in_order = Renamer([(re.compile("a+"), "b"), (re.compile("b"), "c")], chain=Renamer(str.upper))
    assert in_order("aab") == "CC"


def test_logarithm_and_tuples():
    assert [ilog2(x) for x in (1, 2, 3, 1024, 0.25)] == [0, 1, 2, 10, -2]
    assert (to_tuple(3, 2), to_tuple((1, 2, 3), 2), to_tuple([1, 2], 2)) == ((3, 3), (1, 2, 3), (1, 2))
    with dummy_context_mgr() as nothing:
        assert nothing is None


def test_padding():
    assert to_padding(objax.ConvPadding.SAME, 2) == to_padding("same", 2) == "SAME"
    assert to_padding(1, 2) == ((1, 1), (1, 1)) and to_padding((1, 2), 2) == ((1, 2), (1, 2))
    assert to_padding([(1, 2), (3, 4)], 2) == ((1, 2), (3, 4))
    with pytest.raises(KeyError) as caught:
        to_padding("full", 2)
    assert "got:      'full'" in str(caught.value) and "SAME and VALID" in str(caught.value)


def test_interpolation():
    assert to_interpolate(objax.Interpolate.CUBIC) == to_interpolate("Cubic") == "cubic"
    with pytest.raises(KeyError, match="NEAREST, LINEAR"):
        to_interpolate("no such")
    with pytest.raises(AssertionError, match="NEAREST, LINEAR"):
        to_interpolate(3)
