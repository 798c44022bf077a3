# SPDX-License-Identifier: Apache-2.0
"""Views: the same Variables, other settings; explicit parts keep theirs; a view thrown away warns."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tether
from tether import nn
from tether._modules.views import result_is_discarded
from tether.errors import ArgumentError, SelectionError, StaticError, TetherError, UnusedViewWarning


def make() -> Any:
    return nn.Sequential([nn.Linear(2, 2), nn.BatchNorm(2), nn.Sequential([nn.Dropout(0.5), nn.BatchNorm(2)])])


def modes(model: Any) -> dict[str, bool]:
    return {path: part.training for path, part in tether.modules(model).items()}


class TestMode:
    def test_whole(self):
        model = make()
        evaluating = model.eval()
        assert not any(modes(evaluating).values()) and all(modes(model).values())
        assert all(modes(evaluating.train()).values())

    def test_explicit_part_survives_train(self):
        model = tether.view(make(), "[1]", training=False)
        assert modes(model) == {"": True, "[0]": True, "[1]": False, "[2]": True, "[2][0]": True, "[2][1]": True}
        assert modes(model.train())["[1]"] is False
        assert modes(model.eval().train())["[1]"] is False
        assert modes(tether.view(model, "[1]", training=True))["[1]"] is True

    def test_explicit_part_covers_what_is_below(self):
        model = tether.view(make(), "[2]", training=False).train()
        assert [path for path, mode in modes(model).items() if not mode] == ["[2]", "[2][0]", "[2][1]"]

    @pytest.mark.parametrize("select", [nn.BatchNorm, "[?]*[1]", ["[1]", nn.BatchNorm]], ids=["class", "glob", "list"])
    def test_selected(self, select: Any):
        model = tether.view(make(), select, training=False)
        assert modes(model)["[2][1]"] is False and modes(model)["[0]"] is True

    def test_selected_by_the_module_itself_and_by_negation(self):
        model = make()
        assert [p for p, mode in modes(tether.view(model, model[1], training=False)).items() if not mode] == ["[1]"]

    def test_shared_module_by_its_second_place(self):
        class Two(tether.Module):
            def __init__(self):
                self.a = nn.BatchNorm(2)
                self.b = self.a

        assert tether.view(Two(), "b", training=False).a.training is False

    def test_of_a_call_wins_over_the_view_but_not_over_an_explicit_part(self):
        class Mode(tether.Module):
            def __call__(self) -> bool:
                return self.training

        class Pair(tether.Module):
            def __init__(self):
                self.a, self.b = Mode(), Mode()

            def __call__(self) -> Any:
                return self.a(), self.b()

        pair = tether.view(Pair(), "b", training=False)
        assert pair() == (True, False)
        assert pair(training=True) == (True, False)
        assert pair.eval()(training=True) == (True, False)

    def test_jit_sees_the_mode(self):
        """CASES 5: f = jit(m); f(x); then the evaluating view; 2 traces for any number of alternations."""
        model = nn.Sequential([nn.BatchNorm(1, decay=0.5)])
        f = tether.jit(lambda m, x: m(x))
        x = jnp.asarray([[1.0], [3.0]])
        assert [round(v, 3) for v in f(model, x).ravel().tolist()] == [-1, 1]
        for _ in range(3):
            evaluated = f(model.eval(), x)
            f(model, x)
        assert evaluated.ravel().tolist() != [-1, 1]
        assert f.traces == 2

    def test_a_part_that_also_stands_elsewhere_is_selected_with_what_it_stands_in(self):
        """Found by `make fuzz`: a shared module has its first path, and was not below any other."""
        drop = nn.Dropout(0.5)
        model = nn.Sequential([drop, nn.Sequential([drop, nn.Dropout(0.2)])])
        view = tether.view(model, "[1]", training=False)
        assert modes(view) == {"": True, "[0]": False, "[1]": False, "[1][1]": False} and view[1][0] is view[0]
        assert modes(view.train())["[0]"] is False
        assert (tether.view(model, "[1]", p=0.9)[0].p, model[0].p) == (0.9, 0.5)


class TestSharing:
    def test_variables_are_the_same(self):
        model = make()
        for view in (model.eval(), tether.freeze(model), tether.view(model, nn.Dropout, p=0.1)):
            assert list(tether.variables(view).values()) == list(tether.variables(model).values())
            assert view is not model
            view[0].weight = view[0].weight + 1
            assert (model[0].weight == view[0].weight).all()

    def test_a_view_of_a_view_is_a_view(self):
        model = make()
        view = tether.view(model.eval(), nn.Dropout, p=0.25)
        assert (view[2][0].p, view.training, model[2][0].p) == (0.25, False, 0.5)

    def test_same_view_while_somebody_holds_it(self):
        model = make()
        first = model.eval()
        assert model.eval() is first
        assert tether.view(model, "[1]", training=False) is not first
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is None
        assert model.eval() is not None

    def test_a_model_with_views_is_freed(self):
        model = make()
        kept = [model.eval(), tether.freeze(model)]
        gone = weakref.ref(model)
        del model, kept
        gc.collect()
        assert gone() is None

    def test_no_other_settings_change(self):
        model = make()
        view = tether.view(model, nn.Dropout, p=0.1)
        assert view[2][0].p == 0.1 and model[2][0].p == 0.5
        assert view[1].decay == model[1].decay

    def test_is_a_part_of_a_new_model(self):
        model = make()
        outer = nn.Sequential([tether.freeze(model), nn.Linear(2, 1)])
        assert list(tether.variables(outer, tether.Param)) == ["[1].weight", "[1].bias"]
        assert tether.cell(outer, "[0][0].weight") is tether.cell(model, "[0].weight")


class TestFreeze:
    def test_gradients_pass_frozen_cells_by(self):
        linear = nn.Linear(2, 1)
        grads = tether.grad(lambda m: m(jnp.ones(2)).sum())(tether.freeze(linear, "bias"))
        assert grads.bias is None and grads.weight.tolist() == [[1, 1]]

    def test_thawed(self):
        linear = nn.Linear(2, 1)
        assert list(tether.variables(tether.view(tether.freeze(linear), "bias", trainable=True), tether.Param)) == [
            "bias"
        ]
        assert tether.variables(linear, tether.Param).keys() == {"weight", "bias"}

    def test_survives_copies_and_modes(self):
        model = tether.freeze(make(), "[0]")
        for other in (model.eval(), tether.clone(model), jax.tree.map(lambda x: x, model), model[0]):
            frozen = tether.variables(other, ~tether.Param)
            assert any(path.endswith("weight") for path in frozen)

    def test_tied_cell_by_either_place(self):
        class Tied(tether.Module):
            def __init__(self):
                self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
                self.b.weight = tether.cell(self.a, "weight")

        for path in ("a.weight", "b.weight"):
            assert list(tether.variables(tether.freeze(Tied(), path), tether.Param)) == ["a.bias", "b.bias"]

    def test_replaced_part_of_a_frozen_model(self):
        model = tether.freeze(make())
        new = tether.replace(model, {"[0]": nn.LayerNorm(2)})
        assert "[0].weight" in tether.variables(new)


class TestRefused:
    @pytest.mark.parametrize(
        ("make_view", "error"),
        [
            (lambda m: tether.view(m), ArgumentError),
            (lambda m: tether.view(m, nothing=1), ArgumentError),
            (lambda m: tether.view(m, "[1]", p=0.1), ArgumentError),
            (lambda m: tether.view(m, training=2), ArgumentError),
            (lambda m: tether.view(m, trainable="no"), ArgumentError),
            (lambda m: tether.view(m, "nothing", training=False), SelectionError),
            (lambda m: tether.view(m, "[0].weight", training=False), SelectionError),
            (lambda m: tether.view(m, nn.Conv2d, training=False), SelectionError),
            (lambda m: tether.view(m, tether.Param, training=False), SelectionError),
            (lambda m: tether.view(m, 3, training=False), SelectionError),
            (lambda m: tether.view(m, nn.Dropout, p={1, 2}), StaticError),
            (lambda m: tether.view(m, nn.Dropout, p=jnp.ones(2)), TetherError),
            (lambda m: tether.view(m, nn.Linear, weight=jnp.ones((2, 2))), TetherError),
            (lambda m: tether.freeze(m, "nothing"), SelectionError),
            (lambda m: tether.view(3, training=False), TetherError),
        ],
    )
    def test_view(self, make_view: Any, error: type[Exception]):
        model = make()
        before = jax.tree.structure(model)
        with pytest.raises(error):
            _ = make_view(model)
        assert jax.tree.structure(model) == before and len(tether.variables(model)) == 10


class TestUnused:
    @pytest.mark.parametrize(
        "statement", ["model.eval()", "model.train()", "tether.view(model, training=False)", "tether.freeze(model)"]
    )
    def test_a_view_thrown_away_warns(self, statement: str):
        scope = {"model": make(), "tether": tether}
        with pytest.warns(UnusedViewWarning, match="changes nothing by itself"):
            exec(statement, scope)

    def test_at_the_users_line(self):
        model = make()
        with pytest.warns(UnusedViewWarning) as caught:
            model.eval()
        assert caught[0].filename == __file__

    def test_a_view_that_is_used_does_not(self):
        model, x = make(), jnp.ones((3, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept = model.eval()
            model.eval()(x)
            [model.eval(), tether.freeze(model)]
            assert kept and model.train().training
            (lambda: model.eval())()


def discarded() -> bool:
    return result_is_discarded(1)


class TestDiscarded:
    """Whether a call is a statement, its result thrown away: read from the bytecode of the caller."""

    def test_statement(self):
        found: list[bool] = []

        def note() -> bool:
            found.append(result_is_discarded(1))
            return True

        note()
        assert found == [True]

    def test_values_that_are_used(self):
        kept = discarded()
        listed = [discarded(), discarded()]
        called = bool(discarded())
        chained = discarded().__class__
        by_name = {"flag": discarded()}
        assert [kept, *listed, called, chained is bool, *by_name.values()] == [False, False, False, False, True, False]
        assert discarded() is False
        assert (lambda: discarded())() is False
        assert (discarded() or discarded()) is False

    def test_return_and_yield(self):
        def returns() -> bool:
            return discarded()

        def yields() -> Any:
            yield discarded()

        assert returns() is False
        assert list(yields()) == [False]

    def test_keywords_and_unpacked_arguments(self):
        found: list[bool] = []

        def note(*_: Any, **__: Any) -> int:
            found.append(result_is_discarded(1))
            return 1

        note(1, a=2)
        note(*[1], a=2)
        kept = note(*[1], a=2)
        assert found == [True, True, False] and kept == 1

    def test_method_in_a_loop_and_in_a_with_block(self):
        found: list[bool] = []

        class Notes:
            def note(self) -> bool:
                found.append(result_is_discarded(1))
                return False

        notes = Notes()
        for _ in range(2):
            notes.note()
        with jax.ensure_compile_time_eval():
            notes.note()
        while notes.note():
            pass
        assert found == [True, True, True, False]
