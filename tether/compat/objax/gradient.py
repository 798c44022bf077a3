# SPDX-License-Identifier: Apache-2.0
"""Derivatives with respect to inputs and variables.

| Objax | here | what differs |
| --- | --- | --- |
| Grad, GradValues | ``tether.value_and_grad(f, wrt=cells)`` | no tracer stays in a variable, listed or not |
| Jacobian | ``tether.jacfwd`` | |
| Hessian | ``tether.hessian`` | |
| variables=None | no variables, as before | without inputs too: the TrainVars that f uses |

Inputs are cells for the time of the call, so that one list holds all that is differentiated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, List, Tuple  # noqa: UP035  (what signatures show)

import jax
import jax.numpy as jnp

from tether._core.variable import Param
from tether._transforms import hessian, jacfwd, uses, value_and_grad
from tether.compat.objax._errors import MisuseError
from tether.compat.objax._names import class_name, repr_function
from tether.compat.objax._objects import Module, discovered
from tether.compat.objax.typing import JaxArray
from tether.compat.objax.variable import TrainVar, VarCollection, cell_of, each, owners, unwrapped

__all__ = ["Grad", "GradValues", "Hessian", "Jacobian"]


class _Derivative(Module):
    """What the derivatives have in common.

    Args:
        f: The function or module; the first of its results is differentiated.
        variables: With respect to which, the TrainVars among them. None for none, if there are input_argnums;
            else for all that f uses.
        input_argnums: Numbers of the inputs with respect to which.
    """

    _transform: Callable[..., Any]

    def __init__(self, f: Callable[..., Any], variables: Any, input_argnums: tuple[int, ...] | None = None):
        if not (isinstance(input_argnums, tuple) or input_argnums is None):
            raise MisuseError(
                f"Must pass a tuple of indices to input_argnums; received {input_argnums}.",
                got=repr(input_argnums),
                expected="a tuple of numbers of arguments, or None",
                fix=f"input_argnums=({input_argnums},)" if isinstance(input_argnums, int) else None,
            )
        self.f = f
        self.input_argnums = input_argnums or ()
        self._is_complete = variables is not None or bool(self.input_argnums)
        found = discovered(f).subset(TrainVar) if not self._is_complete else (variables or {})
        self.vc = VarCollection(found.items() if isinstance(found, dict) else found)

    def vars(self, scope: str = "") -> VarCollection:
        """The variables that it was given, or that it found."""
        return VarCollection((scope + name, variable) for name, variable in self.vc.items())

    def _derivative(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """The derivatives, and all that f returns."""
        if not self._is_complete:
            self._complete(args, kwargs)
        parts = [jax.tree.flatten(unwrapped(args[number])) for number in self.input_argnums]
        inputs = [[Param.make(jnp.asarray(leaf)) for leaf in leaves] for leaves, _ in parts]
        variables = [cell_of(variable) for variable in each(self.vc.subset(TrainVar))]
        new = list(args)

        def fun() -> tuple[Any, Any]:
            for number, cells, (_, treedef) in zip(self.input_argnums, inputs, parts, strict=True):
                new[number] = jax.tree.unflatten(treedef, [cell.value for cell in cells])
            out = self.f(*new, **kwargs)
            outputs = out if isinstance(out, list | tuple) else [out]
            return outputs[0], outputs

        if not any(inputs) and not variables:
            return [jax.tree.unflatten(treedef, []) for _, treedef in parts], fun()[1]
        trees = [jax.tree.unflatten(treedef, cells) for cells, (_, treedef) in zip(inputs, parts, strict=True)]
        return self._differentiated(fun, [*trees, *variables])

    def _differentiated(self, fun: Callable[[], Any], wrt: list[Any]) -> tuple[list[Any], Any]:
        raise NotImplementedError

    def _complete(self, args: Any, kwargs: Any) -> None:
        """Finds the TrainVars that f uses: those that can be seen from outside first, in the order of ``vars``."""
        used = uses(self.f)(*args, **kwargs)
        touched = {id(variable): variable for variable in owners([*used.reads.values(), *used.writes.values()])}
        kept = [(name, variable) for name, variable in self.vc.items() if id(variable) in touched]
        known = {id(variable) for _, variable in kept}
        others = [v for key, v in touched.items() if key not in known and isinstance(v, TrainVar)]
        self.vc = VarCollection([*kept, *((f"found[{place}]", v) for place, v in enumerate(others))])
        self._is_complete = True

    def __repr__(self) -> str:
        f = repr(self.f) if isinstance(self.f, Module) else repr_function(self.f)
        return f"{class_name(self)}(f={f}, input_argnums={self.input_argnums or None})"


class _Gradient(_Derivative):
    def _differentiated(self, fun: Callable[[], Any], wrt: list[Any]) -> tuple[list[Any], Any]:
        (_, outputs), gradients = value_and_grad(fun, has_aux=True, wrt=wrt)()
        return gradients, outputs

    def _signature(self, of: Callable[[Any], Any]) -> None:
        signature = inspect.signature(self.f)
        self.__wrapped__ = self.f
        self.__signature__ = signature.replace(return_annotation=of(signature.return_annotation))


class GradValues(_Gradient):
    """The gradients of a function, and its values.

    Args:
        f: The function or module; the first of its results, a scalar, is differentiated.
        variables: With respect to which, the TrainVars among them. None for none, if there are input_argnums;
            else for all that f uses in the first call.
        input_argnums: Numbers of the inputs with respect to which; those are given by position.
    Raises:
        GradientError: the first result is no scalar, or an input has no float in it.
        MisuseError: input_argnums is no tuple.
    Example:
        >>> v = objax.TrainVar(jnp.array([1.0, 2.0]))
        >>> gradients, values = objax.GradValues(lambda x: (v.value * x).sum(), objax.VarCollection(v=v))(3.0)
        >>> gradients[0].tolist(), float(values[0])
        ([3.0, 3.0], 9.0)
    """

    def __init__(self, f: Callable[..., Any], variables: Any, input_argnums: tuple[int, ...] | None = None):
        super().__init__(f, variables, input_argnums)
        self._signature(lambda annotation: Tuple[List[JaxArray], annotation])  # noqa: UP006

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """``(gradients, values)``: of the inputs, then of the variables; the values always as a list or tuple."""
        return self._derivative(args, kwargs)


class Grad(_Gradient):
    """The gradients of a function.

    Example:
        >>> objax.Grad(lambda x: (x**2).sum(), None, (0,))(jnp.array([1.0, 2.0]))[0].tolist()
        [2.0, 4.0]
    """

    def __init__(self, f: Callable[..., Any], variables: Any, input_argnums: tuple[int, ...] | None = None):
        super().__init__(f, variables, input_argnums)
        self._signature(lambda _: List[JaxArray])  # noqa: UP006

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The gradients of the inputs, then of the variables."""
        return self._derivative(args, kwargs)[0]


class Jacobian(_Derivative):
    """The Jacobians of a function, in forward mode."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The Jacobians with respect to the inputs, then the variables."""
        return self._derivative(args, kwargs)[0]

    def _differentiated(self, fun: Callable[[], Any], wrt: list[Any]) -> tuple[list[Any], Any]:
        return jacfwd(fun, has_aux=True, wrt=wrt)()


class Hessian(_Derivative):
    """The second derivatives of a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[list[Any]]:
        """A list of lists: inputs, then variables, both ways."""
        return self._derivative(args, kwargs)[0]

    def _differentiated(self, fun: Callable[[], Any], wrt: list[Any]) -> tuple[list[Any], Any]:
        return hessian(fun, has_aux=True, wrt=wrt)()
