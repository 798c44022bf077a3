# SPDX-License-Identifier: Apache-2.0
"""What plain JAX transformations do with a model that their function closes over: the one table of verdicts.

``test_plain_table.py`` proves every cell, on each supported version, and that docs/plain_jax.md says the same:
``python tests/transforms/plain_table.py`` writes that page anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PAGE = Path(__file__).parents[2] / "docs" / "plain_jax.md"


def _scan(f: Any) -> Any:
    return lambda x: jax.lax.scan(lambda c, row: (c + f(row), None), 0.0, x)[0]


def _while(f: Any) -> Any:
    return lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(x)), (0, 0.0))[1]


def _while_condition(f: Any) -> Any:
    return lambda x: jax.lax.while_loop(lambda c: (f(x) > -1) & (c < 3), lambda c: c + 1, 0.0)


def _switch(f: Any) -> Any:
    return lambda x: jax.lax.switch(1, [lambda x: 0.0, f, lambda x: 1.0], x)


def _custom_vjp(f: Any) -> Any:
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, ct: (2 * ct * x,))
    return jax.jit(g)


def _custom_jvp(f: Any) -> Any:
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), (2 * tangents[0] * primals[0]).sum()))
    return jax.jit(g)


def _twice(f: Any) -> Any:
    return jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum())


def _closure_convert(f: Any) -> Any:
    def converted(x: Any) -> Any:
        g, captured = jax.closure_convert(f, x)
        return g(x, *captured)

    return converted


WORKS, SLOWER, ERROR = "works", "works slower", "error"
PLACES = ("by itself", "in tether.jit", "in tether.grad, eager")


class Row(NamedTuple):
    """One transformation.

    Attributes:
        make: Transforms a function of an array that gives a scalar.
        reads: Verdict where the function reads a Variable, in each of ``PLACES``.
        writes: Verdict where it writes one.
        results: The sums of the results of three calls by itself, for ``s = s + 1; return (s * x**2).sum()`` of
            x = 1, 2, 3, worked out by hand; ``count`` is s after them.
    """

    make: Callable[[Any], Any]
    reads: tuple[str, str, str]
    writes: tuple[str, str, str]
    results: tuple[float, ...] = ()
    count: int = 0


_READS = (WORKS, WORKS, SLOWER)
_WRITES = (WORKS, ERROR, ERROR)
_NEVER = (ERROR, ERROR, ERROR)
_RULES = (ERROR, WORKS, ERROR)

TABLE: dict[str, Row] = {
    "jit": Row(jax.jit, _READS, _WRITES, (14, 28, 42), 3),
    "scan": Row(_scan, _READS, _WRITES, (36, 78, 120), 9),
    "map": Row(lambda f: lambda x: jax.lax.map(f, x), _READS, _WRITES, (36, 78, 120), 9),
    "fori_loop": Row(
        lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda i, c: c + f(x), 0.0), _READS, _WRITES, (42, 98, 154), 6
    ),
    "while_loop, in the body": Row(_while, _READS, _WRITES, (42, 98, 154), 6),
    "while_loop, in the condition": Row(_while_condition, _READS, _NEVER),
    "cond, taken": Row(
        lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: 0.0, x), _READS, _WRITES, (14, 28, 42), 3
    ),
    "cond, not taken": Row(
        lambda f: lambda x: jax.lax.cond(x.sum() < 0, f, lambda x: 0.0, x), _READS, _WRITES, (0, 0, 0), 0
    ),
    "switch": Row(_switch, _READS, _WRITES, (14, 28, 42), 3),
    "checkpoint": Row(jax.checkpoint, (ERROR, WORKS, SLOWER), _NEVER),
    "jit of grad": Row(lambda f: jax.jit(jax.grad(f)), _READS, _WRITES, (12, 24, 36), 3),
    "grad of jit": Row(lambda f: jax.grad(jax.jit(f)), _READS, _WRITES, (12, 24, 36), 3),
    "jvp of jit": Row(lambda f: lambda x: jax.jvp(jax.jit(f), (x,), (x,)), _READS, _WRITES, (42, 84, 126), 3),
    "grad of scan": Row(lambda f: jax.grad(_scan(f)), _READS, _WRITES, (28, 64, 100), 9),
    "grad of grad of scan": Row(lambda f: _twice(_scan(f)), _READS, _WRITES, (288, 1392, 3360), 9),
    "hessian of jit": Row(lambda f: jax.hessian(jax.jit(f)), _READS, _NEVER),
    "vmap of jit": Row(lambda f: jax.vmap(jax.jit(f)), _READS, _NEVER),
    "jit of vmap": Row(lambda f: jax.jit(jax.vmap(f)), _READS, _WRITES, (14, 28, 42), 3),
    "vmap of cond": Row(
        lambda f: jax.vmap(lambda x: jax.lax.cond(x > 1.5, f, lambda x: 0.0, x)), (ERROR, WORKS, SLOWER), _NEVER
    ),
    "jit of custom_vjp": Row(_custom_vjp, _RULES, _NEVER),
    "jit of custom_jvp": Row(_custom_jvp, _RULES, _NEVER),
    "closure_convert": Row(_closure_convert, _READS, _WRITES, (14, 28, 42), 3),
    "eval_shape": Row(lambda f: lambda x: jnp.zeros(jax.eval_shape(f, x).shape), _READS, _WRITES, (0, 0, 0), 0),
    "make_jaxpr": Row(lambda f: lambda x: jnp.ones(len(jax.make_jaxpr(f)(x).out_avals)), _READS, _WRITES, (1, 1, 1), 0),
}

_BEFORE = """# Plain JAX transformations

