# SPDX-License-Identifier: Apache-2.0
"""Patch series that make vLLM's CPU platform serve MLA models, and the tool that applies them.

The API is four functions over a `Tree` (an installed vLLM or a source tree)::

    from vllm_mla_patches import Tree, apply, revert, status

    tree = Tree.installed()
    print(status(tree))
    apply(tree)          # all patches of its series, or nothing
    revert(tree)         # back to the release, to the byte

Every refusal is a subclass of `PatchError` and leaves the tree as it was.
"""

from __future__ import annotations

from .errors import (
    BusyTreeError,
    DiffError,
    ModifiedTreeError,
    PatchError,
    ReadOnlyTreeError,
    SeriesError,
    TreeNotFoundError,
    UnsupportedVersionError,
)
from .series import Patch, Series, export, load_ledger
from .stack import PatchState, Status, apply, revert, status
from .tree import Tree

__version__ = "0.1.0"

__all__ = [
    "BusyTreeError",
    "DiffError",
    "ModifiedTreeError",
    "Patch",
    "PatchError",
    "PatchState",
    "ReadOnlyTreeError",
    "Series",
    "SeriesError",
    "Status",
    "Tree",
    "TreeNotFoundError",
    "UnsupportedVersionError",
    "apply",
    "export",
    "load_ledger",
    "revert",
    "status",
]
