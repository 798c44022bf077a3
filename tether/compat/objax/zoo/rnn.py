# SPDX-License-Identifier: Apache-2.0
"""A recurrent network.

| Objax | here | what differs |
| --- | --- | --- |
| RNN | ``tether.scan`` over the steps | compiled once for any number of steps |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tether._transforms import scan
from tether.compat.objax._errors import MisuseError
from tether.compat.objax.module import Module
from tether.compat.objax.nn import Linear
from tether.compat.objax.nn.init import kaiming_normal
from tether.compat.objax.typing import JaxArray
from tether.compat.objax.variable import StateVar, TrainVar
from tether.errors import describe


class RNN(Module):
    """h = activation(x w_xh + h w_hh + b_h) at each step, then a linear layer.

    Args:
        nstate: Size of h.
        nin: Size of an input.
        nout: Size of an output.
        activation: The activation.
        w_init: Makes w_xh and w_hh, from their shapes.
    Variables:
        w_xh, w_hh, b_h: TrainVar, float[nin, nstate], float[nstate, nstate], float[nstate].
        output_layer: Linear.
        state: StateVar, float[batch, nstate], once ``init_state`` was called; written.
    Shapes:
        inputs: float[time, batch, nin] -> float[time * batch, nout], or float[batch, nout]
    Raises:
        MisuseError: ``init_state`` wasn't called, or was for another batch; inputs of another shape.
    Example:
        >>> from tether.compat.objax.zoo.rnn import RNN
        >>> rnn = RNN(nstate=4, nin=3, nout=2)
        >>> rnn.init_state(batch_size=5)
        >>> rnn(jnp.ones((7, 5, 3))).shape, rnn(jnp.ones((7, 5, 3)), only_return_final=True).shape
        ((35, 2), (5, 2))
    """

    def __init__(
        self,
        nstate: int,
        nin: int,
        nout: int,
        activation: Callable[..., Any] = jnp.tanh,
        w_init: Callable[..., Any] = kaiming_normal,
    ):
        self.num_inputs = nin
        self.num_outputs = nout
        self.nstate = nstate
        self.activation = activation
        self.w_xh = TrainVar(w_init((nin, nstate)))
        self.w_hh = TrainVar(w_init((nstate, nstate)))
        self.b_h = TrainVar(jnp.zeros(nstate))
        self.output_layer = Linear(nstate, nout)

    def init_state(self, batch_size: int) -> None:
        """Makes a new state of zeros, for a batch of this size."""
        self.state = StateVar(jnp.zeros((batch_size, self.nstate)))

    def __call__(self, inputs: Any, only_return_final: bool = False) -> JaxArray:
        """The outputs of all steps, one batch after another; or of the last. The state goes on from call to call."""
        inputs = jnp.asarray(inputs)
        self._check(inputs)

        def step(_: None, x: JaxArray) -> tuple[None, JaxArray]:
            mixed = jnp.dot(x, self.w_xh.value) + jnp.dot(self.state.value, self.w_hh.value)
            self.state.value = self.activation(mixed + jnp.broadcast_to(self.b_h.value, mixed.shape))
            return None, self.output_layer(self.state.value)

        _, outputs = scan(step, None, inputs)
        return outputs[-1] if only_return_final else outputs.reshape(-1, self.num_outputs)

    def _check(self, inputs: JaxArray) -> None:
        if not hasattr(self, "state"):
            raise MisuseError("RNN: it has no state yet.", fix="rnn.init_state(batch_size), before the first call")
        batch = self.state.shape[0]
        if inputs.ndim != 3 or inputs.shape[1:] != (batch, self.num_inputs) or not len(inputs):
            raise MisuseError(
                "RNN: the inputs don't fit the network and its state.",
                got=describe(inputs),
                expected=f"[time, {batch}, {self.num_inputs}], one step at least",
                fix="rnn.init_state(batch_size), for a batch of another size",
            )
