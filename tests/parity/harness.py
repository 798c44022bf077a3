# SPDX-License-Identifier: Apache-2.0
"""One layer beside the same layer of another library: outputs, gradients and state, step for step.

A case names a layer, one setting of it, and for each library that has it a function in that library. All of them get
the same parameters, states and inputs in Tether's paths and layouts, in float64:

    peer(params, states, inputs, training) -> (output, states after)

The loss of a step is sum(c * y) with fixed random c. Kept for each step are the outputs, the gradients of the inputs
and of the parameters, and the states after it. ``make.py`` stores what the libraries gave under ``data/``.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tether

DATA = Path(__file__).parent / "data"
FAMILIES = sorted(file.stem for file in (Path(__file__).parent / "cases").glob("*.py"))
LIBRARIES = ("PyTorch", "Flax NNX", "Equinox", "Haiku")

Arrays = dict[str, np.ndarray]
Peer = Callable[[Mapping[str, Any], Mapping[str, Any], tuple[Any, ...], bool], tuple[Any, Mapping[str, Any]]]


def normal(*shapes: tuple[int, ...]) -> Callable[[np.random.Generator], tuple[np.ndarray, ...]]:
    """Inputs drawn from a normal distribution, one array for each shape."""
    return lambda rng: tuple(rng.normal(size=shape) for shape in shapes)


@dataclass(frozen=True)
class Case:
    """One setting of a layer, and the libraries that have it.

    Args:
        layer: Name of the layer in ``tether.nn``.
        setting: What is special here, as arguments; "" for the defaults.
        make: Builds the layer.
        inputs: Draws the inputs of one step; those of a floating dtype are differentiated.
        peers: Library -> the layer there.
        call: How Tether's layer is called: gives one array, or a tuple or list of them.
        training: Of each step.
        bound: Largest difference that is let pass, relative to the largest value; more than the rounding of
            float64 only where a library rounds on its way.
        without: Parts of what is kept that one library has no word for, by the beginning of their names.
        positive: Parameters that are made positive.
    """

    layer: str
    setting: str
    make: Callable[[], Any]
    inputs: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    peers: Mapping[str, Peer]
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs)
    training: tuple[bool, ...] = (True, False)
    bound: float = 1e-10
    without: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    positive: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.layer}({self.setting})"

    def rng(self, what: str) -> np.random.Generator:
        return np.random.default_rng(zlib.crc32(f"{self.name} {what}".encode()))


def is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def first_values(case: Case) -> tuple[Arrays, Arrays]:
    """Parameters, drawn anew for each path, and states as the layer begins with them; floats in float64."""
    layer, rng, params, states = case.make(), case.rng("parameters"), {}, {}
    for path, variable in tether.variables(layer).items():
        if isinstance(variable, tether.Param):
            params[path] = rng.normal(size=np.shape(variable.value)) * 0.5
            if path in case.positive:
                params[path] = np.abs(params[path]) + 0.5
        elif isinstance(variable, tether.State):
            value = np.asarray(variable.value)
            states[path] = value.astype(np.float64) if is_floating(value) else value
    return params, states


def steps(case: Case) -> list[tuple[tuple[np.ndarray, ...], bool]]:
    """The inputs of each step, and whether it trains."""
    rng = case.rng("inputs")
    return [(case.inputs(rng), training) for training in case.training]


def weights(case: Case, outputs: list[Any], step: int) -> list[np.ndarray]:
    """What the outputs of a step are multiplied by in its loss."""
    rng = case.rng(f"loss {step}")
    return [rng.normal(size=tuple(y.shape)) for y in outputs]


def flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def of_tether(case: Case) -> Arrays:
    """What Tether's layer gives, in float64."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        params, states = first_values(case)
        widened = lambda a: a.astype(jnp.float64) if is_floating(a) else a
        layer = jax.tree.map(widened, case.make())
        cells = tether.variables(layer)
        for path, value in (params | states).items():
            cells[path].value = jnp.asarray(value)

        def loss(layer: Any, floats: list[Any], others: list[Any], cs: list[Any]) -> Any:
            floats, others = list(floats), list(others)
            inputs = [(others if x is None else floats).pop(0) for x in marks]
            ys = flat(case.call(layer, *inputs))
            return sum((c * y).sum() for c, y in zip(cs, ys, strict=True)), ys

        @tether.jit(static_argnames="training")
        def gradients(layer: Any, floats: list[Any], others: list[Any], cs: list[Any], training: bool) -> Any:
            view = layer.train() if training else layer.eval()
            return tether.grad(loss, argnums=(0, 1), has_aux=True)(view, floats, others, cs)

        kept: Arrays = {}
        for step, (inputs, training) in enumerate(steps(case)):
            marks = [True if is_floating(x) else None for x in inputs]
            view = layer.train() if training else layer.eval()
            shapes = flat(
                tether.eval_shape(lambda view=view, inputs=inputs: case.call(view, *map(jnp.asarray, inputs)))
            )
            floats = [jnp.asarray(x) for x in inputs if is_floating(x)]
            others = [jnp.asarray(x) for x in inputs if not is_floating(x)]
            (of_layer, of_inputs), ys = gradients(layer, floats, others, weights(case, shapes, step), training=training)
            keep(kept, step, ys, of_inputs, {path: tether.variables(of_layer)[path].value for path in params})
            kept |= {f"{step} state {path}": np.asarray(cells[path].value) for path in states}
        return kept


