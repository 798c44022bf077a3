# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells, one step each, and networks of them over sequences, in both directions and with lengths.

Each peer turns Tether's parameters into its own layout by functions that can be differentiated, so that the gradients
come back in Tether's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.parity.harness import Case, normal
from tether import nn
from tether.nn import RNN, Bidirectional, GRUCell, LSTMCarry, LSTMCell, SimpleCell

GATES = {"SimpleCell": 1, "GRUCell": 3, "LSTMCell": 4}
BATCH, TIME, IN, SIZE = 3, 5, 3, 4
LENGTHS = np.asarray([5, 2, 3], np.int32)


def key() -> jax.Array:
    return jax.random.key(0)


def part(params: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The parameters of the cell at a path, by their own names."""
    return {name.removeprefix(path): value for name, value in params.items() if name.startswith(path)}


# One step: inputs are h (and c), x; outputs are the new h (and c)


def call_cell(cell: Any, *inputs: Any) -> Any:
    carry, y = cell(LSTMCarry(*inputs[:2]) if len(inputs) == 3 else inputs[0], inputs[-1])
    return (*carry, y) if len(inputs) == 3 else (carry, y)


def cell_of_torch(function: str) -> Callable[..., Any]:
    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import torch

        step = getattr(torch, function)
        state = tuple(inputs[:2]) if function == "lstm_cell" else inputs[0]
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        out = step(inputs[-1], state, *(params.get(name) for name in names))
        return ((*out, out[0]) if function == "lstm_cell" else (out, out)), {}

    return peer


def dense_of_flax(layer: Any, weight: Any, bias: Any = None) -> None:
    layer.kernel[...] = weight.T
    if bias is not None:
        layer.bias[...] = bias


def flax_cell(name: str, p: Mapping[str, Any], **options: Any) -> Any:
    from flax import nnx

    options |= {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
    both = p["bias_ih"] + p["bias_hh"] if "bias_ih" in p else None
    size = p["weight_hh"].shape[1], p["weight_ih"].shape[1]
    if name == "SimpleCell":
        cell = nnx.SimpleCell(size[1], size[0], dtype=jnp.float64, **options)
        dense_of_flax(cell.dense_i, p["weight_ih"], both)
        dense_of_flax(cell.dense_h, p["weight_hh"])
    elif name == "GRUCell":  # it has no bias in the product of h: that of n must be zero
        cell = nnx.GRUCell(size[1], size[0], **options)
        dense_of_flax(cell.dense_i, p["weight_ih"], both)
        dense_of_flax(cell.dense_h, p["weight_hh"])
    else:
        cell = nnx.OptimizedLSTMCell(size[1], size[0], **options)
        dense_of_flax(cell.dense_i, p["weight_ih"])
        dense_of_flax(cell.dense_h, p["weight_hh"], both)
    return cell


def cell_of_flax(name: str) -> Callable[..., Any]:
    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        cell = flax_cell(name, params)
        if name == "LSTMCell":
            (c, h), y = cell((inputs[1], inputs[0]), inputs[2])
            return (h, c, y), {}
        return cell(*inputs), {}

    return peer


def cell_of_equinox(name: str) -> Callable[..., Any]:
    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import equinox as eqx

        gates, size = GATES[name], params["weight_hh"].shape[1]
        cell = getattr(eqx.nn, name)(params["weight_ih"].shape[1], size, key=key())
        new = [params["weight_ih"], params["weight_hh"]]
        if gates == 4:
            where = lambda c: (c.weight_ih, c.weight_hh, c.bias)
            new += [params["bias_ih"] + params["bias_hh"]]
        else:  # of b_hh, that of n is apart
            where = lambda c: (c.weight_ih, c.weight_hh, c.bias, c.bias_n)
            new += [params["bias_ih"] + params["bias_hh"].at[2 * size :].set(0), params["bias_hh"][2 * size :]]
        cell = eqx.tree_at(where, cell, new)
        state = tuple(inputs[:2]) if gates == 4 else inputs[0]
        out = jax.vmap(cell)(inputs[-1], state)
        return ((*out, out[0]) if gates == 4 else (out, out)), {}

    return peer


def cell_of_haiku(name: str) -> Callable[..., Any]:
    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import haiku as hk

        size, bias = params["weight_hh"].shape[1], params["bias_ih"] + params["bias_hh"]
        w, u = params["weight_ih"].T, params["weight_hh"].T
        if name == "SimpleCell":
            values = {
                "vanilla_rnn/linear": {"w": w, "b": params["bias_ih"]},
                "vanilla_rnn/linear_1": {"w": u, "b": params["bias_hh"]},
            }
            forward = hk.transform(lambda h, x: hk.VanillaRNN(size, double_bias=True)(x, h))
            y, h = forward.apply(values, None, *inputs)
            return (h, y), {}
        if name == "GRUCell":  # gates z, r, a, and z is the other one's 1 - z
            order = lambda a: jnp.concatenate([-a[..., size : 2 * size], a[..., :size], a[..., 2 * size :]], -1)
            forward = hk.transform(lambda h, x: hk.GRU(size)(x, h))
            y, h = forward.apply({"gru": {"w_i": order(w), "w_h": order(u), "b": order(bias)}}, None, *inputs)
            return (h, y), {}
        order = lambda a: jnp.concatenate([a[..., k * size : (k + 1) * size] for k in (0, 2, 1, 3)], -1)  # i, g, f, o
        values = {"w": order(jnp.concatenate([w, u])), "b": order(bias.at[size : 2 * size].add(-1))}  # it adds 1 to f
        forward = hk.transform(lambda h, c, x: hk.LSTM(size)(x, hk.LSTMState(h, c)))
        y, after = forward.apply({"lstm/linear": values}, None, *inputs)
        return (after.hidden, after.cell, y), {}

    return peer


# Sequences: inputs are x and perhaps the carry and lengths; outputs are y and the carry at the end


def call_rnn(rnn: Any, x: Any, lengths: Any = None) -> Any:
    carry, y = rnn(x, lengths=lengths, return_carry=True)
    return (y, *jax.tree.leaves(carry))


def rnn_of_torch(kind: str, paths: tuple[str, ...] = ("cell.",), **options: Any) -> Callable[..., Any]:
    """torch.nn.RNN, GRU or LSTM, of one cell for each direction and layer, in its order."""

    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        import torch
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

        directions = 2 if options.get("bidirectional") else 1
        layers = len(paths) // directions
        first = part(params, paths[0])
        module = getattr(torch.nn, kind)(
            first["weight_ih"].shape[1],
            first["weight_hh"].shape[1],
            num_layers=layers,
            batch_first=True,
            dtype=torch.float64,
            **options,
        )
        values = {}
        for place, path in enumerate(paths):
            end = f"_l{place // directions}{'_reverse' if place % directions else ''}"
            values |= {name + end: value for name, value in part(params, path).items()}
        x, lengths = inputs[0], inputs[1] if len(inputs) == 2 else None
        given = x if lengths is None else pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state = torch.func.functional_call(module, values, (given,))
        y = out if lengths is None else pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0]
        states_ = state if kind == "LSTM" else (state,)
        return (y, *(s[place] for place in range(len(paths)) for s in states_)), {}

    return peer


def rnn_of_flax(name: str, reverse: bool = False) -> Callable[..., Any]:
    def peer(params: Any, states: Any, inputs: Any, training: bool) -> Any:
        from flax import nnx

        rnn = nnx.RNN(flax_cell(name, part(params, "cell.")), reverse=reverse, keep_order=True, rngs=False)
        start = jnp.zeros((BATCH, SIZE))
        lengths = inputs[1] if len(inputs) == 2 else None
        start = (start, start) if name == "LSTMCell" else start
        carry, y = rnn(inputs[0], initial_carry=start, seq_lengths=lengths, return_carry=True)
        if lengths is not None:  # it computes on in the padding
            y = jnp.where((jnp.arange(TIME) < lengths[:, None])[..., None], y, 0)
        return (y, *(carry[::-1] if name == "LSTMCell" else (carry,))), {}

    return peer


def bidirectional_of_flax(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    from flax import nnx

    directions = [nnx.RNN(flax_cell("LSTMCell", part(params, f"{way}.cell.")), rngs=False) for way in WAYS]
    start = (jnp.zeros((BATCH, SIZE)),) * 2
    model = nnx.Bidirectional(*directions, rngs=False)
    carries, y = model(inputs[0], initial_carry=(start, start), return_carry=True)
    return (y, *(a for c, h in carries for a in (h, c))), {}


def rnn_of_haiku(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    step = cell_of_haiku("LSTMCell")
    cell, zero = part(params, "cell."), jnp.zeros((BATCH, SIZE))

    def turn(carry: Any, x: Any) -> Any:
        h, c, y = step(cell, {}, (*carry, x), training)[0]
        return (h, c), y

    carry, y = jax.lax.scan(turn, (zero, zero), jnp.moveaxis(inputs[0], 1, 0))
    return (jnp.moveaxis(y, 0, 1), *carry), {}


def rnn_of_equinox(params: Any, states: Any, inputs: Any, training: bool) -> Any:
    step = cell_of_equinox("GRUCell")
    cell = part(params, "cell.")

    def turn(carry: Any, x: Any) -> Any:
        return step(cell, {}, (carry, x), training)[0]

    carry, y = jax.lax.scan(turn, jnp.zeros((BATCH, SIZE)), jnp.moveaxis(inputs[0], 1, 0))
    return (jnp.moveaxis(y, 0, 1), carry), {}


def call_layers(layers: Any, x: Any, lengths: Any) -> Any:
    carries = []
    for layer in layers:
        carry, x = layer(x, lengths=lengths, return_carry=True)
        carries.append(carry)
    return (x, *jax.tree.leaves(carries))


WAYS = ("forward", "backward")
CELLS = {"SimpleCell": SimpleCell, "GRUCell": GRUCell, "LSTMCell": LSTMCell}
TORCH = {"SimpleCell": ("RNN", "rnn_tanh_cell"), "GRUCell": ("GRU", "gru_cell"), "LSTMCell": ("LSTM", "lstm_cell")}


def step_case(name: str, setting: str, peers: Mapping[str, Any], size: int = SIZE, **options: Any) -> Case:
    state = [(BATCH, size)] * (2 if name == "LSTMCell" else 1)
    inputs = normal(*state, (BATCH, IN))
    make = lambda: CELLS[name](IN, size, key=key(), **options)
    return Case(name, setting, make, inputs, peers, call_cell, training=(True,))


def both_ways(name: str, size: int = IN) -> Bidirectional:
    make = CELLS[name]
    return Bidirectional(RNN(make(size, SIZE, key=key())), RNN(make(size, SIZE, key=key()), reverse=True))


def padded(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    return rng.normal(size=(BATCH, TIME, IN)), LENGTHS


def rnn_case(setting: str, make: Any, peers: Mapping[str, Any], inputs: Any = None, layer: str = "RNN") -> Case:
    inputs = inputs or normal((BATCH, TIME, IN))
    call = call_layers if "layers" in setting else call_rnn
    return Case(layer, setting, make, inputs, peers, call, training=(True,))


def rnn(name: str, **options: Any) -> Callable[[], RNN]:
    return lambda: RNN(CELLS[name](IN, SIZE, key=key()), **options)


def two_layers() -> nn.Sequential:
    return nn.Sequential([both_ways("LSTMCell"), both_ways("LSTMCell", 2 * SIZE)])


DEEP = tuple(f"[{layer}].{way}.cell." for layer in range(2) for way in WAYS)
FLAX, EQUINOX, HAIKU = cell_of_flax, cell_of_equinox, cell_of_haiku

CASES = [
    step_case("SimpleCell", "", {"PyTorch": cell_of_torch("rnn_tanh_cell"), "Flax NNX": FLAX("SimpleCell")}),
    step_case("SimpleCell", "use_bias=False", {"PyTorch": cell_of_torch("rnn_tanh_cell")}, use_bias=False),
    step_case(
        "SimpleCell",
        "activation=relu",
        {"PyTorch": cell_of_torch("rnn_relu_cell"), "Haiku": HAIKU("SimpleCell")},
        activation=jax.nn.relu,
    ),
    step_case("GRUCell", "", {"PyTorch": cell_of_torch("gru_cell"), "Equinox": EQUINOX("GRUCell")}),
    step_case(
        "GRUCell",
        "use_bias=False",
        {"PyTorch": cell_of_torch("gru_cell"), "Flax NNX": FLAX("GRUCell")},
        use_bias=False,
    ),
    step_case("GRUCell", "reset_after=False", {"Haiku": HAIKU("GRUCell")}, reset_after=False),
    step_case(
        "LSTMCell",
        "",
        {
            "PyTorch": cell_of_torch("lstm_cell"),
            "Flax NNX": FLAX("LSTMCell"),
            "Equinox": EQUINOX("LSTMCell"),
            "Haiku": HAIKU("LSTMCell"),
        },
    ),
    step_case("LSTMCell", "use_bias=False", {"PyTorch": cell_of_torch("lstm_cell")}, use_bias=False),
    step_case("LSTMCell", "hidden_size=1", {"PyTorch": cell_of_torch("lstm_cell")}, size=1),
    rnn_case("SimpleCell", rnn("SimpleCell"), {"PyTorch": rnn_of_torch("RNN"), "Flax NNX": rnn_of_flax("SimpleCell")}),
    rnn_case("GRUCell", rnn("GRUCell"), {"PyTorch": rnn_of_torch("GRU"), "Equinox": rnn_of_equinox}),
    rnn_case(
        "LSTMCell",
        rnn("LSTMCell"),
        {"PyTorch": rnn_of_torch("LSTM"), "Flax NNX": rnn_of_flax("LSTMCell"), "Haiku": rnn_of_haiku},
    ),
    rnn_case("LSTMCell, reverse", rnn("LSTMCell", reverse=True), {"Flax NNX": rnn_of_flax("LSTMCell", reverse=True)}),
    rnn_case("SimpleCell, lengths", rnn("SimpleCell"), {"PyTorch": rnn_of_torch("RNN")}, padded),
    rnn_case("GRUCell, lengths", rnn("GRUCell"), {"PyTorch": rnn_of_torch("GRU")}, padded),
    rnn_case(
        "LSTMCell, lengths",
        rnn("LSTMCell"),
        {"PyTorch": rnn_of_torch("LSTM"), "Flax NNX": rnn_of_flax("LSTMCell")},
        padded,
    ),
    rnn_case(
        "LSTMCell, lengths, reverse",
        rnn("LSTMCell", reverse=True),
        {"Flax NNX": rnn_of_flax("LSTMCell", reverse=True)},
        padded,
    ),
    *(
        rnn_case(
            f"{name}{', lengths' if inputs else ''}",
            lambda name=name: both_ways(name),
            {"PyTorch": rnn_of_torch(TORCH[name][0], tuple(f"{way}.cell." for way in WAYS), bidirectional=True)}
            | ({"Flax NNX": bidirectional_of_flax} if name == "LSTMCell" and not inputs else {}),
            inputs,
            "Bidirectional",
        )
        for name in CELLS
        for inputs in (None, padded)
    ),
    rnn_case(
        "LSTMCell, two layers, lengths",
        two_layers,
        {"PyTorch": rnn_of_torch("LSTM", DEEP, bidirectional=True)},
        padded,
        "Bidirectional",
    ),
]
