# SPDX-License-Identifier: Apache-2.0
"""Modules: objects built of Variables, their views, and the grammar that selects among them."""

from tether._modules.module import Module as Module
from tether._modules.module import replace_values as replace_values
from tether._modules.selection import cell as cell
from tether._modules.selection import is_selection as is_selection
from tether._modules.selection import matches as matches
from tether._modules.selection import modules as modules
from tether._modules.selection import variables as variables
from tether._modules.selection import where as where
from tether._modules.views import freeze as freeze
from tether._modules.views import view as view
