# SPDX-License-Identifier: Apache-2.0
"""SGD, Momentum, Adam and LARS, step by step against their formulas in float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tether.compat.objax as objax

RNG = np.random.default_rng(0)
STEPS = 5

Arrays = list[np.ndarray]


def model(dtype: Any = jnp.float32) -> tuple[objax.VarCollection, Arrays]:
    start = [RNG.normal(size=(2, 3)), RNG.normal(size=(4,))]
    names = {"w": objax.TrainVar(jnp.asarray(start[0], dtype)), "b": objax.TrainVar(jnp.asarray(start[1], dtype))}
    state = objax.StateVar(jnp.ones(3))
    vc = objax.VarCollection({**names, "again": names["w"], "ref": objax.TrainRef(names["b"]), "state": state})
    return vc, start


def gradients() -> list[Arrays]:
    return [[RNG.normal(size=(2, 3)) * 10.0**-step, RNG.normal(size=(4,))] for step in range(STEPS)]


def sgd(p: Arrays, lr: float) -> Iterator[Arrays]:
    while True:
        g = yield p
        p = [x - lr * d for x, d in zip(p, g, strict=True)]


def momentum(p: Arrays, lr: float, mu: float = 0.9, nesterov: bool = False) -> Iterator[Arrays]:
    m = [np.zeros_like(x) for x in p]
    while True:
        g = yield p
        m = [d + mu * a for d, a in zip(g, m, strict=True)]
        steps = [d + mu * a for d, a in zip(g, m, strict=True)] if nesterov else m
        p = [x - lr * s for x, s in zip(p, steps, strict=True)]


def adam(p: Arrays, lr: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Iterator[Arrays]:
    m, v, t = [np.zeros_like(x) for x in p], [np.zeros_like(x) for x in p], 0
    while True:
        g = yield p
        t += 1
        m = [b1 * a + (1 - b1) * d for a, d in zip(m, g, strict=True)]
        v = [b2 * a + (1 - b2) * d * d for a, d in zip(v, g, strict=True)]
        rate = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
        p = [x - rate * a / np.sqrt(b + eps) for x, a, b in zip(p, m, v, strict=True)]


def lars(
    p: Arrays, lr: float, mu: float = 0.9, decay: float = 1e-4, tc: float = 1e-3, eps: float = 1e-5
) -> Iterator[Arrays]:
    m = [np.zeros_like(x) for x in p]
    while True:
        g = yield p
        for k in range(len(p)):
            size, slope = np.sqrt((p[k] ** 2).sum()), np.sqrt((g[k] ** 2).sum())
            trust = tc * size / (slope + decay * size + eps)
            trust = max(trust, 1.0) if size == 0 or slope == 0 else trust
            m[k] = mu * m[k] + lr * trust * (g[k] + decay * p[k])
            p = [*p[:k], p[k] - m[k], *p[k + 1 :]]


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sgd": (objax.optimizer.SGD, lambda p: sgd(p, 0.1)),
    "momentum": (objax.optimizer.Momentum, lambda p: momentum(p, 0.1)),
    "momentum 0.5": (lambda vc: objax.optimizer.Momentum(vc, 0.5), lambda p: momentum(p, 0.1, 0.5)),
    "nesterov": (
        lambda vc: objax.optimizer.Momentum(vc, 0.8, nesterov=True),
        lambda p: momentum(p, 0.1, 0.8, nesterov=True),
    ),
    "adam": (objax.optimizer.Adam, lambda p: adam(p, 0.1)),
    # Where the squares of the gradients are far below eps, it matters where eps is.
    "adam eps": (lambda vc: objax.optimizer.Adam(vc, 0.8, 0.9, 1e-2), lambda p: adam(p, 0.1, 0.8, 0.9, 1e-2)),
    "lars": (objax.optimizer.LARS, lambda p: lars(p, 0.1)),
    "lars tc": (
        lambda vc: objax.optimizer.LARS(vc, 0.5, weight_decay=0.1, tc=0.7, eps=1e-2),
        lambda p: lars(p, 0.1, 0.5, 0.1, 0.7, 1e-2),
    ),
}


@pytest.mark.parametrize("is_jitted", [False, True], ids=["plain", "jit"])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_the_formula(name: str, is_jitted: bool):
    vc, start = model()
    make, oracle = CASES[name]
    optimizer = objax.Jit(make(vc)) if is_jitted else make(vc)
    expected = oracle(start)
    next(expected)
    for gs in gradients():
        optimizer(0.1, [jnp.asarray(g, jnp.float32) for g in gs])
        for variable, right in zip(vc.subset(objax.TrainVar), expected.send(gs), strict=True):
            np.testing.assert_allclose(variable.value, right, rtol=2e-4, atol=2e-6)
    assert vc["state"].value.tolist() == [1, 1, 1]


def test_the_eps_of_adam_is_inside_the_root():
    v = objax.TrainVar(jnp.zeros(1))
    objax.optimizer.Adam(objax.VarCollection(v=v), eps=1.0)(1.0, [jnp.array([1.0])])
    # m = 0.1, v = 0.001, rate = sqrt(0.001) / 0.1; beside the root it would be -0.0307
    assert float(v.value[0]) == pytest.approx(-np.sqrt(0.001) / np.sqrt(1.001), rel=1e-4)


class TestOneStepDiffers:
    def test_momentum_of_one_call(self):
        v = objax.TrainVar(jnp.zeros(1))
        optimizer = objax.optimizer.Momentum(objax.VarCollection(v=v))
        optimizer(1.0, [jnp.ones(1)])
        optimizer(1.0, [jnp.ones(1)], momentum=0.25)
        assert v.value.tolist() == [-2.25]
        optimizer(1.0, [jnp.ones(1)], momentum=0)
        assert v.value.tolist() == [-3.25]
        assert optimizer.momentum == 0.9

    def test_betas_of_one_call(self):
        v, right = objax.TrainVar(jnp.zeros(1)), adam([np.zeros(1)], 0.5, 0.6, 0.7)
        optimizer = objax.Jit(objax.optimizer.Adam(objax.VarCollection(v=v)))
        next(right)
        for g in (1.0, -0.5, 0.25):
            optimizer(0.5, [jnp.array([g])], 0.6, beta2=0.7)
            np.testing.assert_allclose(v.value, right.send([np.array([g])])[0], rtol=1e-5)

    def test_the_rate_may_be_an_array_or_a_variable(self):
        for lr in (jnp.float32(0.5), np.float64(0.5), objax.StateVar(jnp.array(0.5)), jnp.array(0.5, jnp.bfloat16)):
            for make in (objax.optimizer.SGD, objax.optimizer.Momentum, objax.optimizer.Adam, objax.optimizer.LARS):
                a, b = objax.TrainVar(jnp.array([1.0])), objax.TrainVar(jnp.array([1.0]))
                make(objax.VarCollection(v=a))(lr, [jnp.array([2.0])])
                make(objax.VarCollection(v=b))(0.5, [jnp.array([2.0])])
                assert a.value.tolist() == b.value.tolist() != [1.0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CASES)
def test_variables_and_moments_keep_their_dtype(name: str, dtype: Any):
    vc, _ = model(dtype)
    optimizer = CASES[name][0](vc)
    before = vc.tensors(objax.TrainVar)
    for gs in gradients()[:2]:
        optimizer(jnp.float32(50), [jnp.asarray(g, dtype) for g in gs])
    kept = optimizer.vars().subset(is_a=(objax.TrainRef, objax.StateVar)).tensors()
    assert {x.dtype for x in kept if x.ndim} == {jnp.dtype(dtype)}
    assert all((old != new).any() for old, new in zip(before, vc.tensors(objax.TrainVar), strict=True))


def test_lars_moves_a_variable_of_zeros_and_bears_a_gradient_of_zeros():
    a, b = objax.TrainVar(jnp.zeros(2)), objax.TrainVar(jnp.array([3.0, 4.0]))
    objax.optimizer.LARS(objax.VarCollection(a=a, b=b))(0.5, [jnp.array([1.0, 0.0]), jnp.zeros(2)])
    assert a.value.tolist() == [-0.5, 0]
    # trust = tc |p| / (decay |p| + eps) = 0.005 / 0.00051, above 1; the step is lr trust decay p
    np.testing.assert_allclose(b.value, np.array([3, 4]) * (1 - 0.5 * 0.005 / 0.00051 * 1e-4), rtol=1e-6)


class TestVars:
    @pytest.mark.parametrize(
        ("make", "parts"),
        [
            (objax.optimizer.SGD, ["train_vars"]),
            (objax.optimizer.Momentum, ["train_vars", "m"]),
            (objax.optimizer.LARS, ["train_vars", "m"]),
            (objax.optimizer.Adam, ["step", "train_vars", "m", "v"]),
        ],
    )
    def test_order_and_names(self, make: Callable[..., Any], parts: list[str]):
        name = make.__name__
        expected = []
        for part in parts:
            rows = [f"({name}).{part}(ModuleList)[{k}]" for k in range(2)]
            expected += rows if part != "step" else [f"({name}).step"]
        assert list(make(model()[0]).vars().keys()) == expected

    def test_the_count_of_adam(self):
        optimizer = objax.optimizer.Adam(model()[0])
        assert optimizer.step.dtype == jnp.uint32 and optimizer.step.shape == ()
        optimizer.step.reduce(jnp.array([3, 3], jnp.uint32))
        assert optimizer.step.value == 3

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (objax.optimizer.SGD, "SGD()"),
            (objax.optimizer.Momentum, "Momentum(momentum=0.9, nesterov=False)"),
            (objax.optimizer.Adam, "Adam(beta1=0.9, beta2=0.999, eps=1e-08)"),
            (objax.optimizer.LARS, "LARS(momentum=0.9, weight_decay=0.0001, tc=0.001, eps=1e-05)"),
        ],
    )
    def test_repr(self, make: Callable[..., Any], text: str):
        assert repr(make(objax.VarCollection())) == f"objax.optimizer.{text}"


class TestMistakes:
    def test_too_few_gradients(self):
        optimizer = objax.optimizer.Adam(model()[0])
        with pytest.raises(AssertionError) as caught:
            optimizer(0.1, [jnp.zeros((2, 3))])
        assert str(caught.value) == (
            "objax.optimizer.Adam: Expecting as many gradients as trainable variables.\n"
            "  got:      1 gradients\n"
            "  expected: 2, one for each TrainVar\n"
            "  fix:      the same VarCollection for GradValues and for the optimizer"
        )
        assert optimizer.step.value == 0

    @pytest.mark.parametrize("make", [objax.optimizer.SGD, objax.optimizer.Momentum, objax.optimizer.LARS])
    def test_a_gradient_that_would_broadcast(self, make: Callable[..., Any]):
        vc, _ = model()
        with pytest.raises(AssertionError) as caught:
            make(vc)(0.1, [jnp.zeros((2, 3)), jnp.zeros(())])
        assert str(caught.value) == (
            f"objax.optimizer.{make.__name__}: a gradient hasn't the shape of its variable.\n"
            "  at:       gradient 1\n"
            "  got:      float32[]\n"
            "  expected: float32[4]\n"
            "  fix:      gradients in the order of the variables: GradValues(f, vc) of the same vc, without "
            "input_argnums"
        )


def test_training_in_jit_and_in_parallel_is_the_same():
    x, y = jnp.asarray(RNG.normal(size=(8, 3)), jnp.float32), jnp.asarray(RNG.normal(size=(8, 1)), jnp.float32)

    def trained(compile: Callable[..., Any], is_parallel: bool) -> Any:
        w = objax.TrainVar(jnp.ones((3, 1)))
        vc = objax.VarCollection(w=w)
        optimizer = objax.optimizer.Adam(vc)
        gv = objax.GradValues(lambda x, y: ((x @ w.value - y) ** 2).mean(), vc)

        def train(x: jax.Array, y: jax.Array) -> jax.Array:
            g, v = gv(x, y)
            optimizer(0.1, objax.functional.parallel.pmean(g) if is_parallel else g)
            return v[0][None]

        call = compile(train, vc + optimizer.vars())
        for _ in range(3):
            call(x, y)
        return w.value, optimizer.step.value

    w, step = trained(objax.Jit, False)
    pytest.importorskip("tether.compat.objax.functional.parallel")
    w2, step2 = trained(objax.Parallel, True)
    assert step == step2 == 3
    np.testing.assert_allclose(w, w2, rtol=1e-5)