def keep(kept: Arrays, step: int, ys: Any, of_inputs: Any, of_params: Mapping[str, Any]) -> None:
    """Notes the outputs and gradients of a step."""
    for i, y in enumerate(ys):
        kept[f"{step} output {i}"] = np.asarray(y)
    for i, grad in enumerate(of_inputs):
        kept[f"{step} gradient of input {i}"] = np.asarray(grad)
    for path, grad in of_params.items():
        kept[f"{step} gradient of {path}"] = np.asarray(grad)


def of_peer(case: Case, library: str) -> Arrays:
    """What another library's layer gives, in float64."""
    params, states = first_values(case)
    run = _run_torch if library == "PyTorch" else _run_jax
    kept: Arrays = {}
    with jax.enable_x64(True):
        for step, (inputs, training) in enumerate(steps(case)):
            ys, of_inputs, of_params, states = run(case, library, params, states, inputs, training, step)
            keep(kept, step, ys, of_inputs, of_params)
            kept |= {f"{step} state {path}": np.asarray(value) for path, value in states.items()}
    return {name: kept[name] for name in asked(case, library, kept)}


def asked(case: Case, library: str, names: Iterable[str]) -> list[str]:
    """Those of what is kept that the library has a word for."""
    missing = tuple(case.without.get(library, ()))
    return [name for name in names if not name.split(" ", 1)[1].startswith(missing)]


def _run_torch(case, library, params, states, inputs, training, step):
    import torch

    tensor = lambda x: torch.tensor(np.asarray(x))
    cells = {path: tensor(value).requires_grad_() for path, value in params.items()}
    xs = [tensor(x).requires_grad_() if is_floating(x) else tensor(x) for x in inputs]
    out, after = case.peers[library](cells, {p: tensor(v) for p, v in states.items()}, tuple(xs), training)
    ys = flat(out)
    loss = sum((tensor(c) * y).sum() for c, y in zip(weights(case, ys, step), ys, strict=True))
    leaves = [x for x in xs if x.requires_grad] + list(cells.values())
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    count = len(leaves) - len(cells)
    after = {path: np.asarray(value.detach()) for path, value in after.items()}
    numpy = [g.detach().numpy() for g in grads]
    return [y.detach().numpy() for y in ys], numpy[:count], dict(zip(cells, numpy[count:], strict=True)), after


def _run_jax(case, library, params, states, inputs, training, step):
    places = [i for i, x in enumerate(inputs) if is_floating(x)]
    constant = {path: jnp.asarray(value) for path, value in states.items()}

    def forward(params: Any, floats: list[Any]) -> Any:
        xs = [jnp.asarray(x) for x in inputs]
        for place, x in zip(places, floats, strict=True):
            xs[place] = x
        out, after = case.peers[library](params, constant, tuple(xs), training)
        return flat(out), dict(after)

    args = ({p: jnp.asarray(v) for p, v in params.items()}, [jnp.asarray(inputs[i]) for i in places])
    cs = weights(case, jax.eval_shape(forward, *args)[0], step)

    def loss(params: Any, floats: list[Any]) -> Any:
        ys, after = forward(params, floats)
        return sum((c * y).sum() for c, y in zip(cs, ys, strict=True)), (ys, after)

    (of_params, of_inputs), (ys, after) = jax.grad(loss, argnums=(0, 1), has_aux=True)(*args)
    return ys, of_inputs, of_params, after


def gap(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, relative to the largest value of theirs, or to 1 if that is larger."""
    if ours.shape != theirs.shape:
        raise ValueError(f"{ours.shape} here, {theirs.shape} there")
    if not theirs.size:
        return 0.0
    found = np.abs(np.asarray(ours, np.float64) - theirs).max() / max(1.0, np.abs(theirs).max())
    return float(found) if np.isfinite(found) else math.inf  # NaN would be less than any bound in max()


def difference(ours: Arrays, theirs: Arrays) -> float:
    """The largest gap between arrays of the same names."""
    return max((gap(ours[name], right) for name, right in theirs.items()), default=0.0)


@functools.cache
def cases(family: str) -> dict[str, Case]:
    """The cases of a family by name; each family is a file with a list ``CASES``."""
    found = importlib.import_module(f"tests.parity.cases.{family}").CASES
    named = {case.name: case for case in found}
    if len(named) != len(found):
        raise ValueError(f"{family}: two cases of one name")
    return named


@functools.cache
def stored(family: str) -> dict[tuple[str, str], Arrays]:
    """(case, library) -> what that library gave when the data were made."""
    found: dict[tuple[str, str], Arrays] = {}
    with np.load(DATA / f"{family}.npz") as file:
        for name, entries in json.loads(str(file["index"])).items():
            case, library = name.split("|")
            ends = np.cumsum([math.prod(shape) for _, shape in entries])[:-1]
            parts = zip(entries, np.split(file[name], ends), strict=True)
            found[case, library] = {what: part.reshape(shape) for (what, shape), part in parts}
    return found


def store(family: str, found: Mapping[tuple[str, str], Arrays]) -> None:
    """Writes one vector for each comparison, and an index of what is in it: names and shapes."""
    flat = {"|".join(key): arrays for key, arrays in found.items()}
    index = {name: [(what, a.shape) for what, a in arrays.items()] for name, arrays in flat.items()}
    vectors = {name: np.concatenate([np.ravel(a) for a in arrays.values()]) for name, arrays in flat.items()}
    np.savez_compressed(DATA / f"{family}.npz", index=json.dumps(index), **vectors)
