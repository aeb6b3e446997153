# SPDX-License-Identifier: Apache-2.0
"""What the tool can refuse. Whatever is raised, the tree is as it was before the call."""

from __future__ import annotations


class PatchError(Exception):
    """Base of every refusal; its text is one line that a user can act on."""


class TreeNotFoundError(PatchError):
    """There is no vLLM where one was expected."""


class UnsupportedVersionError(PatchError):
    """No series is made for this version of vLLM, or not the one that was asked for."""


class ModifiedTreeError(PatchError):
    """Files are neither as released nor as any prefix of the series leaves them."""

    def __init__(self, message: str, paths: tuple[str, ...]) -> None:
        super().__init__(message)
        self.paths = paths


class ReadOnlyTreeError(PatchError):
    """The file system or its permissions forbid the change."""


class BusyTreeError(PatchError):
    """Another process is changing the same tree."""


class SeriesError(PatchError):
    """A series, its files and its ledger do not agree, or a name is not in it."""


class DiffError(PatchError):
    """A diff is malformed, or does not match the text it is applied to."""
