# SPDX-License-Identifier: Apache-2.0
"""The optax adaptor: one optimizer that works on the trainable Variables of one model, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tether._core import Param, Reference, State, Variable
from tether._core import frame as _frame
from tether._core.variable import coerced
from tether._modules import Module, matches
from tether._modules.module import structure_of, variables_of
from tether.errors import OptimizerError, describe


class Optimizer(Module):
    """Changes the trainable Variables of a model by an optax transformation.

    optax sees a flat dict ``{path: array}`` of the trainables, so its masks, labels and injected hyperparameters
    work as they are. The model is not a part of the optimizer: it is referred to, and stays where it is.

    Args:
        model: The model.
        tx: An optax gradient transformation.
        wrt: A selection: which Variables are trained.
    Variables:
        state: State, the state of ``tx``; written by ``update``.
    Raises:
        OptimizerError: the selection names no float Variable.
    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = tether.Optimizer(model, optax.sgd(0.1))
        >>> grads = tether.grad(lambda model: (model(jnp.ones(2)) ** 2).sum())(model)
        >>> optimizer.update(grads)
    """

    def __init__(self, model: Module, tx: optax.GradientTransformation, wrt: Any = Param):
        if not isinstance(model, Module):
            raise OptimizerError(
                "Optimizer: the model is no Module.",
                got=describe(model),
                expected="a Module",
                fix="tether.Optimizer(model, tx): the model first",
            )
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise OptimizerError(
                "Optimizer: tx is no optax transformation.",
                got=describe(tx),
                expected="optax.adam(1e-3), ...",
                fix="tether.Optimizer(model, tx): the model first",
            )
        trained = [v for v in matches(wrt, model) if jnp.issubdtype(_frame.peek(v).dtype, jnp.inexact)]
        if not trained:
            raise OptimizerError(
                "Optimizer: there is nothing to train.",
                at=type(model).__name__,
                got=f"wrt={describe(wrt)}",
                expected="a selection of float Variables",
                fix="a frozen Param is no Param: select it by its path",
            )
        names = dict(zip(variables_of(model), structure_of(model).paths, strict=True))
        self.tx = optax.with_extra_args_support(tx)
        self.paths = tuple(names[variable] for variable in trained)
        self.model = Reference(model)
        self.state: Any = State(self.tx.init(dict(zip(self.paths, _frame.gather(trained), strict=True))))

    def update(self, grads: Any, **extra: Any) -> None:
        """Takes one step: the trainable Variables and the optimizer's state change in place.

        Args:
            grads: Gradients in the model's shape (of ``tether.grad``), or ``{path: array}``. None leaves a Variable
                as it is, without decay, and its slots of the state too.
            **extra: What ``tx`` wants besides: ``value=``, ``grad=``, ``value_fn=`` of a line search, ...
        Raises:
            OptimizerError: gradients that don't fit, or an optimizer that was copied without its model.
        """
        variables = self._variables()
        given = self._by_path(grads)
        params = {path: variable.value for path, variable in variables.items()}
        kept = [path for path in self.paths if given.get(path) is None]
        if len(kept) == len(self.paths):
            raise OptimizerError(
                "Optimizer.update: every gradient is None.",
                got=describe(grads),
                expected="a gradient for some trained Variable",
                fix="differentiate the model that the optimizer trains: tether.grad(loss)(model)",
            )
        full = {path: jnp.zeros_like(p) if given.get(path) is None else given[path] for path, p in params.items()}
        extra = {name: self._by_path(value) if isinstance(value, Module) else value for name, value in extra.items()}
        old = self.state
        updates, new = self.tx.update(full, old, params, **extra)
        _check_state(old, new)
        applied: Any = optax.apply_updates(params, updates)
        self._write(
            [variables[path] for path in given],
            [applied[path] for path in given],
            _with_old_slots(old, new, set(kept)) if kept else new,
        )

    def _write(self, trained: list[Variable], values: list[Any], state: Any) -> None:
        """Writes Variables and state at once: a signal between them would leave half a step."""
        written = [*trained, *variables_of(self)]
        given = [*values, *jax.tree.leaves(state)]
        new = [coerced(variable, value) for variable, value in zip(written, given, strict=True)]
        _frame.write_back(written, new)

    def _variables(self) -> dict[str, Variable]:
        model: Any = self.model
        if model is None:
            raise OptimizerError(
                "Optimizer: this is a copy, and its model isn't here to be changed.",
                got="an optimizer copied by itself (a tree map, clone, or a plain JAX transformation)",
                expected="an optimizer with its model",
                fix=[
                    "tether.clone((model, optimizer)) copies both and keeps them together",
                    "tether.Optimizer(model, tx)",
                ],
            )
        places, all_variables = structure_of(model).places, variables_of(model)
        return {path: all_variables[places[path]] for path in self.paths}

    def _by_path(self, grads: Any) -> dict[str, Any]:
        """Gradients by path, checked against the optimizer's slots."""
        if isinstance(grads, Module):
            found = dict(zip(structure_of(grads).paths, _frame.gather(variables_of(grads)), strict=True))
        elif isinstance(grads, Mapping):
            found = dict(grads)
        else:
            raise OptimizerError(
                "Optimizer.update: these are no gradients of the model.",
                got=describe(grads),
                expected="gradients in the model's shape, or {path: array}",
                fix="tether.grad(loss)(model) gives them",
            )
        found = {path: value for path, value in found.items() if value is not None}
        for path, value in found.items():
            self._check(path, value)
        return found

    def _check(self, path: str, value: Any) -> None:
        if path not in self.paths:
            raise OptimizerError(
                "Optimizer.update: there is a gradient without a slot.",
                at=path,
                got=describe(value),
                expected=f"gradients of {', '.join(self.paths[:3])}" + (", ..." if len(self.paths) > 3 else ""),
                fix=[
                    "tether.Optimizer(model, tx, wrt=...) of all that is differentiated",
                    "tether.grad(f, wrt=...) of less",
                ],
            )
        param = self._variables()[path]
        if jnp.shape(value) != param.value.shape:
            raise OptimizerError(
                "Optimizer.update: a gradient has another shape than its Variable.",
                at=f"{path}  ({type(param).__name__})",
                got=describe(value),
                expected=describe(param.value),
                fix="tether.grad(loss)(model) gives gradients of the model's shapes",
            )


def _check_state(old: Any, new: Any) -> None:
    before, after = jax.tree.structure(old), jax.tree.structure(new)
    if before != after:
        raise OptimizerError(
            "Optimizer.update: tx changes the structure of its state.",
            got=str(after),
            expected=str(before),
            fix="a transformation whose update returns a state like that of its init",
        )


def _with_old_slots(old: Any, new: Any, paths: set[str]) -> Any:
    """The new state of a transformation, with the old entries of Variables that took no step."""

    def chosen(keys: Any, before: Any, after: Any) -> Any:
        own = {key.key for key in keys if isinstance(key, jax.tree_util.DictKey)}
        return before if own & paths else after

    return jax.tree_util.tree_map_with_path(chosen, old, new)
