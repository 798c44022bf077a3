# SPDX-License-Identifier: Apache-2.0
"""Functions of whole trees: take apart, put together, replace, copy, compare, report.

Those under Equinox's names work on any pytree, by value, and see a module as one node whose children are the
values of its cells. The others work on modules; which share Variables and which copy says each docstring. Only
``update``, ``place`` and ``set_index`` write.
"""

from tether.tree._apply_updates import apply_updates as apply_updates
from tether.tree._at import tree_at as tree_at
from tether.tree._bind import Report as Report
from tether.tree._bind import bind as bind
from tether.tree._bind import update as update
from tether.tree._check import tree_check as tree_check
from tether.tree._check import tree_flatten_one_level as tree_flatten_one_level
from tether.tree._copy import clone as clone
from tether.tree._copy import snapshot as snapshot
from tether.tree._diff import Change as Change
from tether.tree._diff import Diff as Diff
from tether.tree._diff import diff as diff
from tether.tree._equal import tree_equal as tree_equal
from tether.tree._filter import combine as combine
from tether.tree._filter import filter as filter
from tether.tree._filter import partition as partition
from tether.tree._if_array import if_array as if_array
from tether.tree._lerp import lerp as lerp
from tether.tree._pformat import tree_pformat as tree_pformat
from tether.tree._pformat import tree_pprint as tree_pprint
from tether.tree._place import place as place
from tether.tree._predicates import is_array as is_array
from tether.tree._predicates import is_array_like as is_array_like
from tether.tree._predicates import is_inexact_array as is_inexact_array
from tether.tree._predicates import is_inexact_array_like as is_inexact_array_like
from tether.tree._replace import map_modules as map_modules
from tether.tree._replace import replace as replace
from tether.tree._serialise import default_deserialise_filter_spec as default_deserialise_filter_spec
from tether.tree._serialise import default_serialise_filter_spec as default_serialise_filter_spec
from tether.tree._serialise import tree_deserialise_leaves as tree_deserialise_leaves
from tether.tree._serialise import tree_serialise_leaves as tree_serialise_leaves
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
    "apply_updates",
    "bind",
    "clone",
    "combine",
    "default_deserialise_filter_spec",
    "default_serialise_filter_spec",
    "diff",
    "filter",
    "if_array",
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
    "tree_check",
    "tree_deserialise_leaves",
    "tree_equal",
    "tree_flatten_one_level",
    "tree_pformat",
    "tree_pprint",
    "tree_serialise_leaves",
    "unstack",
    "update",
]
