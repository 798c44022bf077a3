# SPDX-License-Identifier: Apache-2.0
"""Compilation of functions of anything.

| Equinox | here | what differs |
| --- | --- | --- |
| filter_jit | ``jax.jit`` of the arrays, with the rest static | state is threaded through a ``jax.Ref`` |

By ``jax.jit`` and not ``tether.jit``, because code written for Equinox has plain ``jax.vmap`` and ``jax.lax.scan``
inside: there ``jax.jit`` can order the writes of a ``StateIndex``, and a Tether model that is closed over works, too.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax

from tether._core import trace as _trace
from tether.compat.equinox._errors import SpecError
from tether.compat.equinox._signature import Specs
from tether.compat.equinox._static import by_tree, joined, names_of, split
from tether.compat.equinox.experimental.stateful import in_use
from tether.compat.equinox.module import Static, Wrapper, static_field, update_wrapper
from tether.tree import combine, is_array, partition

__all__ = ["filter_jit"]

_MISSING: Any = object()
_OLD = {"filter_spec": is_array, "filter_spec_return": is_array, "filter_spec_fun": is_array}


@by_tree
def _compiled(names: tuple[str, str], **jitkwargs: Any) -> Any:
    def fun_of_arrays(dynamic: Any, static: Any) -> Any:
        static_fun, static_args, out_spec = static
        fun, (args, kwargs) = joined(dynamic[0], static_fun), joined(dynamic[1], static_args)
        traced, rest = partition(fun(*args, **kwargs), out_spec)
        return traced, Static(rest)

    fun_of_arrays.__name__, fun_of_arrays.__qualname__ = names
    return jax.jit(fun_of_arrays, static_argnums=1, **jitkwargs)


class _Jit(Wrapper):
    _dynamic_fun: list[Any]
    _static_fun: Any = static_field()
    _specs: Any  # Specs, or by the old names one specification of (args, kwargs)
    _out: Any
    _program: Any

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        traced, rest = self._program(*self._operands(args, kwargs))
        return combine(traced, rest.value)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """What ``jax.jit`` lowers for these arguments."""
        return self._program.lower(*self._operands(args, kwargs))

    def _operands(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        spec = self._specs
        if isinstance(spec, Specs):
            args, kwargs, spec = spec.bind(args, kwargs)
            if all(part is is_array for part in (*spec[0], *spec[1].values())):
                spec = is_array
        dynamic, static = split((args, kwargs), spec)
        both = (self._dynamic_fun, dynamic)
        return tuple(map(_committed, both)) if in_use else both, (self._static_fun, static, self._out)


def _committed(leaves: list[Any]) -> list[Any]:
    """Arrays bound to their devices, as a program that holds a Ref returns them: else the second call compiles anew."""
    is_loose = lambda leaf: isinstance(leaf, jax.Array) and _trace.owner(leaf) is None and not leaf.committed
    return [jax.device_put(leaf, leaf.sharding) if is_loose(leaf) else leaf for leaf in leaves]


def filter_jit(
    fun: Any = _MISSING,
    *,
    default: Any = is_array,
    fn: Any = is_array,
    args: Any = (),
    kwargs: Any = None,
    out: Any = is_array,
    **jitkwargs: Any,
) -> Any:
    """Compiles a function of any arguments: arrays are traced, all else is static.

    A specification is a bool, a function of one leaf, or a tree of those that is a prefix: true for what is traced.

    Args:
        fun: The function, a module, or a bound method; without it, a decorator.
        default: Specification of an argument that has none of its own.
        fn: Specification of ``fun`` itself.
        args: Specifications of the first arguments.
        kwargs: Specifications by the name of the argument.
        out: Specification of the result; what isn't traced is returned as it was while tracing.
        jitkwargs: Of ``jax.jit``.
    Raises:
        ValueError: Specifications don't fit the function, or are mixed with the old ``filter_spec``.
        TypeError: What is to be traced is no array.
    Example:
        >>> double = eqx.filter_jit(lambda x, name: (2 * x, name))
        >>> out, name = double(jnp.ones(2), "a")
        >>> out.tolist(), name
        ([2.0, 2.0], 'a')
    """
    if fun is _MISSING:
        return functools.partial(filter_jit, default=default, fn=fn, args=args, kwargs=kwargs, out=out, **jitkwargs)
    old = {name: jitkwargs.pop(name, given) for name, given in _OLD.items()}
    if any(spec is not is_array for spec in old.values()):
        _check_old(default, fn, args, kwargs, out)
        specs, fn, out = _as_pair(old["filter_spec"]), old["filter_spec_fun"], old["filter_spec_return"]
    else:
        specs = Specs.of("filter_jit", fun, default, args, kwargs)
    dynamic, static = split(fun, fn)
    return update_wrapper(_Jit(dynamic, static, specs, out, _compiled(names_of(fun), **jitkwargs)), fun)


def _check_old(default: Any, fn: Any, args: Any, kwargs: Any, out: Any) -> None:
    if any(spec is not is_array for spec in (default, fn, out)) or len(args) or kwargs:
        raise SpecError(
            "filter_jit: filter_spec= is given together with the arguments that replaced it.",
            expected="default=, fn=, args=, kwargs= and out= alone",
            fix="filter_jit(f, args=(...,), kwargs={...})",
        )
    warnings.warn("filter_jit: filter_spec= is deprecated; use args= and kwargs=", DeprecationWarning, stacklevel=3)


def _as_pair(spec: Any) -> Any:
    """``([spec, ...], {...})``, as one could write it, as a tree of ``(args, kwargs)``."""
    is_pair = isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], list)
    return (tuple(spec[0]), spec[1]) if is_pair else spec
