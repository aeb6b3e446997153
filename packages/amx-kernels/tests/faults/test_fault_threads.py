# SPDX-License-Identifier: Apache-2.0
"""Threads: any number, in any order, changed between calls; work that reaches all of them; masks and forks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

import capi
import numpy as np
import pytest
from fault_support import attend, attended

import amx_kernels
from mla_testing import bf16
from mla_testing.cases import AttentionCase, BmmCase, ConcatCase

fault = pytest.mark.fault

COUNTS = (1, 2, 3, 5, 7, 12, 16, 31, 32, 63, 64, 200)
DECODE = AttentionCase(3, (1500, 5, 0, 300, 2100), rank=64, rope=32, block_size=32)
EXTEND = AttentionCase(3, (700, 65, 5), query_lens=(100, 65, 1), rank=64, rope=32, block_size=32)


@fault(76, "https://github.com/intel/xFasterTransformer/issues/491")
@pytest.mark.parametrize("case", [DECODE, EXTEND], ids=["decode", "extend"])
def test_attention_has_the_same_bits_on_any_number_of_threads(tier: str, case: AttentionCase) -> None:
    amx_kernels.set_num_threads(1)
    plain, plain_lse = attended(case)
    for threads in COUNTS:
        amx_kernels.set_num_threads(threads)
        data = case.build()
        attend(data)
        assert np.array_equal(data.out, plain), f"{threads} threads"
        assert np.array_equal(data.lse, plain_lse), f"{threads} threads"


@fault(76, "https://github.com/intel/xFasterTransformer/issues/491")
def test_other_ops_have_the_same_bits_on_any_number_of_threads(tier: str) -> None:
    """More threads than work items among them."""
    results = []
    for threads in COUNTS:
        amx_kernels.set_num_threads(threads)
        product = BmmCase(3, 70, 130, 66).build()
        packed = amx_kernels.convert_weight_packed(product.mat2)
        amx_kernels.bmm_cpu(product.out, product.mat1, packed, True)
        write = ConcatCase(257).build()
        amx_kernels.concat_and_cache_mla_cpu(write.kv_c, write.k_pe, write.kv_cache, write.slot_mapping)
        write.check()
        results.append((product.out.tobytes(), packed.tobytes()))
    product.check()
    assert len(set(results)) == 1


@fault(78, "https://github.com/kvcache-ai/ktransformers/issues/2128")
def test_thread_counts_changed_between_plan_and_call(tier: str) -> None:
    """Scratch and split boundaries are those of the call, whatever pool the plan was made for."""
    plain, _ = attended(DECODE)
    for planned in (1, 3, 64):
        data = DECODE.build()
        plan = amx_kernels.plan_attention(data.seq_lens, None, len(data.q_latent), 3, planned)
        for threads in (2, 64, 1, 7):
            amx_kernels.set_num_threads(threads)
            data.out[...] = bf16.NAN
            attend(data, plan=plan)
            assert np.array_equal(data.out, plain), f"planned for {planned}, run on {threads}"


def run_tasks(order: Callable[[int], list[int]], threads: int, seconds: list[float] | None = None) -> capi.Parallel:
    """A caller's pool that executes the tasks on the calling thread in a chosen order, and times each."""

    def run(_context: int, n: int, task: Callable[[int, int], None], arg: int) -> None:
        for i in order(n):
            start = time.thread_time()
            task(arg, i)
            if seconds is not None:
                seconds.append(time.thread_time() - start)

    return capi.Parallel(threads, None, capi.RUN(run))


def attention_arguments(case: AttentionCase) -> tuple[np.ndarray, dict[str, object]]:
    data = case.build()
    names = ("out", "lse", "q_latent", "q_pe", "kv_cache", "block_table", "seq_lens")
    arguments: dict[str, object] = {name: capi.tensor(getattr(data, name)) for name in names}
    arguments |= {"query_start_loc": None, "scale": data.scale, "plan": None}
    return data.out, arguments


@fault(25, "https://github.com/NVIDIA/TensorRT-LLM/pull/15138")
def test_tasks_may_run_in_any_order_on_any_thread(tier: str) -> None:
    """Splits of one request land on different tasks; whoever ends last merges, always in the same order. Writes outside
    scratch are what the sanitize session looks for, with these same cases."""
    case = AttentionCase(16, (2100, 600), rank=64, rope=32, block_size=32)
    plain, _ = attended(case)
    orders: dict[str, Callable[[int], list[int]]] = {
        "forward": lambda n: list(range(n)),
        "backward": lambda n: list(range(n))[::-1],
        "shuffled": lambda n: random.Random(n).sample(range(n), n),
    }
    for name, order in orders.items():
        for threads in (2, 4, 33):
            out, arguments = attention_arguments(case)
            error = capi.Error()
            code = capi.call("amxk_attention", *arguments.values(), run_tasks(order, threads), error)
            assert code == capi.OK, error.message
            assert np.array_equal(out, plain), f"{name} on {threads}"


