# SPDX-License-Identifier: Apache-2.0
"""What every layer asks of its arguments and of its input, said once.

A layer computes in one dtype and returns it: ``compute_dtype`` where a view has set it, else the dtype of a floating
input, else (an integer or bool input) the dtype of the parameters. So float16 in is float16 out, whatever the
parameters are. NumPy arrays are inputs like any other, under JAX's rule for 64 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import ArrayLike, DTypeLike

from tether._modules import Module
from tether.errors import ArgumentError, DtypeError, ShapeError, describe


class Computing(Protocol):
    """A layer that computes in a dtype of its own."""

    @property
    def compute_dtype(self) -> DTypeLike | None: ...


def name_of(module: object) -> str:
    """Gives the name that begins the layer's messages: the class of the layer, a user's subclass included."""
    return type(module).__name__


def integer(name: str, argument: str, value: Any, least: int = 1) -> int:
    """Reads a size or count, at least ``least``; a bool isn't one."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # also what a tracer raises
        number = None
    if number is None or number < least:
        raise ArgumentError(
            f"{name}: {argument} is not an integer of at least {least}.",
            got=f"{argument}={describe(value)}",
            expected=f"an int >= {least}",
            fix=f"pass {argument}={least} or more",
        )
    return number


def positive(name: str, argument: str, value: float, example: float) -> float:
    """Reads a number above 0, such as an eps."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ArgumentError(
            f"{name}: {argument} is not a positive number.",
            got=f"{argument}={describe(value)}",
            expected="a float > 0",
            fix=f"{argument}={example}",
        )
    return float(value)


def inexact_dtype(name: str, argument: str, value: DTypeLike) -> jnp.dtype:
    """Reads the dtype of parameters or of a computation, which must be floating or complex."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if value is None or dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        raise ArgumentError(
            f"{name}: {argument} is not a floating dtype.",
            got=f"{argument}={describe(value)}" if dtype is None else f"{argument}={dtype}",
            expected="float16, bfloat16, float32, float64 or a complex dtype",
            fix=f"{argument}=jnp.float32",
        )
    return dtype


def real_dtype(name: str, value: DTypeLike, why: str) -> jnp.dtype:
    """Reads the dtype of parameters where complex ones have no meaning; ``why`` ends the message."""
    dtype = inexact_dtype(name, "dtype", value)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ArgumentError(
            f"{name}: dtype is complex, and {why}.",
            got=f"dtype={dtype}",
            expected="float16, bfloat16, float32 or float64",
            fix="dtype=jnp.float32",
        )
    return dtype


def function_of_array(name: str, argument: str, function: Callable) -> Callable:
    """Reads a function of an array, or a Module; a class of Modules isn't one."""
    if not callable(function) or (isinstance(function, type) and issubclass(function, Module)):
        raise ArgumentError(
            f"{name}: {argument} can't be called with an array.",
            got=f"{argument}={describe(function)}",
            expected="a function of an array, or a Module",
            fix=f"{argument}=jax.nn.relu",
        )
    return function


def initial(
    name: str,
    what: str,
    initializer: Initializer | None,
    default: Initializer,
    key: Any,
    shape: tuple[int, ...],
    dtype: Any,
) -> jax.Array:
    """Draws the first value of a parameter, and makes sure that the initializer kept to the shape and dtype."""
    initializer = default if initializer is None else initializer
    if not callable(initializer):
        raise ArgumentError(
            f"{name}: {what}_init is not an initializer.",
            got=f"{what}_init={describe(initializer)}",
            expected="a function (key, shape, dtype) -> array",
            fix=f"{what}_init=nn.init.normal(0.02)",
        )
    value = initializer(key, shape, dtype)
    if getattr(value, "shape", None) != shape:
        raise ShapeError(
            f"{name}: {what}_init gave another shape than it was asked for.",
            got=describe(value),
            expected=f"{dtype}[{', '.join(map(str, shape))}]",
            fix=f"return an array of the shape that is the second argument of {what}_init",
        )
    return jnp.asarray(value, dtype)


def as_array(module: Module, x: ArrayLike) -> jax.Array:
    """Takes an input as a JAX array of numbers or bools; anything else is an error."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
        raise DtypeError(
            f"{name_of(module)}: the input is not an array of numbers.",
            got=describe(x),
            expected="a JAX or NumPy array",
            fix="jnp.asarray(x) for a list or a Python number",
        )
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def computing_dtype(module: Computing, x: jax.Array, *parameters: jax.Array | None) -> jnp.dtype:
    """Decides the dtype of the computation and of the output, by the rule at the head of this file."""
    kept = [p.dtype for p in parameters if p is not None]
    if module.compute_dtype is not None:
        dtype = inexact_dtype(name_of(module), "compute_dtype", module.compute_dtype)
    elif jnp.issubdtype(x.dtype, jnp.inexact):
        dtype = x.dtype
    else:
        dtype = kept[0] if kept else jnp.result_type(float)
    complex_ones = [d for d in (x.dtype, *kept) if jnp.issubdtype(d, jnp.complexfloating)]
    if not complex_ones or jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype
    if module.compute_dtype is not None:
        raise DtypeError(
            f"{name_of(module)}: a real compute_dtype would drop the imaginary part.",
            got=f"compute_dtype={dtype}, x {describe(x)}, parameters {', '.join(map(str, kept))}",
            expected="a complex compute_dtype",
            fix="compute_dtype=jnp.complex64",
        )
    return complex_ones[0]


def at_least_float32(dtype: jnp.dtype) -> jnp.dtype:
    """Gives the dtype for sums and statistics: float32 for the narrower ones, the dtype itself for the others."""
    # Not promote_types, which raises under jax_numpy_dtype_promotion="strict".
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def cast(module: Computing, x: jax.Array, *parameters: jax.Array | None) -> list[Any]:
    """Brings the input and the parameters to the dtype of the computation; an absent parameter stays None."""
    dtype = computing_dtype(module, x, *parameters)
    # An eager astype costs a dispatch even where it changes nothing.
    return [a if a is None or a.dtype == dtype else a.astype(dtype) for a in (x, *parameters)]


def real_only(module: Module, x: jax.Array) -> None:
    """Refuses complex numbers where the layer has no meaning for them."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise DtypeError(
            f"{name_of(module)}: complex numbers have no order and no variance here.",
            got=describe(x),
            expected="a real array",
            fix="pass x.real and x.imag as channels of their own",
        )
