# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: Tether beside hand-written JAX, in turn in one process."""
