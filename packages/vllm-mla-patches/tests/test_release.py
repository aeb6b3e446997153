# SPDX-License-Identifier: Apache-2.0
"""The ledger against the vLLM that is installed beside the tests: what it calls needed is lacking, what it calls dead
is there. The first fails once a patch is dead, the second once upstream loses what it had."""

from __future__ import annotations

import pytest

from vllm_mla_patches import Patch, Series, Tree, TreeNotFoundError, apply, revert, status
from vllm_mla_patches.probes import carries
from vllm_mla_patches.series import version_key


@pytest.fixture(scope="module")
def tree() -> Tree:
    try:
        found = Tree.installed()
    except TreeNotFoundError as error:
        pytest.skip(str(error))
    if found.version is None or not found.version.replace(".", "").isdigit():
        pytest.skip(f"{found.root} is no release: its version is {found.version}")
    return found


@pytest.mark.parametrize(
    "patch",
    [pytest.param(patch, id=f"{v}-{patch.name}") for v in Series.available() for patch in Series.load(v).patches],
)
def test_the_ledger_is_right_about_the_installed_release(tree: Tree, patch: Patch) -> None:
    since = patch.upstream_since
    expected = bool(since) and version_key(str(tree.version)) >= version_key(since)
    if not expected and status_says_applied(tree, patch):
        expected = True
    assert carries(tree, patch.probe) == expected, (
        f"{patch.name}: vLLM {tree.version} {'lacks' if expected else 'already has'} this. The ledger says "
        f"upstream_since = '{since}': correct it, and drop the patch from series that no longer need it"
    )


def status_says_applied(tree: Tree, patch: Patch) -> bool:
    found = status(tree)
    return not found.unpatched and any(state.state == "applied" for state in found.patches if state.patch == patch)


def test_a_release_without_a_series_is_never_changed(tree: Tree) -> None:
    found = status(tree)
    if not found.unpatched:
        pytest.skip(f"vLLM {tree.version} has a series")
    files = {path: tree.read(path) for patch in Series.load(found.series).patches for path in
             (diff.path for diff in patch.diffs)}  # fmt: skip
    assert apply(tree) == revert(tree) == found
    assert {path: tree.read(path) for path in files} == files
    assert {state.patch.name: state.state for state in found.patches}["rotary-views"] == "lacking"
