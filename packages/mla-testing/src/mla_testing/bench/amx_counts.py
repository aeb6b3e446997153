# SPDX-License-Identifier: Apache-2.0
"""Counts what one decode call executes; run by ``bench.amx`` in processes of their own.

    python -m mla_testing.bench.amx_counts tiles ours|vllm HEADS KEYS   AMX instructions, by the emulator
    python -m mla_testing.bench.amx_counts prefill TOKENS               the same of decompressed prefill, one head
    python -m mla_testing.bench.amx_counts shuffles HEADS KEYS          vector shuffles, by disassembly x trip counts

One request, one query token (but for prefill), one thread. Prints a JSON object on the last line.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mla_testing import amx_emulator, peers
from mla_testing.bench.attention import Pool, attention_check, our_attention
from mla_testing.bench.prefill import our_prefill, prefill_case, prefill_check

#: Vector instructions that move elements between lanes and so need the shuffle port (port 5 on Intel).
SHUFFLES = re.compile(
    r"^v?p?(unpck|unpack|shuf|perm|alignr|packs|packus|insert|extract|slldq|srldq|compress|expand|broadcast)"
    r"|^valign|^vpmov|^vpmulti"
)
_FROM_MEMORY = re.compile(r"^v?p?(broadcast|insert)|^vpmov")
_LINE = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)\s*(.*)$")


def shuffles_of(listing: str, trips: dict[int, int]) -> tuple[Counter[str], Counter[str]]:
    """(executed shuffles by mnemonic, all executed instructions by mnemonic).

    Args:
        listing: ``objdump -d --no-show-raw-insn`` of the library.
        trips: address -> how often executed.

    Broadcasts, insertions and widenings with a memory operand are done by the load ports, and do not count.
    """
    found: Counter[str] = Counter()
    every: Counter[str] = Counter()
    for line in listing.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        times = trips.get(int(match[1], 16), 0)
        if not times:
            continue
        mnemonic, operands = match[2], match[3]
        every[mnemonic] += times
        if SHUFFLES.match(mnemonic) and not (_FROM_MEMORY.match(mnemonic) and "(" in operands):
            found[mnemonic] += times
    return found, every


def _library_mapping(name: str) -> tuple[str, int, int, int]:
    """(path, load address, first and end address of code) of a mapped library."""
    rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.rstrip().endswith(name)]
    if not rows:
        raise RuntimeError(f"{name} is not mapped")
    spans = [(*(int(end, 16) for end in row[0].split("-")), row[1], int(row[2], 16), row[5]) for row in rows]
    base = next(start - offset for start, _, _, offset, _ in spans)
    code = [(start, end) for start, end, rights, _, _ in spans if "x" in rights]
    return spans[0][4], base, min(start for start, _ in code), max(end for _, end in code)


def _decode(who: str, heads: int, keys: int) -> tuple[Any, Any]:
    """(call, check) of one decode call."""
    torch.set_num_threads(1)
    case = Pool(keys).case(heads, [keys], [1])
    if who == "ours":
        import amx_kernels.torch  # noqa: F401

        entry = our_attention(case, "amxbf16", 1, decode=True)
        call, fetch = entry.call, entry.fetch
    else:
        peer = peers.VllmAmxDecode(case, 1)
        call, fetch = peer, lambda: peer.out
    check = attention_check(case)
    return call, lambda: check(fetch())


def _prefill(tokens: int) -> tuple[Any, Any]:
    """(call, check) of one call of decompressed prefill of a fresh prompt, one head."""
    torch.set_num_threads(1)
    case = prefill_case(Pool(tokens), 1, [0], [tokens])
    entry = our_prefill(case, "amxbf16", 1, "decompressed")
    check = prefill_check(case)
    return entry.call, lambda: check(entry.fetch())


def tiles(make: Callable[[], tuple[Any, Any]], peer: bool = False) -> dict[str, Any]:
    """The emulator's counters over one call, after one call for warming up; the result is checked."""
    if peer:  # it asks the kernel itself: say yes, and go on emulating
        amx_emulator.answer_permission_requests()
    with amx_emulator.emulate() as emulation:
        if emulation.mode == "native":
            raise RuntimeError("AMX permission was granted to this process: nothing would be counted")
        call, check = make()
        call()
        emulation.reset()
        call()
        counts = emulation.counters()
        return {"counts": counts, "checked": check(), "mode": emulation.mode}


def shuffles(heads: int, keys: int) -> dict[str, Any]:
    """Executed vector shuffles of one call of ours."""
    objdump = shutil.which("objdump")
    if objdump is None:
        raise RuntimeError("objdump (binutils) is not installed")
    steps = ctypes.CDLL(str(Path(__file__).parents[1] / "libmla_steps.so"))
    steps.mla_steps_start.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    # Every tile instruction traps: software tiles run in the signal handler, which is not stepped through.
    amx_emulator.install(patch=False)
    call, check = _decode("ours", heads, keys)
    call()
    path, base, first, end = _library_mapping("libamx_kernels.so")
    table = np.zeros(end - first, dtype=np.uint32)
    error = steps.mla_steps_start(first, end, table.ctypes.data)
    call()
    steps.mla_steps_stop()
    if error:
        raise OSError(error, "cannot single-step")
    checked = check()
    trips = {int(address) + first - base: int(table[address]) for address in table.nonzero()[0]}
    listing = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", path], check=True, capture_output=True, text=True
    ).stdout
    found, every = shuffles_of(listing, trips)
    return {"shuffles": dict(found), "instructions": dict(every.most_common()), "checked": checked}


def main(arguments: list[str]) -> None:
    """See the head of this file."""
    if arguments[0] == "tiles":
        who, heads, keys = arguments[1], int(arguments[2]), int(arguments[3])
        found = tiles(lambda: _decode(who, heads, keys), who == "vllm")
    elif arguments[0] == "prefill":
        found = tiles(lambda: _prefill(int(arguments[1])))
    else:
        found = shuffles(int(arguments[1]), int(arguments[2]))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
