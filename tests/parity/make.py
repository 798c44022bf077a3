# SPDX-License-Identifier: Apache-2.0
"""Asks the other libraries again: compares with what is stored, and writes the data and the table in the docs.

usage: python -m tests.parity.make [family ...] [--check]

It needs the ``parity`` extra. --check writes nothing: the exit code says whether Tether, the libraries and what is
stored agree.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.parity import harness

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
HEAD = """# Layers beside other libraries

Each layer of `tether.nn` is compared with the same layer of PyTorch, Flax NNX, Equinox and Haiku, where they have it:
outputs, gradients of the inputs and of every parameter, and the state after each of several steps, over a grid of
settings, in float64. The table has the number of settings and the largest difference, relative to the largest value in
that array (or to 1), rounded up to a power of ten. `make parity` asks the libraries again; `make test` compares with
what they gave when this page was made.

"""


def power(difference: float) -> str:
    """The next power of ten, 1e-16 at least."""
    exponent = -16
    while 10.0**exponent < difference:
        exponent += 1
    return f"1e{exponent}"


def table(worst: dict[tuple[str, str], list[float]]) -> str:
    lines = ["| layer | " + " | ".join(harness.LIBRARIES) + " |", "| --- |" + " --- |" * len(harness.LIBRARIES)]
    for layer in sorted({layer for layer, _ in worst}, key=str.lower):
        found = [worst.get((layer, library)) for library in harness.LIBRARIES]
        lines.append(f"| {layer} | " + " | ".join(f"{len(f)}: {power(max(f))}" if f else "" for f in found) + " |")
    return "\n".join(lines) + "\n"


def differences(family: str) -> dict[tuple[str, str], list[float]]:
    """(layer, library) -> the difference in each setting, of Tether now and what is stored."""
    worst: dict[tuple[str, str], list[float]] = {}
    for (name, library), right in harness.stored(family).items():
        case = harness.cases(family)[name]
        worst.setdefault((case.layer, library), []).append(harness.difference(harness.of_tether(case), right))
    return worst


def ask(family: str, check: bool) -> bool:
    """Asks the libraries about a family; whether all agree."""
    found, agree = {}, True
    for name, case in harness.cases(family).items():
        ours = harness.of_tether(case)
        for library in case.peers:
            right = found[name, library] = harness.of_peer(case, library)
            gap = harness.difference(ours, right)
            if gap > case.bound:
                agree = False
                print(f"{name}, {library}: differs by {gap:.1e}, bound {case.bound:.0e}")
            before = harness.stored(family).get((name, library), {}) if check else right
            if set(before) != set(right) or harness.difference(before, right) > 1e-12:
                agree = False
                print(f"{name}, {library}: something else than is stored")
    if not check:
        harness.store(family, found)
        harness.stored.cache_clear()
    print(f"{family}: {len(found)} comparisons {'agree' if agree else 'DIFFER'}", flush=True)
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[], metavar="family")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    agreed = [ask(family, options.check) for family in options.families or harness.FAMILIES]
    if not options.check and not options.families:
        worst: dict[tuple[str, str], list[float]] = {}
        for family in harness.FAMILIES:
            worst |= differences(family)
        PAGE.write_text(HEAD + table(worst))
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
