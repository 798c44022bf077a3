# SPDX-License-Identifier: Apache-2.0
"""Programs that run under Equinox 0.9.2 and under its home; what they print under Equinox is in equinox_092.json.

To record anew, with Python 3.11, in an environment of its own:
``pip install jax==0.4.13 jaxlib==0.4.13 "numpy<1.26" "scipy<1.12" jaxtyping==0.2.20 equinox==0.9.2``, then
``python programs.py > equinox_092.json``.
"""

import io
import json

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

KEY = (0, 7)
X = np.linspace(-1, 2, 12, dtype=np.float32).reshape(4, 3) ** 2
IMAGE = np.linspace(-1, 1, 2 * 7 * 6, dtype=np.float32).reshape(2, 7, 6) ** 3


def _array(x):
    return jnp.asarray(x)


def _key():
    return jnp.array(KEY, dtype=jnp.uint32)


def _layers(eqx):
    nn, key = eqx.nn, _key()
    line, volume = IMAGE[:, 0], np.stack([IMAGE, 2 * IMAGE], 1)
    yield "Linear", nn.Linear(3, 2, key=key), (X[0],)
    yield "Linear without bias", nn.Linear(3, 2, use_bias=False, key=key), (X[0],)
    yield "Identity", nn.Identity(3), (X[0],)
    yield "Conv1d", nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2, key=key), (line,)
    yield "Conv2d", nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), key=key), (IMAGE,)
    yield "Conv3d", nn.Conv3d(2, 1, 2, use_bias=False, key=key), (volume,)
    yield "ConvTranspose1d", nn.ConvTranspose1d(2, 4, 3, stride=2, output_padding=1, padding=1, key=key), (line,)
    yield "ConvTranspose2d", nn.ConvTranspose2d(2, 2, 3, stride=(2, 3), groups=2, dilation=2, key=key), (IMAGE,)
    yield "ConvTranspose3d", nn.ConvTranspose3d(2, 1, 2, key=key), (volume[:, :, :3, :3],)
    yield "Embedding", nn.Embedding(5, 3, key=key), (np.array(2),)
    yield "MLP", nn.MLP(3, 2, 4, 2, final_activation=jnp.tanh, key=key), (X[0],)
    yield "MLP of depth 0", nn.MLP(3, 2, 4, 0, key=key), (X[0],)
    yield "MLP with tanh", nn.MLP(3, 1, 4, 1, jnp.tanh, key=key), (X[0],)
    yield "GRUCell", nn.GRUCell(3, 2, key=key), (X[0], X[1, :2])
    yield "LSTMCell", nn.LSTMCell(3, 2, key=key), (X[0], (X[1, :2], X[2, :2]))
    yield "LayerNorm", nn.LayerNorm((3,)), (X[0],)
    yield "LayerNorm without weights", nn.LayerNorm((4, 3), eps=0.1, elementwise_affine=False), (X,)
    yield "GroupNorm", nn.GroupNorm(2, 4), (X,)
    yield "AvgPool1d", nn.AvgPool1d(2, stride=2, padding=1), (line,)
    yield "AvgPool2d", nn.AvgPool2d((3, 2), stride=(1, 2)), (IMAGE,)
    yield "AvgPool3d", nn.AvgPool3d(2, 1), (volume,)
    yield "MaxPool1d", nn.MaxPool1d(3, 2, 1), (line,)
    yield "MaxPool2d with ceil", nn.MaxPool2d(3, stride=2, use_ceil=True), (IMAGE,)
    yield "MaxPool3d", nn.MaxPool3d(2, 2), (volume,)
    yield "AdaptiveAvgPool2d", nn.AdaptiveAvgPool2d((3, 4)), (IMAGE,)
    yield "AdaptiveMaxPool1d", nn.AdaptiveMaxPool1d(4), (line,)
    yield "MultiheadAttention", nn.MultiheadAttention(2, 4, use_query_bias=True, key=key), (X.T, X.T, X.T)
    masked = nn.MultiheadAttention(2, 4, 3, 2, 5, qk_size=3, vo_size=2, use_output_bias=True, key=key)
    mask = np.tril(np.ones((2, 3, 4), bool))
    yield "MultiheadAttention of other sizes", masked, (X.T, X, X[:, :2], mask)
    yield "Sequential", nn.Sequential([nn.Linear(3, 4, key=key), nn.Identity(), nn.LayerNorm((4,))]), (X[0],)


