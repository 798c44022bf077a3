# SPDX-License-Identifier: Apache-2.0
"""The one mechanism: Variables, Modules, Frames, discovery, selection. README.md defines the words."""

from tether._core.module import Module as Module
from tether._core.module import replace_values as replace_values
from tether._core.selection import cell as cell
from tether._core.selection import is_selection as is_selection
from tether._core.selection import matches as matches
from tether._core.selection import modules as modules
from tether._core.selection import variables as variables
from tether._core.selection import where as where
from tether._core.structure import Reference as Reference
from tether._core.structure import Static as Static
from tether._core.variable import Constant as Constant
from tether._core.variable import Param as Param
from tether._core.variable import Rng as Rng
from tether._core.variable import State as State
from tether._core.variable import Variable as Variable
from tether._core.views import freeze as freeze
from tether._core.views import view as view
