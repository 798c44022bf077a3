# SPDX-License-Identifier: Apache-2.0
"""Makes data/twins.npz: what the twins of the zoo give in PyTorch, in float64.

usage: python -m tests.zoo.make_data          (it needs the ``parity`` extra)
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from tests.zoo import oracle


def of_twin(case: oracle.Case) -> oracle.Arrays:
    import torch

    from tests.zoo import twins

    twin = getattr(twins, case.twin)(**case.options).double()
    values = oracle.weights({name: tuple(x.shape) for name, x in twin.state_dict().items()})
    first: dict[int, str] = {}  # tied parameters have the values of the first name
    tied = {name: first.setdefault(x.data_ptr(), name) for name, x in twin.state_dict().items()}
    values = {name: values[tied[name]] for name in values}
    x = torch.tensor(case.inputs())
    found = {}
    for mode in ("evaluation", "training"):
        twin.load_state_dict({name: torch.tensor(value) for name, value in values.items()}, strict=True)
        twin.train(mode == "training").zero_grad()
        y = twin(x)
        (torch.tensor(oracle.cotangent(y)) * y).sum().backward()
        found[f"{mode} output"] = y.detach().numpy()
        parameters = twin.named_parameters(remove_duplicate=False)  # a tied one under each of its names
        found |= {f"{mode} gradient {name}": p.grad.numpy().copy() for name, p in parameters}
    found |= {
        f"training statistics {name}": x.numpy().copy()
        for name, x in twin.named_buffers()
        if not name.endswith("num_batches_tracked")
    }
    return found


def main() -> None:
    found = {}
    for name, case in oracle.CASES.items():
        found[name] = {what: oracle.sketch(array) for what, array in of_twin(case).items()}
        with jax.enable_x64(True):
            worst = max(oracle.differences(oracle.of_tether(case), found[name]).values())
        print(f"{name}: {len(found[name])} arrays differ by {worst:.1e} at most", flush=True)
    oracle.store(found)


if __name__ == "__main__":
    main()
