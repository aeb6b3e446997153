# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the backend: one table, merged into vLLM's own.

vLLM warns about (and can refuse) ``VLLM_*`` variables it does not know, and hashes those it knows into the key of its
compile cache; both are right for ours once :func:`merge` has run. The kernels' own variables (``AMX_KERNELS_*``) are
documented with the amx-kernels package.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any


def _choice(values: dict[str, str]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        try:
            return values[text.strip().lower()]
        except KeyError:
            raise ValueError(f"{name}={text!r}: expected one of {', '.join(values)}") from None

    return parse


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the text that stands for "unset", how to read it, what it does."""

    name: str
    default: str
    parse: Callable[[str, str], Any]
    doc: str

    def get(self) -> Any:
        """The value now. Raises ValueError naming the variable, its value and the accepted ones."""
        return self.parse(self.name, os.environ.get(self.name) or self.default)


MODE = Variable(
    "VLLM_AMX_MLA_BACKEND",
    "auto",
    _choice({"auto": "auto", "on": "on", "1": "on", "off": "off", "0": "off"}),
    "auto: serve MLA models whenever a tier above `portable` is permitted on this host; "
    "on: serve them on the portable tier too; off: leave vLLM exactly as it is without this package",
)

VARIABLES: tuple[Variable, ...] = (MODE,)


def merge(environment_variables: MutableMapping[str, Callable[[], Any]]) -> None:
    """Add the table to ``vllm.envs.environment_variables`` (idempotent)."""
    for variable in VARIABLES:
        environment_variables.setdefault(variable.name, variable.get)
