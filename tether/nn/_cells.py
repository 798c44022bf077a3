# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells: one step in time, ``cell(carry, x) -> (carry, y)``; ``RNN`` runs them over a sequence.

A carry is a plain array, or a named pair of arrays for the LSTM, so that loops, gradients and users treat it like any
other value. It keeps its dtype from step to step, whatever the dtype of the computation: a step in float16 adds to a
memory in float32. What of a step doesn't depend on the carry is ``project``, which takes all steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from tether._core import Param
from tether._modules import Module
from tether.errors import DtypeError, ShapeError, StructureError, describe
from tether.nn import init
from tether.nn._inputs import (
    as_array,
    at_least_float32,
    computing_dtype,
    function_of_array,
    initial,
    integer,
    name_of,
    real_dtype,
)
from tether.random import keys

_REAL = "its gates are functions of real numbers"


class LSTMCarry(NamedTuple):
    """What an LSTMCell hands from step to step, each float[..., hidden_size].

    By name, because libraries differ in the order.

    Args:
        h: The hidden state, which is the output, too.
        c: The memory.
    Example:
        >>> carry = nn.LSTMCell(3, 4).init_carry(2)
        >>> carry.h.shape, carry.c.shape
        ((2, 4), (2, 4))
    """

    h: jax.Array
    c: jax.Array


class Cell(Module):
    """Holds what SimpleCell, GRUCell and LSTMCell share: parameters, and all but the equations of a step."""

    gates: ClassVar[int]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        use_bias: bool = True,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
        weight_init: init.Initializer | None = None,
        recurrent_init: init.Initializer | None = None,
        bias_init: init.Initializer | None = None,
    ):
        name = name_of(self)
        self.input_size = integer(name, "input_size", input_size)
        self.hidden_size = integer(name, "hidden_size", hidden_size)
        self.compute_dtype = None
        dtype = real_dtype(name, dtype, _REAL)
        default, rows = init.symmetric_uniform(1 / math.sqrt(self.hidden_size)), self.gates * self.hidden_size
        # Four keys whether or not there are biases: the weights of a seed don't depend on use_bias.
        k1, k2, k3, k4 = keys(key, 4)
        self.weight_ih = Param(initial(name, "weight", weight_init, default, k1, (rows, self.input_size), dtype))
        self.weight_hh = Param(initial(name, "recurrent", recurrent_init, default, k2, (rows, self.hidden_size), dtype))
        self.bias_ih = self.bias_hh = None
        if use_bias:
            self.bias_ih = Param(initial(name, "bias", bias_init, default, k3, (rows,), dtype))
            self.bias_hh = Param(initial(name, "bias", bias_init, default, k4, (rows,), dtype))

    def init_carry(self, batch_shape: int | Sequence[int] = (), dtype: DTypeLike | None = None) -> Any:
        """Gives the carry that a sequence begins with, zeros.

        Args:
            batch_shape: Sizes of the batch axes of x; an int is one axis, () a single example.
            dtype: Of the carry; None is that of the parameters, and at least float32.
        """
        name = name_of(self)
        sizes = batch_shape if isinstance(batch_shape, list | tuple) else [batch_shape]
        shape = (*(integer(name, "batch_shape", size, 0) for size in sizes), self.hidden_size)
        return jnp.zeros(
            shape, at_least_float32(self.weight_hh.dtype) if dtype is None else real_dtype(name, dtype, _REAL)
        )

    def project(self, x: ArrayLike) -> tuple[jax.Array, ...]:
        """Gives x W_ih^T + b_ih for each gate: the part of a step that doesn't depend on the carry.

        A step takes it in the place of x, with ``projected=True``. Any axes may lead, time among them: one product for
        all steps, which is what RNN does, is quicker than one in each.

        Shapes:
            x: float[..., input_size] -> one float[..., hidden_size] for each gate, in the order of the rows of W_ih
        """
        x = as_array(self, x)
        if x.shape[-1:] != (self.input_size,):
            raise ShapeError(
                f"{name_of(self)}: the last axis of x is not input_size, {self.input_size}.",
                got=describe(x),
                expected=f"[..., {self.input_size}]",
                fix=f"{name_of(self)}({x.shape[-1] if x.ndim else 1}, {self.hidden_size})",
            )
        dtype = computing_dtype(self, x, self.weight_ih)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise DtypeError(
                f"{name_of(self)}: its gates are functions of real numbers.",
                got=describe(x) if self.compute_dtype is None else f"{describe(x)}, compute_dtype={dtype}",
                expected="a real array",
                fix="jnp.concatenate([x.real, x.imag], -1)",
            )
        # Apart before a loop and not in it: XLA's CPU code of a step is slower by half where it has to part them.
        return self._split(_affine(x, self.weight_ih, self.bias_ih, dtype))

    def _split(self, gates: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.split(gates, self.gates, -1))

    def _inputs(self, x: Any, projected: bool) -> tuple[tuple[jax.Array, ...], jnp.dtype]:
        """Gives the projection, in float32 or wider, in which gates are computed, and the dtype of products."""
        if not projected:
            x = self.project(x)
        elif not isinstance(x, tuple) or [jnp.shape(gate)[-1:] for gate in x] != [(self.hidden_size,)] * self.gates:
            raise ShapeError(
                f"{name_of(self)}: projected=True, and x is not a projection.",
                got=describe(x),
                expected=f"{self.gates} of float[..., {self.hidden_size}], as cell.project gives them",
                fix=["cell(carry, cell.project(x), projected=True)", "cell(carry, x)"],
            )
        dtype = x[0].dtype
        return tuple(_to(gate, at_least_float32(dtype)) for gate in x), dtype

    def _state(self, state: jax.Array, inputs: jax.Array, what: str = "the carry") -> jax.Array:
        """Reads an array of the carry in the dtype in which gates are computed; inputs is one of them."""
        if not jnp.issubdtype(getattr(state, "dtype", None) or jnp.int32, jnp.floating):
            raise DtypeError(
                f"{name_of(self)}: {what} is not a floating array.",
                got=describe(state),
                expected=f"float[{', '.join(map(str, inputs.shape))}]",
                fix=f"cell.init_carry({inputs.shape[:-1]}) to begin with",
            )
        if state.shape != inputs.shape:
            raise ShapeError(
                f"{name_of(self)}: the shape of {what} is not (*batch, {self.hidden_size}), with the batch axes of x.",
                got=f"{what} {describe(state)}, and x with batch axes {inputs.shape[:-1]}",
                expected=f"[{', '.join(map(str, inputs.shape))}]",
                fix=f"cell.init_carry({inputs.shape[:-1]}) to begin with",
            )
        return _to(jnp.asarray(state), inputs.dtype)

    def _recur(self, h: jax.Array, dtype: jnp.dtype, rows: slice | None = None) -> jax.Array:
        """Gives h W_hh^T + b_hh, or these rows of it: the product in dtype, the result in that of h."""
        weight, bias = self.weight_hh, self.bias_hh
        if rows is not None:
            weight, bias = weight[rows], None if bias is None else bias[rows]
        return _to(_affine(h, weight, bias, dtype), h.dtype)


