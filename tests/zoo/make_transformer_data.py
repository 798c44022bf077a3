# SPDX-License-Identifier: Apache-2.0
"""Makes data/transformers.npz: what the twins of the transformers give in PyTorch, in float64.

usage: python -m tests.zoo.make_transformer_data          (it needs the ``parity`` extra)
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from tests.zoo import oracle, transformers


def of_twin(case: transformers.Case) -> oracle.Arrays:
    import torch

    from tests.zoo import transformer_twins

    twin = getattr(transformer_twins, case.twin)(**case.options).double()
    values = transformers.weights({name: tuple(p.shape) for name, p in twin.named_parameters()})
    buffers = {name for name, _ in twin.named_buffers()}
    missing, unexpected = twin.load_state_dict({k: torch.tensor(v) for k, v in values.items()}, strict=False)
    if set(missing) != buffers or unexpected:
        raise ValueError(f"missing {missing}, unexpected {unexpected}")
    x = torch.tensor(case.inputs)
    found = {"evaluation output": twin.eval()(x).detach().numpy()}
    y = twin.train()(x)
    (torch.tensor(oracle.cotangent(y)) * y).sum().backward()
    found["training output"] = y.detach().numpy()
    found |= {f"gradient {name}": p.grad.numpy().copy() for name, p in twin.named_parameters()}
    if hasattr(twin, "generate"):
        found["tokens"] = twin.generate(x, transformers.NEW_TOKENS).double().numpy()
    return found


def main() -> None:
    found = {}
    for name, case in transformers.CASES.items():
        found[name] = {what: oracle.sketch(array) for what, array in of_twin(case).items()}
        with jax.enable_x64(True):
            worst = max(oracle.differences(transformers.of_tether(case), found[name]).values())
        print(f"{name}: {len(found[name])} arrays differ by {worst:.1e} at most", flush=True)
    transformers.store(found)


if __name__ == "__main__":
    main()
