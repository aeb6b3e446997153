# SPDX-License-Identifier: Apache-2.0
"""`vllm-mla-patches status | apply | revert | export`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from . import __version__
from .errors import PatchError
from .series import export
from .stack import Status, apply, revert, status
from .tree import Tree

EXIT_OK, EXIT_REFUSED = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, or 1 after a refusal (one line on stderr; the tree is as it was)."""
    arguments = _parser().parse_args(argv)
    # A termination request unwinds like Ctrl-C does, so that a change under way is undone.
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(arguments.run(arguments))
    except PatchError as error:
        print(f"vllm-mla-patches: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except BrokenPipeError:  # of the report, which comes last: `| head` is no failure
        sys.stdout = None  # type: ignore[assignment]
        return EXIT_OK
    finally:
        signal.signal(signal.SIGTERM, previous)


def _status(arguments: argparse.Namespace) -> int:
    found = status(_tree(arguments), series=arguments.series)
    if arguments.json:
        print(json.dumps(_as_json(found), indent=2))
    else:
        _print(found)
    return EXIT_REFUSED if found.modified or found.interrupted else EXIT_OK


def _apply(arguments: argparse.Namespace) -> int:
    _print(apply(_tree(arguments), series=arguments.series, through=arguments.through))
    return EXIT_OK


def _revert(arguments: argparse.Namespace) -> int:
    _print(revert(_tree(arguments), series=arguments.series, through=arguments.through))
    return EXIT_OK


def _export(arguments: argparse.Namespace) -> int:
    series = arguments.series or _tree(arguments).version
    if series is None:
        raise PatchError("the tree does not say its version: name the series with --series")
    for file in export(series, arguments.folder):
        print(file)
    return EXIT_OK


def _tree(arguments: argparse.Namespace) -> Tree:
    return Tree.installed() if arguments.tree is None else Tree.at(arguments.tree)


def _print(found: Status) -> None:
    version = found.tree.version or f"of unknown version, taken for {found.series}"
    print(f"vLLM {version} at {found.tree.root}")
    if found.interrupted:
        print("A change was interrupted: run apply or revert, which first undo it.")
    if found.unpatched:
        print(f"This release needs no patches. Of what series {found.series} does:")
    elif found.modified:
        print(f"Modified: not as released, nor as series {found.series} leaves it. Differing files:")
        print(*(f"  {path}" for path in found.modified), sep="\n")
        return
    else:
        print(f"Series {found.series}: {found.applied} of {len(found.patches)} patches applied")
    width = max(len(state.patch.name) for state in found.patches)
    for state in found.patches:
        print(f"  {state.state:<9}{state.patch.name:<{width}}  {state.patch.subject}")


def _as_json(found: Status) -> dict[str, object]:
    return {
        "root": str(found.tree.root),
        "version": found.tree.version,
        "series": found.series,
        "unpatched": found.unpatched,
        "interrupted": found.interrupted,
        "modified": list(found.modified),
        "patches": [{"name": state.patch.name, "state": state.state} for state in found.patches],
    }


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-mla-patches", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--tree", type=Path, help="source tree or site-packages folder (default: the installed vLLM)")
    common.add_argument("--series", metavar="VERSION", help="vLLM version whose series is meant (default: the tree's)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("status", parents=[common], help="what is applied; changes nothing")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(run=_status)

    command = commands.add_parser("apply", parents=[common], help="apply the series: all of it, or nothing")
    command.add_argument("--through", metavar="PATCH", help="the last patch to apply (default: the series' last)")
    command.set_defaults(run=_apply)

    command = commands.add_parser("revert", parents=[common], help="back to the release, to the byte")
    command.add_argument("--through", metavar="PATCH", help="the last patch to revert (default: the series' first)")
    command.set_defaults(run=_revert)

    command = commands.add_parser("export", parents=[common], help="write the patch files for git am")
    command.add_argument("folder", type=Path, help="a new or an empty folder")
    command.set_defaults(run=_export)
    return parser