class SimpleCell(Cell):
    """Elman's cell, one step in time of the plain recurrent network.

    h' = activation(W_ih x + b_ih + W_hh h + b_hh), y = h'

    Products are computed in the dtype of a floating x (``compute_dtype`` goes before it), which y has, and all else in
    float32 or wider. The carry keeps its dtype.

    Args:
        input_size, hidden_size: Sizes of the last axes of x and y, at least 1.
        activation: Function of an array that keeps its shape, or a Module; ``jax.nn.relu`` is usual, too.
        use_bias: Whether b_ih and b_hh are there.
        key: PRNG key of the first values; None draws from the default stream.
        dtype: Of the parameters.
        weight_init, recurrent_init, bias_init: Functions (key, shape, dtype) -> array as in ``nn.init``, for W_ih, for
            W_hh, and for both biases; None is U(-k, k), k = 1 / sqrt(hidden_size).
    Variables:
        weight_ih: Param, float[hidden_size, input_size].
        weight_hh: Param, float[hidden_size, hidden_size].
        bias_ih, bias_hh: Param, float[hidden_size]; None without use_bias.
    Shapes:
        carry, x: float[..., hidden_size], float[..., input_size] -> the carry, and y: float[..., hidden_size]
    Raises:
        ShapeError: the last axis of x is not input_size, or the carry doesn't fit x.
        DtypeError: x is not an array of real numbers, or the carry is not a floating array.
        ArgumentError: a size below 1, a dtype that isn't real, an activation that can't be called.
    Example:
        >>> cell = nn.SimpleCell(3, 4, key=jax.random.key(0))
        >>> carry, y = cell(cell.init_carry(2), jnp.ones((2, 3)))
        >>> y.shape
        (2, 4)
    References:
        Elman 1990, Finding structure in time, Cognitive Science 14.
        torch.nn.RNNCell, PyTorch 2.13, for layout and first values.
    """

    gates = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        activation: Callable[[jax.Array], jax.Array] = jnp.tanh,
        *,
        use_bias: bool = True,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
        weight_init: init.Initializer | None = None,
        recurrent_init: init.Initializer | None = None,
        bias_init: init.Initializer | None = None,
    ):
        super().__init__(
            input_size,
            hidden_size,
            use_bias=use_bias,
            key=key,
            dtype=dtype,
            weight_init=weight_init,
            recurrent_init=recurrent_init,
            bias_init=bias_init,
        )
        self.activation = function_of_array(name_of(self), "activation", activation)

    def __call__(self, carry: jax.Array, x: ArrayLike, *, projected: bool = False) -> tuple[jax.Array, jax.Array]:
        (x,), dtype = self._inputs(x, projected)
        h = self._state(carry, x)
        h = self.activation(x + self._recur(h, dtype))
        return _like(carry, h), _to(h, dtype)


