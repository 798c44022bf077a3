# SPDX-License-Identifier: Apache-2.0
"""Each undocumented assumption of ``_core/trace.py``, held against the installed JAX and CPython."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import take_current_trace

from tether._core import trace


def seen_in(transformed: Callable[[Callable[[Any], Any]], Any], look: Callable[[Any], Any]) -> Any:
    """What ``look`` gives of a value inside a transformation."""
    found: list[Any] = []

    def body(x: Any) -> Any:
        found.append(look(x))
        return x

    transformed(body)
    return found[0]


def scan(body: Callable[[Any], Any]) -> Any:
    return jax.lax.scan(lambda carry, _: (body(carry), None), 1.0, None, length=2)


def cond(body: Callable[[Any], Any]) -> Any:
    return jax.lax.cond(True, body, lambda x: x, 1.0)


PLAIN = {
    "jit": lambda body: jax.jit(body)(1.0),
    "checkpoint": lambda body: jax.checkpoint(body)(1.0),
    "scan": scan,
    "cond": cond,
    "grad": lambda body: jax.grad(body)(1.0),
    "jvp": lambda body: jax.jvp(body, (1.0,), (1.0,)),
    "vmap": lambda body: jax.vmap(body)(jnp.ones(2)),
}
STAGED = {"jit", "checkpoint", "scan", "cond"}


def test_outside_all_traces_the_evaluating_trace_is_current():
    assert trace.current() is trace.EVALUATING
    assert not hasattr(trace.EVALUATING, "parent_trace") or trace.EVALUATING.parent_trace is None
    assert trace.chain(trace.EVALUATING) == []


def test_every_thread_has_the_same_evaluating_trace():
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(trace.current()))
    thread.start()
    thread.join()
    assert found == [trace.EVALUATING]


def test_looking_at_the_trace_leaves_it_current():
    before = trace.current()
    assert trace.current() is before
    with take_current_trace() as current:
        assert current is before
    assert float(jnp.sin(0.0) + 1) == 1.0


@pytest.mark.parametrize("name", PLAIN)
def test_a_transformation_has_a_trace_of_its_own(name: str):
    def look(x: Any) -> Any:
        return trace.current() is trace.EVALUATING, trace.owner(x) is trace.current(), trace.chain(trace.current())

    is_evaluating, owns, chain = seen_in(PLAIN[name], look)
    assert not is_evaluating
    assert owns
    assert len(chain) >= 1 and trace.EVALUATING not in chain
    assert trace.current() is trace.EVALUATING


@pytest.mark.parametrize("name", PLAIN)
def test_staging_traces_are_told_apart(name: str):
    assert seen_in(PLAIN[name], lambda _: trace.is_staged(trace.current())) is (name in STAGED)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("jit", ("jit",)),
        ("checkpoint", ("checkpoint",)),
        ("scan", ("scan",)),
        ("cond", ("cond",)),
        ("grad", ("grad",)),
        ("jvp", ("grad", "jvp")),
        ("vmap", ("vmap",)),
    ],
)
def test_transformations_are_named(name: str, words: tuple[str, ...]):
    found = seen_in(PLAIN[name], lambda _: trace.transform_name(trace.current()))
    assert found.startswith("jax.") and any(word in found for word in words), found


def test_nested_traces_form_a_chain_that_begins_innermost():
    found: list[Any] = []

    def inner(x: Any) -> Any:
        found.append((trace.current(), trace.chain(trace.current())))
        return x

    def outer(x: Any) -> Any:
        found.append((trace.current(), trace.chain(trace.current())))
        return jax.vmap(inner)(jnp.stack([x, x])).sum()

    jax.grad(outer)(1.0)
    (outer_trace, outer_chain), (inner_trace, inner_chain) = found
    assert outer_chain == [outer_trace]
    assert inner_chain == [inner_trace, outer_trace]
    assert trace.crossed(inner_trace, outer_trace) == [inner_trace]
    assert trace.crossed(inner_trace, trace.EVALUATING) == [inner_trace, outer_trace]
    assert trace.crossed(inner_trace, inner_trace) == []


def test_an_array_has_no_owner():
    assert trace.owner(jnp.ones(2)) is None
    assert trace.owner(1.0) is None


def test_stopped_takes_off_the_tangent_and_belongs_to_the_trace_below():
    def f(x: Any) -> Any:
        value = trace.stopped(x * 3)
        assert trace.owner(value) is not trace.current()
        assert not isinstance(value, jax.core.Tracer)
        return x * value

    assert float(jax.grad(f)(2.0)) == 6.0  # d(x * 6) / dx, the 6 being constant


def test_stopped_keeps_lanes():
    def f(x: Any) -> Any:
        assert trace.owner(trace.stopped(x)) is trace.current()
        return x

    jax.vmap(f)(jnp.ones(2))


@pytest.mark.parametrize("value", [jnp.arange(3), jnp.ones(2, bool), jax.random.key(0)])
def test_stopped_leaves_what_has_no_tangent(value: jax.Array):
    assert trace.stopped(value) is value


@pytest.mark.parametrize("name", PLAIN)
def test_a_key_made_inside_a_trace_can_belong_to_no_trace(name: str):
    """A draw inside a trace must be able to make the default stream's key outside it."""

    def look(_: Any) -> bool:
        with jax.ensure_compile_time_eval():
            key = jax.random.key(0)
        return trace.owner(key) is None and isinstance(key, jax.Array)

    assert seen_in(PLAIN[name], look)


