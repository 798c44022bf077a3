# SPDX-License-Identifier: Apache-2.0
"""The one mechanism: Variables, Frames, structures, streams, the lift. README.md defines the words."""

from tether._core.structure import Reference as Reference
from tether._core.structure import Static as Static
from tether._core.variable import Constant as Constant
from tether._core.variable import Param as Param
from tether._core.variable import Rng as Rng
from tether._core.variable import State as State
from tether._core.variable import Variable as Variable