class GRUCell(Cell):
    """One step in time of the gated recurrent unit.

    r = sigmoid(W_ir x + b_ir + W_hr h + b_hr), z = sigmoid(W_iz x + b_iz + W_hz h + b_hz),
    n = tanh(W_in x + b_in + r * (W_hn h + b_hn)), h' = (1 - z) * n + z * h, y = h'

    Dtypes as in SimpleCell.

    Args:
        input_size, hidden_size: Sizes of the last axes of x and y, at least 1.
        reset_after: Whether r multiplies the product W_hn h + b_hn, as in PyTorch, cuDNN, Flax and Equinox. False is
            the paper, and Haiku: n = tanh(W_in x + b_in + W_hn (r * h) + b_hn).
        use_bias, key, dtype, weight_init, recurrent_init, bias_init: As in SimpleCell; an initializer gives all gates
            at once.
    Variables:
        weight_ih: Param, float[3 * hidden_size, input_size]; rows of r, z, n.
        weight_hh: Param, float[3 * hidden_size, hidden_size]; rows of r, z, n.
        bias_ih, bias_hh: Param, float[3 * hidden_size]; None without use_bias.
    Shapes:
        carry, x: float[..., hidden_size], float[..., input_size] -> the carry, and y: float[..., hidden_size]
    Raises:
        ShapeError: the last axis of x is not input_size, or the carry doesn't fit x.
        DtypeError: x is not an array of real numbers, or the carry is not a floating array.
        ArgumentError: a size below 1, or a dtype that isn't real.
    Example:
        >>> cell = nn.GRUCell(3, 4, key=jax.random.key(0))
        >>> carry, y = cell(cell.init_carry(2), jnp.ones((2, 3)))
        >>> y.shape
        (2, 4)
    References:
        Cho et al. 2014, arXiv:1406.1078, section 2.3; z there is 1 - z in Chung et al. 2014, arXiv:1412.3555.
        torch.nn.GRUCell, PyTorch 2.13, for layout, reset_after and first values.
    """

    gates = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        reset_after: bool = True,
        use_bias: bool = True,
        key: jax.Array | None = None,
        dtype: DTypeLike = jnp.float32,
        weight_init: init.Initializer | None = None,
        recurrent_init: init.Initializer | None = None,
        bias_init: init.Initializer | None = None,
    ):
        super().__init__(
            input_size,
            hidden_size,
            use_bias=use_bias,
            key=key,
            dtype=dtype,
            weight_init=weight_init,
            recurrent_init=recurrent_init,
            bias_init=bias_init,
        )
        self.reset_after = bool(reset_after)

    def __call__(self, carry: jax.Array, x: ArrayLike, *, projected: bool = False) -> tuple[jax.Array, jax.Array]:
        (r, z, n), dtype = self._inputs(x, projected)
        h = self._state(carry, r)
        if self.reset_after:
            h_r, h_z, h_n = self._split(self._recur(h, dtype))
            h_n = jax.nn.sigmoid(r + h_r) * h_n
        else:
            both = 2 * self.hidden_size
            h_r, h_z = jnp.split(self._recur(h, dtype, slice(both)), 2, -1)
            h_n = self._recur(jax.nn.sigmoid(r + h_r) * h, dtype, slice(both, None))
        z, n = jax.nn.sigmoid(z + h_z), jnp.tanh(n + h_n)
        h = (1 - z) * n + z * h
        return _like(carry, h), _to(h, dtype)


