# SPDX-License-Identifier: Apache-2.0
"""Tools for finding out what a program does: NaNs in gradients, breakpoints, transformations, traces."""

from tether._transforms._debug import announce_transform as announce_transform
from tether._transforms._debug import backward_nan as backward_nan
from tether._transforms._debug import breakpoint_if as breakpoint_if
from tether._transforms._max_traces import assert_max_traces as assert_max_traces
from tether._transforms._max_traces import get_num_traces as get_num_traces
