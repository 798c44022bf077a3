# SPDX-License-Identifier: Apache-2.0
"""Rules for names, transforms for layouts."""

from __future__ import annotations

import numpy as np
import pytest

from tether import errors
from tether.interop._rules import exactly, renamed, transformer


def test_rules_apply_one_after_the_other():
    rules = {r"^module\.": "", r"\bh\.(\d+)": r"blocks.\1", "gamma$": "weight", "blocks.0": "first"}
    names = ["module.h.0.ln.gamma", "module.h.1.ln.gamma", "module.head.gamma_2", "h.3.h.4"]
    assert renamed(names, rules, "load") == dict(
        zip(names, ["first.ln.weight", "blocks.1.ln.weight", "head.gamma_2", "blocks.3.blocks.4"], strict=True)
    )


def test_none_leaves_out_what_the_rules_so_far_have_made():
    assert renamed(["a.mask", "b.weight", "mask.b"], {"^a": "c", r"^c.*mask$": None}, "load") == {
        "b.weight": "b.weight",
        "mask.b": "mask.b",
    }


def test_two_tensors_of_one_name():
    with pytest.raises(errors.ArgumentError) as error:
        renamed(["a.weight", "b.weight"], {"^[ab]": "c"}, "interop.torch.load")
    assert str(error.value) == (
        "interop.torch.load: the rules give two tensors one name.\n"
        "  at:       'a.weight' and 'b.weight'\n"
        "  got:      'c.weight' for both\n"
        "  expected: a name for each, or None for the one to leave out\n"
        "  fix:      a rule in front: rules={'^b\\\\.weight$': None, ...}"
    )
    assert renamed(["a.weight", "b.weight"], {r"^b\.weight$": None, "^[ab]": "c"}, "load") == {"a.weight": "c.weight"}


def test_a_name_onto_one_that_stays():
    with pytest.raises(errors.ArgumentError, match="'b' for both"):
        renamed(["b", "a"], {"^a$": "b"}, "load")


@pytest.mark.parametrize(("pattern", "why"), [("(", "'(': missing ), unterminated subpattern"), (3, "3: ")])
def test_no_regular_expression(pattern, why):
    with pytest.raises(errors.ArgumentError) as error:
        renamed([], {pattern: ""}, "interop.torch.load")
    assert str(error.value).startswith(f"interop.torch.load: a rule is no regular expression.\n  got:      {why}")
    with pytest.raises(errors.ArgumentError):
        transformer({pattern: np.transpose}, "load")


def test_transforms_apply_where_their_pattern_is_found():
    transform = transformer({r"c_\w+\.weight$": np.transpose, "^double": lambda x: 2 * x}, "load")
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(transform("h.c_attn.weight", x), x.T)
    np.testing.assert_array_equal(transform("double.c_fc.weight", x), 2 * x.T)
    assert transform("h.c_attn.weight_2", x) is x


def test_transform_that_gives_no_array():
    with pytest.raises(errors.ArgumentError) as error:
        transformer({"weight": lambda x: None}, "interop.torch.load")("a.weight", np.ones(2))
    assert str(error.value) == (
        "interop.torch.load: a transform gave no array.\n"
        "  at:       'a.weight', by the transform for 'weight'\n"
        "  got:      None\n"
        "  expected: an array\n"
        "  fix:      a function of an array that returns one, such as np.transpose"
    )


def test_exactly_finds_one_name_alone():
    assert renamed(["a.b", "axb", "a.b.c"], {exactly("a.b"): None}, "load") == {"axb": "axb", "a.b.c": "a.b.c"}


@pytest.mark.parametrize(("rules", "got"), [([("a", "b")], "rules=list of 1"), ({"a": 3}, "3, for a pattern")])
def test_rules_of_another_form(rules, got):
    with pytest.raises(errors.ArgumentError) as error:
        renamed([], rules, "interop.torch.load")
    assert str(error.value) == (
        "interop.torch.load: rules are not of the form that is expected.\n"
        f"  got:      {got}\n"
        "  expected: a dict from patterns, each to a text, or None\n"
        "  fix:      rules={'^module\\.': ''}"
    )


@pytest.mark.parametrize("transforms", [np.transpose, {"weight": "T"}])
def test_transforms_of_another_form(transforms):
    with pytest.raises(errors.ArgumentError) as error:
        transformer(transforms, "interop.torch.load")
    assert error.value.expected == "a dict from patterns, each to a function of an array"
    assert error.value.fixes == ["transforms={'weight$': np.transpose}"]