class LSTMCell(Cell):
    """One step in time of the long short-term memory.

    i = sigmoid(W_ii x + b_ii + W_hi h + b_hi), f and o likewise, g likewise with tanh;
    c' = f * c + i * g, h' = o * tanh(c'), y = h'

    The carry is the named pair ``nn.LSTMCarry(h, c)``. Dtypes as in SimpleCell.

    Args:
        input_size, hidden_size: Sizes of the last axes of x and y, at least 1.
        use_bias, key, dtype, weight_init, recurrent_init, bias_init: As in SimpleCell; an initializer gives all gates
            at once.
    Variables:
        weight_ih: Param, float[4 * hidden_size, input_size]; rows of i, f, g, o.
        weight_hh: Param, float[4 * hidden_size, hidden_size]; rows of i, f, g, o.
        bias_ih, bias_hh: Param, float[4 * hidden_size]; None without use_bias.
    Shapes:
        carry, x: LSTMCarry of two float[..., hidden_size], float[..., input_size] -> LSTMCarry, and y:
            float[..., hidden_size]
    Raises:
        ShapeError: the last axis of x is not input_size, or the carry doesn't fit x.
        StructureError: the carry is not an LSTMCarry.
        DtypeError: x is not an array of real numbers, or the carry is not of floating arrays.
        ArgumentError: a size below 1, or a dtype that isn't real.
    Example:
        >>> cell = nn.LSTMCell(3, 4, key=jax.random.key(0))
        >>> carry, y = cell(cell.init_carry(2), jnp.ones((2, 3)))
        >>> y.shape, carry.c.shape
        ((2, 4), (2, 4))
        >>> half_for_f = lambda key, shape, dtype: jnp.zeros(shape, dtype).at[4:8].set(0.5)  # to forget little at first
        >>> cell = nn.LSTMCell(3, 4, bias_init=half_for_f)
        >>> (cell.bias_ih + cell.bias_hh)[4:8].tolist()
        [1.0, 1.0, 1.0, 1.0]
    References:
        Hochreiter and Schmidhuber 1997, Neural Computation 9; with the forget gate of Gers et al. 2000, ibid. 12.
        torch.nn.LSTMCell, PyTorch 2.13, for layout and first values.
    """

    gates = 4

    def init_carry(self, batch_shape: int | Sequence[int] = (), dtype: DTypeLike | None = None) -> LSTMCarry:
        """As in the other cells, for h and for c."""
        # Two arrays, not one twice: a jit that donates the carry can't donate a buffer twice.
        return LSTMCarry(super().init_carry(batch_shape, dtype), super().init_carry(batch_shape, dtype))

    def __call__(self, carry: LSTMCarry, x: ArrayLike, *, projected: bool = False) -> tuple[LSTMCarry, jax.Array]:
        gates, dtype = self._inputs(x, projected)
        if not isinstance(carry, LSTMCarry):
            raise StructureError(
                f"{name_of(self)}: the carry is not an LSTMCarry.",
                got=describe(carry),
                expected="nn.LSTMCarry(h, c), named because libraries differ in the order",
                fix=["nn.LSTMCarry(h=..., c=...)", f"cell.init_carry({gates[0].shape[:-1]}) to begin with"],
            )
        h, c = self._state(carry.h, gates[0], "h in the carry"), self._state(carry.c, gates[0], "c in the carry")
        i, f, g, o = (a + b for a, b in zip(gates, self._split(self._recur(h, dtype)), strict=True))
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return LSTMCarry(_like(carry.h, h), _like(carry.c, c)), _to(h, dtype)


def _to(a: jax.Array, dtype: jnp.dtype) -> jax.Array:
    # An eager astype costs a dispatch even where it changes nothing.
    return a if a.dtype == dtype else a.astype(dtype)


def _like(old: jax.Array, new: jax.Array) -> jax.Array:
    """Gives an array of the carry the dtype of the one whose place it takes."""
    return _to(new, jax.dtypes.canonicalize_dtype(old.dtype))  # that of a NumPy array may have 64 bits


def _affine(x: jax.Array, weight: jax.Array, bias: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Gives x W^T + b, computed in dtype."""
    y = lax.dot_general(_to(x, dtype), _to(weight, dtype), (((x.ndim - 1,), (1,)), ((), ())))
    if bias is None:
        return y
    with jax.numpy_rank_promotion("allow"):  # as in Linear
        return y + _to(bias, dtype)
