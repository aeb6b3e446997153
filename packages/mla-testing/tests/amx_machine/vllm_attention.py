# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention op on isa "amx", executed by the emulator.

    vllm_attention.py agree        against its own isa "vec" and float64; one JSON line per case
    vllm_attention.py interleave   in turns with amx_kernels' ops, in one thread and in several; prints how many runs

Requests for AMX permission, by whomever, are answered and never reach the kernel, so all of it is emulated on a host
with AMX too.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import threading
from pathlib import Path

import torch

from mla_testing import amx_emulator

CASES = [  # query lengths, context lengths including them, heads, KV heads, head size
    ([1, 1, 1], [40, 1, 129], 8, 2, 64),
    ([5, 32], [70, 32], 4, 1, 128),
    ([48], [200], 6, 6, 64),
]
BLOCK = 32
# vLLM's op keeps its partial results in one scratch buffer for the whole process: two calls at once overwrite each
# other's, on isa "vec" too. Ours run beside it without a lock.
ONE_AT_A_TIME = threading.Lock()


def attend(isa: str, case: tuple, query, key, value, table, slots) -> torch.Tensor:
    query_lens, seq_lens, heads, kv_heads, size = case
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    cache = torch.zeros(int(table.max()) + 1, kv_heads, 2 * BLOCK, size, dtype=torch.bfloat16)
    key_cache, value_cache = cache.chunk(2, dim=2)
    torch.ops._C.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa, 1.0, 1.0, "auto")
    plan = torch.ops._C.get_scheduler_metadata(
        len(seq_lens), heads, kv_heads, size, lens, torch.bfloat16, starts, True, -1, isa, False, None, "auto"
    )
    out = torch.empty_like(query)
    with ONE_AT_A_TIME:
        torch.ops._C.cpu_attention_with_kv_cache(
            *(query, key_cache, value_cache, out, starts, lens, size**-0.5, True, None, -1, table, 0.0, plan),
            *(None, None, 1.0, 1.0, "auto"),
        )
    return out


def reference(case: tuple, query, keys, values) -> torch.Tensor:
    query_lens, seq_lens, heads, kv_heads, size = case
    out, at, first = [], 0, 0
    for new, length in zip(query_lens, seq_lens, strict=True):
        q = query[first : first + new].double().transpose(0, 1)
        k, v = (x[at : at + length].double().repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        scores = q @ k.permute(1, 2, 0) * size**-0.5
        visible = torch.arange(length)[None] <= torch.arange(length - new, length)[:, None]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out.append((weights @ v.transpose(0, 1)).transpose(0, 1))
        at, first = at + length, first + new
    return torch.cat(out)


def inputs(case: tuple) -> tuple[torch.Tensor, ...]:
    """query, keys, values, block table, slots; every request's blocks in order, block 0 unused."""
    query_lens, seq_lens, heads, kv_heads, size = case
    query = torch.randn(sum(query_lens), heads, size).bfloat16()
    keys, values = (torch.randn(sum(seq_lens), kv_heads, size).bfloat16() for _ in range(2))
    table = torch.zeros(len(seq_lens), max(-(-n // BLOCK) for n in seq_lens), dtype=torch.int32)
    slots, block = [], 1
    for i, length in enumerate(seq_lens):
        for b in range(-(-length // BLOCK)):
            table[i, b] = block
            block += 1
        slots += [int(table[i, p // BLOCK]) * BLOCK + p % BLOCK for p in range(length)]
    return query, keys, values, table, torch.tensor(slots, dtype=torch.int64)


def agree() -> None:
    for case in CASES:
        data = inputs(case)
        expected = reference(case, *data[:3])
        with amx_emulator.emulate() as emulation:
            vec = attend("vec", case, *data).double()
            assert emulation.counters()["TDPBF16PS"] == 0
            amx = attend("amx", case, *data).double()
            counts = emulation.counters()
        line = {
            "mode": emulation.mode,
            "counts": counts,
            "values": float(data[2].abs().max()),
            "vec_error": float((vec - expected).abs().max()),
            "amx_error": float((amx - expected).abs().max()),
            "between": float((vec - amx).abs().max()),
        }
        print(json.dumps(line))


def interleave() -> None:
    import amx_kernels.torch  # noqa: F401  (registers the ops)
    from amx_kernels import isa

    isa.set("amxbf16", emulated=True)
    ours = torch.ops.amx_kernels
    jobs = []
    for case in CASES:
        data = inputs(case)
        jobs.append(lambda case=case, data=data: attend("amx", case, *data))
    for n, m, k, out_features in ((16, 5, 128, 96), (3, 33, 512, 128)):
        left, weight = torch.randn(n, m, k).bfloat16(), torch.randn(n, out_features, k).bfloat16()
        packed = ours.convert_weight_packed(weight)

        def multiply(left=left, packed=packed, shape=(n, m, out_features)):
            out = torch.empty(shape, dtype=torch.bfloat16)
            ours.bmm_cpu(out, left, packed, True, None)
            return out

        jobs.append(multiply)
    for requests, heads, length in ((2, 16, 100), (3, 5, 33)):
        cache = torch.randn(40, 16, 576).bfloat16()
        q, pe = torch.randn(requests, heads, 512).bfloat16(), torch.randn(requests, heads, 64).bfloat16()
        table = torch.randint(0, 40, (requests, -(-length // 16)), dtype=torch.int32)
        lens = torch.full((requests,), length, dtype=torch.int32)

        def decode(q=q, pe=pe, cache=cache, table=table, lens=lens):
            out = torch.empty_like(q)
            ours.decode_attention_cpu(out, None, q, pe, cache, table, lens, 0.05)
            return out

        jobs.append(decode)

    alone = []
    for job in jobs:
        with amx_emulator.emulate() as emulation:
            alone.append(job())
            assert emulation.counters()["TDPBF16PS"] > 0
    failures: list[int] = []
    compared = 0
    for _ in range(3):
        for i in random.Random(1).sample(range(len(jobs)), len(jobs)):
            compared += 1
            if not torch.equal(jobs[i](), alone[i]):
                failures.append(i)

    def work(seed: int) -> None:
        for i in random.Random(seed).choices(range(len(jobs)), k=20):
            if not torch.equal(jobs[i](), alone[i]):
                failures.append(i)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    compared += 3 * 20
    assert not failures, f"jobs that did not repeat: {sorted(set(failures))}"
    print(compared)


def main(what: str) -> None:
    amx_emulator.answer_permission_requests()
    amx_emulator.install()
    torch.manual_seed(0)
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    torch.ops.load_library(str(Path(spec.submodule_search_locations[0]) / "_C.abi3.so"))
    {"agree": agree, "interleave": interleave}[what]()


if __name__ == "__main__":
    main(sys.argv[1])
