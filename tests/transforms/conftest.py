# SPDX-License-Identifier: Apache-2.0
"""What the tests of the transformations share."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from tests.transforms.jit_models import COMPILED


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of what XLA compiled since the test began."""
    found: list[str] = []

    def listen(event: str, _: float, **details) -> None:
        if event == COMPILED:
            found.append(str(details.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)
