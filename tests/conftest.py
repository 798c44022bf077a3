# SPDX-License-Identifier: Apache-2.0
"""The strict settings under which every test runs, and the fixtures they share.

Four CPU devices, which also shows that importing Tether makes no device; broadcasting between
ranks raises; warnings are errors (pyproject.toml). Mixed dtypes raise, but not in a test module
that imports optax, whose adam and schedules mix int32 counts with floats (optax 0.2.8); other
tests opt out with ``@pytest.mark.mixed_dtypes``.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

import tether
from tether._core import ref
from tether._core.frame import set_value
from tether.random._streams import default_stream

# In the environment too, for the programs that tests start.
jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))

# What XLA compiled is kept on disk, and not compiled again where a test empties JAX's caches or starts a program. Each
# worker has a folder of its own: JAX doesn't write these files whole.
COMPILED = Path(__file__).parents[1] / ".pytest_cache" / "jax" / os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED)  # not setdefault: workers inherit that of who starts them
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
for name in ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"):
    jax.config.update(name, int(os.environ.setdefault(name.upper(), "0")))
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every run and every machine; no deadline, because the first example pays for compilation.
hypothesis.settings.register_profile("tether", deadline=None, derandomize=True, max_examples=30, print_blob=True)
hypothesis.settings.load_profile("tether")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the small test of every layer first: what it finds, the others only repeat."""
    items.sort(key=lambda item: item.path.name != "test_tiny.py")


@pytest.fixture(autouse=True)
def _dtype_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    mixed = hasattr(request.module, "optax") or request.node.get_closest_marker("mixed_dtypes") is not None
    with jax.numpy_dtype_promotion("standard" if mixed else "strict"):
        yield


@pytest.fixture(autouse=True)
def _default_stream() -> None:
    if ref.holds(default_stream):  # a test before drew in plain JAX; under jax.set_mesh no Ref can be read
        ref.moved.pop(weakref.ref(default_stream))
        set_value(default_stream, None)
    tether.seed(0)


_starts: dict[str, dict] = {}  # module -> the state of its RNG after the import


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest) -> None:
    """What a test draws from the RNG of its module doesn't depend on which tests this worker ran before."""
    generator = getattr(request.module, "RNG", None)
    if generator is not None:
        state = _starts.setdefault(request.module.__name__, generator.bit_generator.state)
        generator.bit_generator.state = state


@pytest.fixture
def key(request: pytest.FixtureRequest) -> jax.Array:
    """A key of this test alone, the same on every run."""
    return jax.random.key(zlib.crc32(request.node.nodeid.encode()))
