# SPDX-License-Identifier: Apache-2.0
"""Names of classes and functions, as representations show them.

| Objax | here | what differs |
| --- | --- | --- |
| class_name | names of Objax's modules for ours | nothing: ``objax.nn.Linear`` |
| repr_function, re_sign | ``inspect.signature`` | nothing |
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

_PACKAGE = __name__.removesuffix("._names")
_FLAT = ("nn", "optimizer", "random")
_TOP = ("_jit", "_objects", "_parallel", "_vectorize", "gradient", "variable")


def class_name(x: Any) -> str:
    """The name of the class of an object, with the module where Objax has it."""
    cls = type(x)
    module = cls.__module__
    if module.startswith(_PACKAGE + "."):
        inner = module.removeprefix(_PACKAGE + ".")
        folder = inner.partition(".")[0]
        module = "objax" if inner in _TOP else f"objax.{folder if folder in _FLAT else inner}"
    return f"{module}.{cls.__name__}"


def repr_function(f: Any) -> str:
    """The name of a function, with the defaults of its arguments."""
    parameters = inspect.signature(f).parameters.items()
    args = ", ".join(f"{name}={p.default}" for name, p in parameters if p.default is not inspect.Parameter.empty)
    while not hasattr(f, "__name__") and hasattr(f, "func"):
        f = f.func  # a functools.partial
    if not hasattr(f, "__name__"):
        return type(f).__name__
    return f"{f.__name__}(*, {args})" if args else f.__name__


def known_as(f: Callable[..., Any], call: Any) -> Any:
    """A partial with the name and the signature of what it calls in the end: numbers of arguments mean those of f."""
    call.__name__ = getattr(f, "__name__", type(f).__name__)
    with contextlib.suppress(TypeError, ValueError):  # some builtins have no signature
        call.__signature__ = inspect.signature(f)
    return call


def re_sign(f: Callable[..., Any]) -> Callable[[Any], Any]:
    """A decorator that gives a function the signature of another."""

    def decorator(op: Any) -> Any:
        op.__signature__ = inspect.signature(f)
        return op

    return decorator
