# SPDX-License-Identifier: Apache-2.0
"""The amxbf16 tier does its work in TDPBF16PS: executed multiply-accumulates against a formula of the shape.

One process runs every shape under the emulator, which counts; AMX_KERNELS_EMULATED=1 keeps it from asking for AMX
permission, so that it counts on a machine with AMX as well. The formula knows nothing of how the kernel blocks its
work: it is the multiply-accumulates of the shape rounded up to whole tiles (16 rows, 16 columns, 32 deep). A kernel may
do up to half as much again, and a kernel that does part of it by other means does too little.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from mla_testing import amx_emulator
from mla_testing.cases import AttentionCase, BmmCase

TILE_MACS = 16 * 16 * 32


def up(value: int, to: int) -> int:
    return -(-value // to) * to


def attention_macs(case: AttentionCase) -> int:
    """Rows are (token, head) pairs, 16 to a tile; a tile of rows needs the keys its last token sees."""
    total = 0
    for keys, tokens in zip(case.seq_lens, case.query_lens or (1,) * len(case.seq_lens), strict=True):
        for first in range(0, tokens * case.heads if keys else 0, 16):
            last_token = min(first + 15, tokens * case.heads - 1) // case.heads
            visible = up(keys - tokens + last_token + 1, 16)
            scores = visible * up(case.rank + case.rope, 32)
            values = up(visible, 32) * up(case.rank, 16)
            total += 16 * (scores + values)
    return total


def bmm_macs(case: BmmCase) -> int:
    return case.batch * up(case.rows, 16) * up(case.out_features, 16) * up(case.in_features, 32)


ATTENTION = (
    *(AttentionCase(heads, (1, 17, 256, 1025)) for heads in (1, 16, 22, 64, 128)),
    AttentionCase(16, (4096,), block_size=64),
    AttentionCase(16, (300, 513), query_lens=(4, 4), block_size=32),
    AttentionCase(16, (512,), query_lens=(512,), block_size=16),
    AttentionCase(128, (64, 700), query_lens=(64, 5), block_size=64),
    AttentionCase(1, (512,), query_lens=(512,), block_size=16),
    AttentionCase(22, (1200,), query_lens=(40,), block_size=48),
    AttentionCase(16, (300,), block_size=16, rank=256, rope=64),
)
BMM = (
    *(BmmCase(16, rows, 512, 128) for rows in (1, 16, 33, 512)),
    *(BmmCase(16, rows, 128, 512) for rows in (1, 64)),
    BmmCase(3, 20, 50, 70),
)
CASES = {case.id: case for case in (*ATTENTION, *BMM)}

_PROGRAM = """
import json
from calls import attend
import amx_kernels
import test_amx_counts as table
from mla_testing import amx_emulator
from mla_testing.cases import BmmCase

counts = {}
with amx_emulator.emulate() as emulation:
    assert amx_kernels.isa.current() == "amxbf16"
    for name, case in table.CASES.items():
        data = case.build()
        if isinstance(case, BmmCase):
            packed = amx_kernels.convert_weight_packed(data.mat2)
            emulation.reset()
            amx_kernels.bmm_cpu(data.out, data.mat1, packed, True)
        else:
            emulation.reset()
            attend(data)
        counts[name] = emulation.counters()
        data.check()
    amx_kernels.isa.set("avx2")
    emulation.reset()
    attend(table.ATTENTION[0].build())
    counts["avx2"] = emulation.counters()
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    if amx_emulator.mode().startswith("unavailable"):
        pytest.skip(f"no AMX emulator: {amx_emulator.mode()}")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)]),
        "AMX_KERNELS_ISA": "amxbf16",
        "AMX_KERNELS_EMULATED": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_multiply_accumulates(counts, name):
    case, executed = CASES[name], counts[name]
    wanted = bmm_macs(case) if isinstance(case, BmmCase) else attention_macs(case)
    assert 1.0 <= executed["macs"] / wanted <= 1.5, f"{executed['macs']:,} executed, {wanted:,} of the shape"


@pytest.mark.parametrize("name", CASES)
def test_products_are_whole_tiles(counts, name):
    """Every TDPBF16PS multiplies full tiles, whose cost it pays anyway; no other product is used."""
    executed = counts[name]
    assert executed["macs"] == executed["TDPBF16PS"] * TILE_MACS
    assert executed["tmul_rows"] == executed["TDPBF16PS"] * 16
    assert not [k for k, v in executed.items() if k.startswith("TDP") and k != "TDPBF16PS" and v]


@pytest.mark.parametrize("name", CASES)
def test_operands_are_reused(counts, name):
    """Loads per product at most those of a block of four accumulators along one side, accumulators included."""
    executed = counts[name]
    assert executed["TILELOADD"] + executed["TILELOADDT1"] <= 2.0 * executed["TDPBF16PS"]


def test_another_tier_executes_no_amx_instruction(counts):
    assert not [name for name, count in counts["avx2"].items() if name.isupper() and count]
