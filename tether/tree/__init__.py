# SPDX-License-Identifier: Apache-2.0
"""Functions of whole trees: take apart, put together, replace, copy, compare, report.

Those under Equinox's names work on any pytree, by value, and see a module as one node whose children are the
values of its cells. The others work on modules; which share Variables and which copy says each docstring. Only
``update``, ``place`` and ``set_index`` write.
"""

from tether.tree._at import tree_at as tree_at
from tether.tree._bind import Report as Report
from tether.tree._bind import bind as bind
from tether.tree._bind import update as update
from tether.tree._copy import clone as clone
from tether.tree._copy import snapshot as snapshot
from tether.tree._diff import Change as Change
from tether.tree._diff import Diff as Diff
from tether.tree._diff import diff as diff
from tether.tree._equal import tree_equal as tree_equal
from tether.tree._filter import combine as combine
from tether.tree._filter import filter as filter
from tether.tree._filter import partition as partition
from tether.tree._lerp import lerp as lerp
from tether.tree._place import place as place
from tether.tree._predicates import is_array as is_array
from tether.tree._predicates import is_array_like as is_array_like
from tether.tree._predicates import is_inexact_array as is_inexact_array
from tether.tree._predicates import is_inexact_array_like as is_inexact_array_like
from tether.tree._replace import map_modules as map_modules
from tether.tree._replace import replace as replace
from tether.tree._stack import index as index
from tether.tree._stack import set_index as set_index
from tether.tree._stack import stack as stack
from tether.tree._stack import unstack as unstack
from tether.tree._summary import Row as Row
from tether.tree._summary import Summary as Summary
from tether.tree._summary import summary as summary

__all__ = [
    "Change",
    "Diff",
    "Report",
    "Row",
    "Summary",
    "bind",
    "clone",
    "combine",
    "diff",
    "filter",
    "index",
    "is_array",
    "is_array_like",
    "is_inexact_array",
    "is_inexact_array_like",
    "lerp",
    "map_modules",
    "partition",
    "place",
    "replace",
    "set_index",
    "snapshot",
    "stack",
    "summary",
    "tree_at",
    "tree_equal",
    "unstack",
    "update",
]