@fault(28, "https://github.com/ROCm/aiter/pull/4507")
@fault("P5", "batch-dependent split counts")
def test_one_long_request_keeps_every_thread_busy(tier: str) -> None:
    """Batch 1 with 65,536 keys on eight threads, with a plan and without: no thread has less than half its share."""
    case = AttentionCase(1, (65536,), rank=32, rope=16, block_size=128)
    for planned in (False, True):
        shares: list[float] = []
        _, arguments = attention_arguments(case)
        if planned:
            plan = amx_kernels.plan_attention(np.array([65536]), None, 1, 1, 8)
            arguments["plan"] = capi.tensor(plan)
        pool = run_tasks(lambda n: list(range(n)), 8, shares)
        for _ in range(3):  # the first run also faults memory in
            shares.clear()
            assert capi.call("amxk_attention", *arguments.values(), pool, None) == capi.OK
        assert len(shares) == 8
        assert min(shares) > 0.5 * sum(shares) / 8, shares


@fault("P2", "split scratch sized by the longest sequence of the step")
def test_many_short_requests_beside_a_long_one_take_no_memory_of_its_length(tier: str) -> None:
    """255 requests of 64 keys and one of 32,768: the growth of memory is that of the work, not of 256 long requests."""
    amx_kernels.set_num_threads(2)
    case = AttentionCase(2, (64,) * 255 + (32768,), rank=64, rope=32, block_size=64)
    data = case.build()
    amx_kernels.decode_attention_cpu(
        data.out[:1].copy(), None, data.q_latent[:1], data.q_pe[:1], data.kv_cache, data.block_table[:1],
        data.seq_lens[:1], data.scale,
    )  # fmt: skip
    before = resident()
    attend(data)
    assert resident() - before < 32 << 20  # 256 requests x 64 splits x 2 x 64 floats alone would be 8 MiB of state x 4
    data.check()


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def in_child(script: str) -> str:
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False,
        env=dict(os.environ, PYTHONPATH=":".join([os.path.dirname(__file__), *(p for p in sys.path if p)])),
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return child.stdout.strip()


@fault(81, "https://github.com/vllm-project/vllm/issues/43240")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to leave the first out")
def test_threads_stay_in_the_affinity_mask() -> None:
    """A process pinned away from core 0: as many threads as the mask has CPUs, none of them outside it."""
    script = """
import os
cpus = sorted(os.sched_getaffinity(0))[1:]
os.sched_setaffinity(0, cpus)
import amx_kernels
from test_fault_threads import DECODE, attended
assert amx_kernels.get_num_threads() == len(cpus), amx_kernels.get_num_threads()
amx_kernels.set_num_threads(5)
attended(DECODE)
for task in os.listdir("/proc/self/task"):
    assert os.sched_getaffinity(int(task)) == set(cpus), task
print(len(os.listdir("/proc/self/task")))
"""
    assert int(in_child(script)) >= 5


def test_a_forked_child_starts_threads_of_its_own(tier: str) -> None:
    amx_kernels.set_num_threads(4)
    plain, _ = attended(DECODE)
    child = os.fork()
    if child == 0:
        try:
            data = DECODE.build()
            attend(data)
            os._exit(0 if np.array_equal(data.out, plain) else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    attended(DECODE)


@fault(78, "https://github.com/kvcache-ai/ktransformers/issues/2128", refused=True)
@pytest.mark.parametrize("threads", [0, -1, 4097, 2**31 - 1])
def test_thread_counts_that_cannot_be_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads is {threads}, expected between 1 and 4096"):
        amx_kernels.set_num_threads(threads)
    with pytest.raises(ValueError, match=f"num_threads is {threads}, expected between 1 and 4096"):
        amx_kernels.plan_attention(np.array([5]), None, 1, 1, threads)


@fault(64, "https://github.com/pytorch/pytorch/issues/187912")
@fault(71, "https://github.com/ggml-org/llama.cpp/issues/20824")
def test_a_callers_threads_share_no_state(tier: str) -> None:
    """Two callers with pools of their own, alternating shapes; the soak session does this for minutes."""
    import threading

    shapes = [(rows, BmmCase(2, rows, 48, 64).build()) for rows in (1, 7, 16, 17, 32)]
    wanted = {}
    for rows, data in shapes:
        amx_kernels.bmm_cpu(data.out, data.mat1, data.mat2, False)
        data.check()
        wanted[rows] = data.out.copy()
    plain, _ = attended(DECODE)
    wrong: list[str] = []

    def caller(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            rows, data = rng.choice(shapes)
            out = np.empty_like(wanted[rows])
            amx_kernels.bmm_cpu(out, data.mat1, data.mat2, False)
            if not np.array_equal(out, wanted[rows]):
                wrong.append(f"bmm {rows}")
            own, arguments = attention_arguments(DECODE)
            pool = run_tasks(lambda n: list(range(n)), rng.choice((1, 3, 8)))
            if capi.call("amxk_attention", *arguments.values(), pool, None) != capi.OK or not np.array_equal(
                own, plain
            ):
                wrong.append("attention")

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not wrong


def test_the_pool_survives_a_caller_that_lies_about_its_threads() -> None:
    """num_threads is advice: a serial pool that claims 4,096 threads only divides the work finer."""
    plain, _ = attended(DECODE)
    for claimed in (4096, 2**31 - 1, -5):
        out, arguments = attention_arguments(DECODE)
        assert capi.call("amxk_attention", *arguments.values(), capi.serial(claimed), None) == capi.OK
        assert np.array_equal(out, plain)