def layers(eqx):
    """Initial weights and outputs."""
    out = {}
    for name, layer, args in _layers(eqx):
        args = jtu.tree_map(_array, args)
        weights = [leaf for leaf in jtu.tree_leaves(layer) if eqx.is_array(leaf)]
        out[name] = {"weights": weights, "out": jtu.tree_leaves(layer(*args))}
    dropout = eqx.nn.Dropout(0.25)
    out["Dropout"] = {"weights": [], "out": [dropout(_array(X), key=_key())]}
    return out


def text(eqx):
    """What is printed."""
    layer = eqx.nn.MLP(2, 1, 3, 1, key=_key())
    tree = {"a": [layer.layers[0], 1.0], "b": (np.zeros(2),)}
    return {"repr": repr(layer), "narrow": eqx.tree_pformat(tree, width=30)}


def file(eqx):
    """The bytes of a file of leaves, as numbers."""
    stream = io.BytesIO()
    eqx.tree_serialise_leaves(stream, {"a": jnp.arange(3.0), "b": [2, np.ones(1), True, 1j]})
    return {"bytes": np.frombuffer(stream.getvalue(), np.uint8)}


def _stages(eqx):
    class Stage(eqx.Module):
        layer: eqx.nn.Linear
        norm: eqx.experimental.BatchNorm

        def __call__(self, x):
            return self.norm(self.layer(x))

    keys = [_key(), _key() + 1]
    return [Stage(eqx.nn.Linear(3, 3, key=key), eqx.experimental.BatchNorm(3, axis_name="batch")) for key in keys]


def _run(stage, x):
    return jax.vmap(stage, axis_name="batch")(x)


def stages_in_turn(eqx):
    """A pipeline: the second stage runs from the third iteration on, always on one batch."""
    first, second = _stages(eqx)
    outs = []
    for i in range(5):
        y = _run(first, _array(X))
        outs.append(_run(second, y) if i >= 2 else y)
    return {"outs": outs}


def compiled(eqx):
    """Other batches in a compiled function, then inference."""
    first, second = _stages(eqx)
    run = eqx.filter_jit(_run)
    outs = [run(second, run(first, _array(X) * (1 + i % 2))) for i in range(4)]
    first, second = eqx.tree_inference([first, second], True)
    return {"outs": [*outs, run(second, run(first, _array(X)))]}


def trained(eqx):
    """Gradient steps through both stages."""
    stages = _stages(eqx)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(stages, x):
        for stage in stages:
            x = _run(stage, x)
        return jnp.mean((x - 1) ** 2)

    values = []
    for i in range(4):
        value, gradient = loss(stages, _array(X) + 0.1 * i)
        stages = eqx.apply_updates(stages, jtu.tree_map(lambda g: -0.05 * g, gradient))
        values.append(value)
    return {"losses": values, "weight": stages[1].layer.weight, "scale": stages[1].norm.weight}


def micro_batches(eqx):
    """Each batch twice, as in a pipeline that repeats them; at the end what is stored, as inference shows it."""
    stages, outs = _stages(eqx), []
    for batch in (X, X + 1, 2 * X):
        for _ in range(2):
            y = _array(batch)
            for stage in stages:
                y = _run(stage, y)
            outs.append(y)
    return {"outs": outs, "inference": _run(eqx.tree_inference(stages[0], True), _array(X))}


def spectral(eqx):
    """A layer whose weight is normalized."""
    layer = eqx.nn.Linear(3, 3, key=_key())
    layer = eqx.tree_at(lambda l: l.weight, layer, eqx.experimental.SpectralNorm(layer.weight, key=_key() + 1))
    outs = [jax.vmap(layer)(_array(X)) for _ in range(3)]
    return {"outs": outs, "inference": jax.vmap(eqx.tree_inference(layer, True))(_array(X))}


PROGRAMS = [layers, text, file, stages_in_turn, compiled, trained, micro_batches, spectral]


def results(eqx):
    """What each program gives, in lists and numbers."""

    def plain(leaf):
        return np.asarray(leaf).tolist() if hasattr(leaf, "shape") else leaf

    return {program.__name__: jtu.tree_map(plain, program(eqx)) for program in PROGRAMS}


if __name__ == "__main__":
    import equinox

    print(json.dumps(results(equinox)))
