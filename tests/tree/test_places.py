# SPDX-License-Identifier: Apache-2.0
"""Where modules lie, shared ones too."""

from __future__ import annotations

import tether
from tether.tree._places import Places


class Leaf(tether.Module):
    def __init__(self):
        self.weight = tether.Param(1.0)


class Pair(tether.Module):
    def __init__(self, one, two):
        self.parts = {"one": one, "two.b": two}


class Net(tether.Module):
    def __init__(self):
        self.pair = Pair(Leaf(), Leaf())
        self.again = self.pair
        self.leaf = self.pair.parts["two.b"]


def test_first_places():
    places = Places.of(Net())
    assert set(places.modules) == {
        "",
        "pair",
        "pair.parts['one']",
        "pair.parts['two.b']",
        "again",
        "again.parts['one']",
        "again.parts['two.b']",
        "leaf",
    }
    assert (
        list(places.first_modules())
        == [path for path in places.modules if places.is_first(path)]
        == [
            "",
            "pair",
            "pair.parts['one']",
            "pair.parts['two.b']",
        ]
    )
    assert places.first_of("leaf") == places.first_of("again.parts['two.b']") == "pair.parts['two.b']"


def test_owner():
    places = Places.of(Net())
    assert places.owner("pair.parts['two.b'].weight") == "pair.parts['two.b']"
    assert places.owner("pair.parts['two.b']") == "pair"
    assert places.owner("leaf.weight") == "leaf"
    assert places.owner("leaf") == places.owner("") == ""


def test_all_places_of_a_module():
    places = Places.of(Net())
    assert places.all_of("pair") == places.all_of("again") == ["pair", "again"]
    assert places.all_of("leaf") == ["pair.parts['two.b']", "leaf"]
    assert places.all_of("pair.parts['one']") == ["pair.parts['one']"]
