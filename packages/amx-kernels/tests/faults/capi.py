# SPDX-License-Identifier: Apache-2.0
"""The C API through ctypes: every entry point, a call of it that is right, and the ways in which it can be made wrong.

``CALLS`` has one row per function of the two public headers (a test compares it with them). A row builds right
arguments; ``mutations()`` yields them with one of them spoiled: null, negative, huge, misaligned, of another type. What
a library cannot notice is left out: addresses and sizes that lie about memory the caller really has.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from amx_kernels import isa

OK, INVALID, UNSUPPORTED, INTERNAL = range(4)
MAX_DIMS = 8
I32_MIN, I32_MAX = -(2**31), 2**31 - 1
I64_MIN, I64_MAX = -(2**63), 2**63 - 1
DTYPES = {"uint16": 0, "float32": 1, "int32": 2, "int64": 3}

TASK = ctypes.CFUNCTYPE(None, c_void_p, c_int)
RUN = ctypes.CFUNCTYPE(None, c_void_p, c_int, TASK, c_void_p)


class Tensor(ctypes.Structure):
    """amxk_tensor."""

    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("ndim", c_int32),
        ("sizes", c_int64 * MAX_DIMS),
        ("strides", c_int64 * MAX_DIMS),
        ("dtype_name", c_char_p),
    ]


class Parallel(ctypes.Structure):
    """amxk_parallel."""

    _fields_ = [("num_threads", c_int32), ("context", c_void_p), ("run", RUN)]


class Error(ctypes.Structure):
    """amxk_error."""

    _fields_ = [("code", c_int), ("message", c_char * 512)]


def tensor(array: np.ndarray) -> Tensor:
    """A descriptor of the array's memory; the array must outlive it (it is kept as an attribute)."""
    t = Tensor(array.ctypes.data, DTYPES[array.dtype.name], array.ndim)
    for d in range(array.ndim):
        t.sizes[d] = array.shape[d]
        t.strides[d] = array.strides[d] // array.itemsize
    t.keep = array
    return t


def serial(num_threads: int) -> Parallel:
    """Threads of a caller that runs every task in turn, and says it has `num_threads`."""

    def run(_context: int, n: int, task: Callable[[int, int], None], arg: int) -> None:
        for i in range(n):
            task(arg, i)

    return Parallel(num_threads, None, RUN(run))


T, P, E = POINTER(Tensor), POINTER(Parallel), POINTER(Error)
#: Result and argument types, as the headers state them; "T" is a tensor that may be spoiled.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "amxk_set_num_threads": (c_int, [c_int, E]),
    "amxk_get_num_threads": (c_int, []),
    "amxk_default_parallel": (Parallel, []),
    "amxk_packed_sizes": (c_int, [T, POINTER(c_int64), E]),
    "amxk_convert_weight_packed": (c_int, [T, T, P, E]),
    "amxk_bmm": (c_int, [T, T, T, c_int, T, P, E]),
    "amxk_concat_and_cache_mla": (c_int, [T, T, T, T, P, E]),
    "amxk_plan_attention": (c_int, [T, POINTER(c_int64), T, T, c_int64, c_int64, c_int, E]),
    "amxk_attention": (c_int, [T, T, T, T, T, T, T, T, c_double, T, P, E]),
    "amxk_prefill_attention": (c_int, [T, T, T, T, T, T, T, T, T, T, c_double, P, E]),
    "amxk_prefill_decompressed": (c_int, [c_int64, c_int64, POINTER(c_int), E]),
    "amxk_cpu_report_size": (c_size_t, []),
    "amxk_cpu_feature_name": (c_char_p, [c_int]),
    "amxk_detect": (None, [c_void_p, c_void_p]),
    "amxk_tier_info": (c_int, [c_void_p, c_int, c_void_p, E]),
    "amxk_best_tier": (c_int, [c_void_p]),
    "amxk_resolve_tier": (c_int, [c_void_p, c_char_p, c_int, POINTER(c_int), E]),
    "amxk_current_tier": (c_int, [E]),
    "amxk_set_tier": (c_int, [c_char_p, c_int, E]),
    "amxk_tier_source": (c_char_p, []),
    "amxk_tier_is_emulated": (c_int, []),
    "amxk_explain": (c_size_t, [c_void_p, c_void_p, c_size_t]),
}


def child_environment() -> dict[str, str]:
    """For fresh processes: nothing that configures the kernels, but what a sanitized build needs to run at all."""
    keep = ("PATH", "LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS", "AMX_KERNELS_EMULATED")
    return {name: os.environ[name] for name in keep if name in os.environ}


@cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(isa.LIBRARY))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def call(name: str, *arguments: Any) -> Any:
    """Calls with structures passed by reference, arrays as descriptors, None as null."""
    passed = [byref(a) if isinstance(a, ctypes.Structure) else a for a in arguments]
    return getattr(library(), name)(*passed)


@dataclass(frozen=True)
class Case:
    """Right arguments by name, in the order of the function; spoiled ones replace them."""

    function: str
    arguments: dict[str, Any]

    def call(self, **replaced: Any) -> Any:
        return call(self.function, *(self.arguments | replaced).values())


def _bits(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(len(shape) + math.prod(shape))
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def packed_sizes_case() -> Case:
    return Case("amxk_packed_sizes", {"weight": tensor(_bits(2, 20, 40)), "sizes": (c_int64 * 4)(), "error": Error()})


def pack_case() -> Case:
    return Case(
        "amxk_convert_weight_packed",
        {
            "packed": tensor(np.zeros((2, 2, 32, 32), np.uint16)),
            "weight": tensor(_bits(2, 20, 40)),
            "parallel": serial(2),
            "error": Error(),
        },
    )


def bmm_case(packed: bool = False) -> Case:
    weight = np.zeros((2, 2, 32, 32), np.uint16) if packed else _bits(2, 20, 40)
    return Case(
        "amxk_bmm",
        {
            "out": tensor(np.zeros((2, 3, 20), np.uint16)),
            "mat1": tensor(_bits(2, 3, 40)),
            "mat2": tensor(weight),
            "is_packed": int(packed),
            "scale": tensor(np.ones(2, np.float32)),
            "parallel": serial(2),
            "error": Error(),
        },
    )


def concat_case() -> Case:
    return Case(
        "amxk_concat_and_cache_mla",
        {
            "kv_c": tensor(_bits(5, 32)),
            "k_pe": tensor(_bits(5, 16)),
            "kv_cache": tensor(np.zeros((3, 16, 48), np.uint16)),
            "slot_mapping": tensor(np.array([0, -1, 47, 5, 6], np.int64)),
            "parallel": serial(2),
            "error": Error(),
        },
    )


LENGTHS, STARTS, HEADS = (20, 33), (0, 3, 5), 3


def plan_case(write: bool = True, index: str = "int64") -> Case:
    lengths, starts = np.array(LENGTHS, index), np.array(STARTS, index)
    size = c_int64()
    planner = library().amxk_plan_attention
    assert planner(None, byref(size), byref(tensor(lengths)), byref(tensor(starts)), 5, HEADS, 2, None) == OK
    return Case(
        "amxk_plan_attention",
        {
            "plan": tensor(np.zeros(size.value, np.int64)) if write else None,
            "plan_size": c_int64(),
            "seq_lens": tensor(lengths),
            "query_start_loc": tensor(starts),
            "num_tokens": 5,
            "num_heads": HEADS,
            "num_threads": 2,
            "error": Error(),
        },
    )


def attention_case(index: str = "int64", planned: bool = False) -> Case:
    plan = None
    if planned:
        row = plan_case()
        assert row.call() == OK
        plan = row.arguments["plan"]
    return Case(
        "amxk_attention",
        {
            "out": tensor(np.zeros((5, HEADS, 32), np.uint16)),
            "lse": tensor(np.zeros((5, HEADS), np.float32)),
            "q_latent": tensor(_bits(5, HEADS, 32)),
            "q_pe": tensor(_bits(5, HEADS, 16)),
            "kv_cache": tensor(_bits(5, 16, 48)),
            "block_table": tensor(np.array([[0, 1, -1], [2, 3, 4]], index)),
            "seq_lens": tensor(np.array(LENGTHS, index)),
            "query_start_loc": tensor(np.array(STARTS, index)),
            "scale": 0.1,
            "plan": plan,
            "parallel": serial(2),
            "error": Error(),
        },
    )


def prefill_case(index: str = "int64") -> Case:
    """nope 40, value 24, R 32, P 16."""
    return Case(
        "amxk_prefill_attention",
        {
            "out": tensor(np.zeros((5, HEADS, 24), np.uint16)),
            "lse": tensor(np.zeros((5, HEADS), np.float32)),
            "q_nope": tensor(_bits(5, HEADS, 40)),
            "q_pe": tensor(_bits(5, HEADS, 16)),
            "kv_cache": tensor(_bits(5, 16, 48)),
            "block_table": tensor(np.array([[0, 1, -1], [2, 3, 4]], index)),
            "seq_lens": tensor(np.array(LENGTHS, index)),
            "query_start_loc": tensor(np.array(STARTS, index)),
            "w_uk": tensor(_bits(HEADS, 3, 16, 32)),
            "w_uv": tensor(_bits(HEADS, 2, 16, 32)),
            "scale": 0.1,
            "parallel": serial(2),
            "error": Error(),
        },
    )


def _report() -> ctypes.Array:
    report = (c_char * library().amxk_cpu_report_size())()
    library().amxk_detect(None, report)
    return report


#: Every function that takes arguments, with right ones. Several rows where a function has several ways.
CALLS: dict[str, Callable[[], Case]] = {
    "set_num_threads": lambda: Case(
        "amxk_set_num_threads", {"num_threads": library().amxk_get_num_threads(), "error": Error()}
    ),
    "packed_sizes": packed_sizes_case,
    "convert_weight_packed": pack_case,
    "bmm": bmm_case,
    "bmm-packed": lambda: bmm_case(True),
    "concat_and_cache_mla": concat_case,
    "plan_attention": plan_case,
    "plan_attention-size": lambda: plan_case(False),
    "plan_attention-int32": lambda: plan_case(index="int32"),
    "attention": attention_case,
    "attention-int32": lambda: attention_case("int32"),
    "attention-planned": lambda: attention_case(planned=True),
    "prefill_attention": prefill_case,
    "prefill_attention-int32": lambda: prefill_case("int32"),
    "prefill_decompressed": lambda: Case(
        "amxk_prefill_decompressed", {"query": 5, "keys": 9, "decompressed": c_int(), "error": Error()}
    ),
    "cpu_feature_name": lambda: Case("amxk_cpu_feature_name", {"i": 0}),
    "detect": lambda: Case("amxk_detect", {"probes": None, "report": _report()}),
    "tier_info": lambda: Case(
        "amxk_tier_info", {"report": _report(), "tier": 0, "status": (c_char * 4096)(), "error": Error()}
    ),
    "best_tier": lambda: Case("amxk_best_tier", {"report": _report()}),
    "resolve_tier": lambda: Case(
        "amxk_resolve_tier", {"probes": None, "name": b"portable", "emulated": 0, "tier": c_int(), "error": Error()}
    ),
    "current_tier": lambda: Case("amxk_current_tier", {"error": Error()}),
    "set_tier": lambda: Case("amxk_set_tier", {"name": library_tier(), "emulated": 0, "error": Error()}),
    "explain": lambda: Case("amxk_explain", {"report": _report(), "buffer": (c_char * 4096)(), "size": 4096}),
}


def library_tier() -> bytes:
    return isa.current().encode()


def spoiled_tensors(t: Tensor, required: bool) -> Iterator[tuple[str, Tensor | None]]:
    """The descriptor with one field wrong; every one of them must be refused."""

    def changed(**fields: Any) -> Tensor:
        c = Tensor.from_buffer_copy(t)
        c.keep = t.keep
        for name, value in fields.items():
            setattr(c, name, value)
        return c

    def at(field: str, d: int, value: int) -> Tensor:
        c = changed()
        getattr(c, field)[d] = value
        return c

    if required:
        yield "null", None
    yield "data=null", changed(data=None)
    yield "data+1", changed(data=t.data + 1)
    for dtype in (-1, 4, 5, 99, I32_MIN, I32_MAX):
        yield f"dtype={dtype}", changed(dtype=dtype)
    for ndim in (-1, -2, 5, MAX_DIMS, MAX_DIMS + 1, 1000, I32_MIN, I32_MAX):
        yield f"ndim={ndim}", changed(ndim=ndim)
    for d in range(t.ndim):
        for size in (-1, I64_MIN, I64_MAX, 2**61):
            yield f"size({d})={size}", at("sizes", d, size)
        if t.sizes[d] > 1:
            for stride in (I64_MIN, I64_MAX, 2**61, -(2**61)):
                yield f"stride({d})={stride}", at("strides", d, stride)
            if t.dtype < 2 and d == t.ndim - 1:
                for stride in (-1, 0, 2):
                    yield f"stride({d})={stride}", at("strides", d, stride)


def spoiled_values(name: str, t: Tensor, bounded: bool) -> Iterator[tuple[str, Tensor]]:
    """Lengths, starts, block ids and slots that cannot be; every one of them must be refused.

    A plan is made for any length a cache could have; attention knows the cache.
    """
    wrong = {
        "seq_lens": [-1, I32_MIN, 2**41, I64_MIN, I64_MAX] + ([I32_MAX, 2**33] if bounded else []),
        "query_start_loc": [-1, 1000, I32_MIN, I32_MAX, I64_MIN, I64_MAX],
        "block_table": [-1, 5, I32_MIN, I32_MAX, I64_MIN, I64_MAX],
        "slot_mapping": [48, I32_MAX, I64_MAX],
    }.get(name)
    if wrong is None:
        return
    info = np.iinfo(t.keep.dtype)
    for value in wrong:
        if not info.min <= value <= info.max:
            continue
        for at in np.ndindex(t.keep.shape):
            if name == "block_table" and at == (0, 2):
                continue  # past the request's length: never looked at
            array = t.keep.copy()
            array[at] = value
            yield f"{list(at)}={value}", tensor(array)


OPTIONAL = {"lse", "query_start_loc", "plan", "scale"}
#: Functions that know the cache, so a length beyond it is wrong; the second one needs query_start_loc.
OVER_A_CACHE = ("amxk_attention", "amxk_prefill_attention")
SCALARS: dict[str, list[Any]] = {
    "scale": [0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e39],
    "num_tokens": [-1, 4, I64_MIN, I64_MAX],
    "num_heads": [-1, 0, I64_MIN, I64_MAX, 2**40],
    "num_threads": [-1, 0, I32_MIN, I32_MAX],
    "query": [-1, I64_MIN],
    "keys": [-1, 4, I64_MIN],
    "decompressed": [None],
    "tier": [-1, 5, I32_MIN, I32_MAX],
    "sizes": [None],
    "plan_size": [None],
    "status": [None],
    "name": [b"", b"\xff\xfe", b"%s%n%s%n", b"x" * 100000],
}


def mutations(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """One spoiled argument each, all to be refused with AMXK_INVALID_ARGUMENT (or -1 for a tier)."""
    for name, value in case.arguments.items():
        if isinstance(value, Tensor):
            required = name not in OPTIONAL or (name, case.function) == ("query_start_loc", OVER_A_CACHE[1])
            for what, spoiled in spoiled_tensors(value, required):
                yield f"{name} {what}", {name: spoiled}
            for what, spoiled in spoiled_values(name, value, case.function in OVER_A_CACHE):
                yield f"{name}{what}", {name: spoiled}
        elif name in SCALARS and not (name == "name" and value is None):
            for wrong in SCALARS[name]:
                if name == "tier" and not isinstance(value, int):
                    continue
                if name == "name" and wrong == b"":
                    continue  # "none given"
                if wrong is None or not isinstance(value, Tensor):
                    yield f"{name}={wrong!r:.40}", {name: wrong}
    if "tier" in case.arguments and not isinstance(case.arguments["tier"], int):
        yield "tier=null", {"tier": None}


#: Calls that have no status: they must come back, whatever they return.
HARMLESS: dict[str, list[dict[str, Any]]] = {
    "amxk_cpu_feature_name": [{"i": i} for i in (-1, 11, 64, I32_MIN, I32_MAX)],
    "amxk_detect": [{"report": None}],
    "amxk_best_tier": [{"report": None}, {"report": (c_char * 4096)(*b"\xff" * 4096)}],
    "amxk_current_tier": [{"error": None}],
    "amxk_explain": [
        {"buffer": None},
        {"buffer": None, "size": 0},
        {"size": 1},
        {"report": None},
        {"report": (c_char * 4096)(*b"\xff" * 4096)},
    ],
    "amxk_tier_info": [{"report": None}, {"report": (c_char * 4096)(*b"\xff" * 4096)}],
}


def tolerated(case: Case) -> Iterator[tuple[str, dict[str, Any]]]:
    """Odd arguments that the headers allow: the call must come back with AMXK_OK."""
    if "error" in case.arguments and case.function != "amxk_current_tier":
        yield "error=null", {"error": None}
    for name in OPTIONAL & set(case.arguments):
        if isinstance(case.arguments[name], Tensor) and name in ("lse", "plan") and case.function in OVER_A_CACHE:
            yield f"{name}=null", {name: None}
    if isinstance(case.arguments.get("scale"), Tensor):
        yield "scale=null", {"scale": None}
    if "parallel" in case.arguments:
        yield "parallel=null", {"parallel": None}
        yield "run=null", {"parallel": Parallel(8, None)}
        for n in (I32_MIN, -1, 0, 1, 7, I32_MAX):
            yield f"num_threads={n}", {"parallel": serial(n)}