@contextlib.contextmanager
def keeping(apart: bool):
    caching = trace.Caching(apart)
    caching.begin()
    yield caching
    caching.end()
    caching.end()  # as good as once


class TestCaches:
    """JAX's caches of traces, and what keeps a trace out of them."""

    STABLE = {
        "jit": lambda f: jax.jit(lambda x: f() * x),
        "jit of jit": lambda f: jax.jit(jax.jit(lambda x: f() * x)),
        "scan": lambda f: (lambda body: lambda x: jax.lax.scan(body, x, None, length=1)[0])(
            lambda c, _: (f() * c, None)
        ),
        "cond": lambda f: (lambda branch: lambda x: jax.lax.cond(True, branch, branch, x))(lambda x: f() * x),
        "while": lambda f: (lambda test, body: lambda x: jax.lax.while_loop(test, body, (0, x))[1])(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, f() * c[1])
        ),
        "checkpoint": lambda f: jax.checkpoint(lambda x: f() * x),
        "vmap of jit": lambda f: jax.vmap(jax.jit(lambda x: f() * x), axis_size=1, in_axes=None, out_axes=None),
    }

    @pytest.mark.parametrize("name", STABLE)
    def test_a_spoiled_trace_is_not_found_again_and_others_are(self, name: str):
        runs: list[int] = []

        def value(spoils: bool, w: float) -> float:
            runs.append(1)
            if spoils:
                caching.spoil()
                caching.renew()
            return w

        w, spoils = 2.0, False
        fun = self.STABLE[name](lambda: value(spoils, w))
        assert float(fun(1.0)) == 2
        with keeping(apart=False) as caching:
            w = 20.0
            assert float(fun(1.0)) == 2  # as good as nothing: what was cached outside is found
        spoils = True
        for w, apart in [(3.0, True), (30.0, True), (31.0, True), (4.0, False)]:
            with keeping(apart) as caching:
                assert float(fun(1.0)) == (w if apart else 2.0)
        assert float(fun(1.0)) == 2

    def test_nothing_is_compiled_again_under_other_keys(self):
        runs: list[int] = []
        fun = jax.jit(lambda x: (runs.append(1), x + 1)[1])
        for apart in (False, False, True, True):
            with keeping(apart):
                fun(1.0)
        assert len(runs) == 2


def seen_unflattened(call: Callable[[Any], Any]) -> list[bool]:
    """What ``is_handed_by_jax`` says at each unflatten of a node, inside traces."""
    found: list[bool] = []

    class Node:
        pass

    def ask() -> bool:  # two calls up, as in Structure
        return trace.is_handed_by_jax()

    def unflatten(_: Any, children: Any) -> Node:
        if trace.current() is not trace.EVALUATING:
            found.append(asked())
        node = Node()
        node.x = children[0]  # type: ignore[attr-defined]
        return node

    asked = ask
    jax.tree_util.register_pytree_node(Node, lambda node: ((node.x,), None), unflatten)
    node = Node()
    node.x = jnp.ones(2)  # type: ignore[attr-defined]
    call(node)
    return found


HANDED = {
    "jit": lambda node: jax.jit(lambda node: node.x)(node),
    "grad": lambda node: jax.grad(lambda node: node.x.sum())(node),
    "vmap": lambda node: jax.vmap(lambda node: node.x)(node),
    "scan": lambda node: jax.lax.scan(lambda c, _: (c, None), node, None, length=2),
    "cond": lambda node: jax.lax.cond(True, lambda n: n.x, lambda n: n.x, node),
    "checkpoint": lambda node: jax.checkpoint(lambda node: node.x)(node),
}


@pytest.mark.parametrize("name", HANDED)
def test_arguments_of_a_transformation_are_unflattened_by_jax(name: str):
    assert all(seen_unflattened(HANDED[name])) and seen_unflattened(HANDED[name])


@pytest.mark.parametrize(
    "call",
    [
        lambda node: jax.jit(lambda x: jax.tree.map(lambda y: y * x, node).x)(1.0),
        lambda node: jax.jit(lambda x: jax.tree_util.tree_map(lambda y: y * x, node).x)(1.0),
        lambda node: jax.jit(lambda x: jax.tree.unflatten(jax.tree.structure(node), [x]).x)(1.0),
        lambda node: jax.eval_shape(lambda node: node.x, node),
        lambda node: jax.make_jaxpr(lambda node: node.x)(node),
    ],
    ids=["tree.map", "tree_util", "unflatten", "eval_shape", "make_jaxpr"],
)
def test_the_users_tree_functions_and_looks_are_told_apart(call: Any):
    assert seen_unflattened(call) and not any(seen_unflattened(call))