A model that the function of `tether.jit`, `tether.grad`, ... closes over is seen by the transformation. JAX's own
(`jax.jit`, `jax.lax.scan`, ..., also where a solver or an optimizer of another library calls them) know nothing of
Variables. What they do with a model that their function closes over:

- *works*: right, on every call, also in a function that JAX has in its caches. By itself, outside all Tether
  transformations, the Variables that it uses move into a `jax.Ref`, for good; each access from outside then takes
  some tens of microseconds more. A Ref stays on its device: `tether.jit` and `tether.shard_map` on a mesh copy the
  value there and back on each call. Within `jax.set_mesh`, JAX lets nobody read it.
- *works slower*: right, and what reads the Variable is traced and compiled again on every call.
- *error*: a `PlainTransformError` that names the Variable and the transformation to use; nothing is changed.

The first three columns are for a function that reads a Variable from outside, the last three for one that writes it.
`eval_shape` and `make_jaxpr` compute nothing, and write nothing.

"""

_AFTER = """
What JAX does not tell Tether, and so no error can: a function that `jax.jit` has cached with a write in it and that
is called *later* inside `jax.checkpoint` writes twice, and in the condition of a `while_loop` it loses the last write;
use `tether.checkpoint`, `tether.while_loop`. `vmap` of such a function is an error of JAX's own, and so is the gradient
of a value with a tangent that such a function writes. A write after a read that `jax.jit` has cached, inside
`jax.checkpoint`, makes the gradient wrong. A function that `jax.jit` has cached also keeps what was in force when it
was traced: the mode of a `training=` around it, and the stream of a `key=` or `tether.random.scope`. And as with
everything that a function under `jax.jit` finds in its globals, JAX doesn't notice when the name is bound to another
model.

A module that is passed *as an argument* to a plain transformation is a value, like any other pytree: what is written
to it is in what the function returns, or lost, which `LostUpdateWarning` says.
"""


def page() -> str:
    """The page of the docs."""
    head = ["", *(f"read {place}" for place in PLACES), *(f"write {place}" for place in PLACES)]
    rows = [head, ["---"] * len(head), *([f"`{name}`", *row.reads, *row.writes] for name, row in TABLE.items())]
    return _BEFORE + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n" + _AFTER


if __name__ == "__main__":
    PAGE.write_text(page())
