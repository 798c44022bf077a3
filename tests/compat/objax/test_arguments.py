# SPDX-License-Identifier: Apache-2.0
"""Arguments by name and by position."""

from __future__ import annotations

import pytest

from tether.compat.objax.util import args_indexes, local_kwargs, override_args_kwargs, positional_args_names


def f(a, b, /, c, d=4, *rest, e, g=6, **others):
    return a, b, c, d, rest, e, g, others


def h(x, *, y=1):
    return x, y


def test_positions():
    assert positional_args_names(f) == ["a", "b", "c", "d"]
    assert list(args_indexes(f, ["d", "a"])) == [3, 0]
    with pytest.raises(ValueError, match="does not have argument of name e") as caught:
        list(args_indexes(f, ["e"]))
    assert "expected: 'a' or 'b' or 'c' or 'd'" in str(caught.value)


def test_those_that_a_function_takes():
    assert local_kwargs({"y": 2, "z": 3}, h) == {"y": 2}
    assert local_kwargs({"z": 3}, f) == {"z": 3}


def test_others_in_their_place():
    assert override_args_kwargs(f, (1, 2, 3), {"e": 5}, {"b": 20, "e": 50, "new": 7}) == (
        [1, 20, 3],
        {"e": 50, "new": 7},
    )
    assert override_args_kwargs(lambda *args, x=1: 0, (1, 2), {}, {"x": 9}) == ([1, 2], {"x": 9})
    forced = {"x": 5}
    override_args_kwargs(h, (1,), {}, forced)
    assert forced == {"x": 5}
