# SPDX-License-Identifier: Apache-2.0
"""Specifications by argument."""

from __future__ import annotations

import pytest

from tether.compat.equinox._signature import Specs


def test_each_argument_has_its_own_or_the_default():
    specs = Specs.of("f", lambda a, b=2, *c, d=4, **e: None, "default", ("of a",), {"d": "of d", "x": "of x"})
    args, kwargs, of_each = specs.bind((1,), {"x": 5, "y": 6})
    assert (args, kwargs) == ((1, 2), {"d": 4, "x": 5, "y": 6})
    assert of_each == (("of a", "default"), {"d": "of d", "x": "of x", "y": "default"})
    args, _, of_each = specs.bind((1, 2, 3), {})
    assert args == (1, 2, 3) and of_each[0] == ("of a", "default", "default")


def test_a_name_that_is_none():
    with pytest.raises(ValueError, match="don't fit the signature"):
        Specs.of("filter_vmap", lambda a: None, None, (), {"b": 0})
