# SPDX-License-Identifier: Apache-2.0
"""Bad arguments: one exception that names the argument, its value and what was expected, and nothing written.

Every row of the tables runs from NumPy (ValueError) and from torch (RuntimeError).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from calls import torch_ops
from numpy.lib.stride_tricks import as_strided

import amx_kernels
from mla_testing import bf16, cases

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Mistake:
    """A change to one right argument, and what must be said about it."""

    name: str
    change: Callable[[Any], Any]
    says: str
    label: str
    #: Only where the mistake can be made at all.
    frontends: tuple[str, ...] = ("numpy", "torch")

    @property
    def id(self) -> str:
        return f"{self.name}-{self.label}"


def with_value(index: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return change


def gapped(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 2, axis=-1)[..., ::2]


def overlapping(dim: int) -> Callable[[np.ndarray], np.ndarray]:
    """The first element of this dimension seen over and over."""

    def change(array: np.ndarray) -> np.ndarray:
        strides = list(array.strides)
        strides[dim] = 0
        return as_strided(array, array.shape, strides)

    return change


def longer(dim: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: np.concatenate([array, array.take([0], axis=dim)], axis=dim)


def tensor_mistakes(
    name: str, sizes: list[int], dtype: str, wrong: str, *, free: tuple[int, ...] = ()
) -> list[Mistake]:
    """What can be wrong with any tensor: type, dimensions, last stride, sizes (but for ``free`` ones)."""
    ndim = len(sizes)
    mistakes = [
        Mistake(name, lambda a: np.ones(a.shape, wrong), rf"{name} is {wrong}, expected {dtype}", wrong),
        Mistake(name, lambda a: np.ones(a.shape), rf"{name} is (float64|Double), expected {dtype}", "float64"),
        Mistake(name, lambda a: a[None], rf"{name} has {ndim + 1} dimensions, expected {ndim}", "more-dims"),
        Mistake(
            name,
            lambda a: a[:1].reshape(a.shape[1:]),
            rf"{name} has {ndim - 1} dimensions, expected {ndim}",
            "fewer-dims",
        ),
    ]
    if dtype in ("bfloat16", "float32"):
        last = ndim - 1
        mistakes.append(
            Mistake(name, gapped, rf"{name}\.stride\({last}\) is 2, expected a contiguous last dimension", "gapped")
        )
    for dim, size in enumerate(sizes):
        if dim not in free:
            # Which of two sizes that do not match is wrong nobody knows: the message may name either.
            size_of = r"\w+\.size\(\d\) is \d+, expected (\d+|P of q_pe \(\d+\) and a multiple of 32)"
            says = size_of + r"|expected the same number|has \d+ entries, expected"
            mistakes.append(Mistake(name, longer(dim), says, f"size{dim}-{size + 1}"))
    return mistakes


def output_mistakes(name: str, ndim: int) -> list[Mistake]:
    return [
        Mistake(
            name, overlapping(dim), rf"{name} overlaps itself: stride\({dim}\) is 0, expected at least", f"overlap{dim}"
        )
        for dim in range(ndim - 1)
    ] + [Mistake(name, read_only, rf"{name} is read-only, expected writable", "read-only", ("numpy",))]


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def not_an_array(name: str) -> Mistake:
    return Mistake(name, lambda a: a.tolist(), rf"{name} is <class 'list'>, expected a NumPy array", "list", ("numpy",))


def scale_mistakes() -> list[Mistake]:
    return [
        Mistake("scale", lambda _, v=value: v, rf"scale is {text}, expected a finite float32 above 0", text)
        for value, text in ((-1.0, "-1"), (0.0, "0"), (float("nan"), "-?nan"), (float("inf"), "inf"))
    ]


CASE = cases.AttentionCase(2, (20, 7), query_lens=(2, 2), block_size=16, index_dtype="int64")


def attention_arrays() -> Arrays:
    data = CASE.build()
    names = ("out", "lse", "q_latent", "q_pe", "kv_cache", "block_table", "seq_lens", "query_start_loc", "scale")
    return {name: getattr(data, name) for name in names} | {"plan": None}


DECODE_MISTAKES = [
    *tensor_mistakes("out", [4, 2, 512], "bfloat16", "float32"),
    *tensor_mistakes("lse", [4, 2], "float32", "int32"),
    *tensor_mistakes("q_latent", [4, 2, 512], "bfloat16", "float32"),
    *tensor_mistakes("q_pe", [4, 2, 64], "bfloat16", "float32"),
    *tensor_mistakes("kv_cache", [6, 16, 576], "bfloat16", "float32", free=(0, 1)),
    *tensor_mistakes("block_table", [2, 4], "int32 or int64", "float32", free=(1,)),
    *tensor_mistakes("seq_lens", [2], "int32 or int64", "float32"),
    *output_mistakes("out", 3),
    *output_mistakes("lse", 2),
    *scale_mistakes(),
    *(not_an_array(name) for name in ("out", "q_latent", "kv_cache", "block_table", "seq_lens")),
    Mistake(
        "kv_cache", lambda a: a[:, :0], r"kv_cache\.size\(1\) is 0, expected a block size of at least 1", "no-rows"
    ),
    Mistake("q_latent", lambda a: a[:, :0], r"q_latent\.size\(1\) is 0, expected between 1 and", "no-heads"),
    Mistake("q_latent", lambda a: a[..., :0], r"q_latent\.size\(2\) is 0, expected between 1", "no-width"),
    Mistake("seq_lens", with_value(1, -1), r"seq_lens\[1\] is -1, expected between 0 and \d+", "negative"),
    Mistake("seq_lens", with_value(1, 1), r"seq_lens\[1\] is 1, expected 0 or at least the request's 2", "short"),
    Mistake("seq_lens", with_value(0, 65), r"seq_lens\[0\] is 65, expected at most 64 \(block_table", "long"),
    Mistake("seq_lens", with_value(0, 2**62), r"seq_lens\[0\] is \d+, expected between 0 and \d+", "huge"),
    Mistake("block_table", with_value((0, 1), -1), r"block_table\[0, 1\] is -1, expected between 0 and \d", "negative"),
    Mistake("block_table", with_value((0, 0), 6), r"block_table\[0, 0\] is 6, expected between 0 and 5", "beyond"),
    Mistake("block_table", with_value((1, 0), 2**40), r"block_table\[1, 0\] is 1099511627776, expected", "huge"),
    Mistake("block_table", lambda a: a[:, :1], r"seq_lens\[0\] is 20, expected at most 16 \(block_table", "narrow"),
    Mistake("kv_cache", lambda a: a[:1], r"block_table\[\d, \d\] is \d, expected between 0 and 0", "few-blocks"),
    Mistake("plan", lambda _: np.zeros(40, np.int64), "plan is not an intact result of plan_attention", "zeros"),
    Mistake("plan", lambda _: np.zeros(40, np.float32), "plan is float32, expected int64", "float32"),
]

EXTEND_MISTAKES = [
    *DECODE_MISTAKES,
    *tensor_mistakes("query_start_loc", [3], "int32 or int64", "float32"),
    Mistake("query_start_loc", with_value(0, 1), r"query_start_loc\[0\] is 1, expected 0", "first"),
    Mistake("query_start_loc", with_value(1, -1), r"query_start_loc\[1\] is -1, expected between 0", "negative"),
    Mistake("query_start_loc", with_value(1, 5), r"query_start_loc\[1\] is 5, expected between 0 .* and 4", "beyond"),
    Mistake("query_start_loc", with_value(2, 1), r"query_start_loc\[2\] is 1, expected between 2", "falling"),
]


def prefill_arrays() -> Arrays:
    arrays = attention_arrays()
    rng = np.random.default_rng(2)
    weights = (bf16.from_float(rng.standard_normal((2, width, 512))) for width in (96, 80))
    w_uk, w_uv = map(amx_kernels.convert_weight_packed, weights)
    queries = {"q_nope": bf16.from_float(rng.standard_normal((4, 2, 96))), "q_pe": arrays["q_pe"]}
    rest = {name: arrays[name] for name in ("kv_cache", "block_table", "seq_lens", "query_start_loc")}
    outputs = {"out": np.full((4, 2, 80), bf16.NAN), "lse": arrays["lse"]}
    return {**outputs, **queries, **rest, "w_uk": w_uk, "w_uv": w_uv, "scale": arrays["scale"]}


PREFILL_MISTAKES = [
    *(m for m in EXTEND_MISTAKES if m.name not in ("q_latent", "plan")),
    *tensor_mistakes("q_nope", [4, 2, 96], "bfloat16", "float32"),
    *tensor_mistakes("w_uk", [2, 6, 256, 32], "bfloat16", "float32"),
    *tensor_mistakes("w_uv", [2, 5, 256, 32], "bfloat16", "float32"),
    *(not_an_array(name) for name in ("q_nope", "q_pe", "query_start_loc", "w_uk", "w_uv")),
]


def bmm_arrays(packed: bool) -> Arrays:
    rng = np.random.default_rng(1)
    mat1, weight = (bf16.from_float(rng.standard_normal(shape)) for shape in ((2, 5, 64), (2, 40, 64)))
    mat2 = amx_kernels.convert_weight_packed(weight) if packed else weight
    out = np.full((2, 5, 40), bf16.NAN)
    return {"out": out, "mat1": mat1, "mat2": mat2, "is_vnni": packed, "scale": np.ones(2, np.float32)}


BMM_MISTAKES = [
    *tensor_mistakes("out", [2, 5, 40], "bfloat16", "float32"),
    *tensor_mistakes("mat1", [2, 5, 64], "bfloat16", "float32"),
    *tensor_mistakes("mat2", [2, 40, 64], "bfloat16", "float32"),
    *output_mistakes("out", 3),
    *(not_an_array(name) for name in ("out", "mat1", "mat2", "scale")),
    Mistake("scale", lambda a: a.astype("int32"), "scale is int32, expected float32", "int32"),
    Mistake("scale", lambda a: a[None], "scale has 2 dimensions, expected 0 or 1", "more-dims"),
    Mistake("scale", lambda a: np.ones(3, np.float32), r"scale\.size\(0\) is 3, expected 1 or 2 \(N\)", "size3"),
    Mistake("mat1", lambda a: a[..., :0], r"mat1\.size\(2\) is 0, expected at least 1", "no-depth"),
]

PACKED_MISTAKES = [
    *tensor_mistakes("mat2", [2, 3, 32, 32], "bfloat16", "float32"),
    Mistake("mat2", lambda a: np.ascontiguousarray(a.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3),
            r"mat2\.stride\(1\) is 2048, expected 1024: packed weights are contiguous", "strided"),
    Mistake("mat2", lambda a: a[:, 0], "mat2 has 3 dimensions, expected 4", "plain"),
]  # fmt: skip

PACK_MISTAKES = [
    *tensor_mistakes("weight", [2, 40, 64], "bfloat16", "float32", free=(0, 1, 2)),
    Mistake("weight", lambda a: a[..., :0], r"weight\.size\(2\) is 0, expected at least 1", "no-depth"),
]


def concat_arrays() -> Arrays:
    data = cases.ConcatCase(5, skipped=False).build()
    return {name: getattr(data, name) for name in ("kv_c", "k_pe", "kv_cache", "slot_mapping")}


CONCAT_MISTAKES = [
    *tensor_mistakes("kv_c", [5, 512], "bfloat16", "float32"),
    *(m for m in tensor_mistakes("k_pe", [5, 64], "bfloat16", "float32") if m.label != "more-dims"),
    Mistake("k_pe", lambda a: np.stack([a, a], 1), r"k_pe\.size\(1\) is 2, expected 1 \(one key head\)", "two-heads"),
    *tensor_mistakes("kv_cache", [3, 16, 576], "bfloat16", "float32", free=(0, 1)),
    *tensor_mistakes("slot_mapping", [5], "int32 or int64", "float32"),
    *output_mistakes("kv_cache", 3),
    *(not_an_array(name) for name in ("kv_c", "k_pe", "kv_cache", "slot_mapping")),
    Mistake("slot_mapping", with_value(3, 48), r"slot_mapping\[3\] is 48, expected below 48", "beyond"),
    Mistake("slot_mapping", with_value(4, 2**40), r"slot_mapping\[4\] is 1099511627776, expected below 48", "huge"),
    Mistake(
        "kv_cache", lambda a: a[:, :0], r"kv_cache\.size\(1\) is 0, expected a block size of at least 1", "no-rows"
    ),
]


def decode_arrays() -> Arrays:
    return {name: value for name, value in attention_arrays().items() if name != "query_start_loc"}


TABLES: dict[str, tuple[str, Callable[[], Arrays], list[Mistake]]] = {
    "decode": ("decode_attention_cpu", decode_arrays, DECODE_MISTAKES),
    "extend": ("extend_attention_cpu", attention_arrays, EXTEND_MISTAKES),
    "prefill": ("prefill_attention_cpu", prefill_arrays, PREFILL_MISTAKES),
    "bmm": ("bmm_cpu", lambda: bmm_arrays(False), BMM_MISTAKES),
    "bmm-packed": ("bmm_cpu", lambda: bmm_arrays(True), PACKED_MISTAKES),
    "pack": ("convert_weight_packed", lambda: {"weight": bmm_arrays(False)["mat2"]}, PACK_MISTAKES),
    "concat": ("concat_and_cache_mla_cpu", concat_arrays, CONCAT_MISTAKES),
}
OUTPUTS = ("out", "lse", "kv_cache")

ROWS = [
    pytest.param(table, mistake, frontend, id=f"{table}-{mistake.id}-{frontend}")
    for table, (_, _, mistakes) in TABLES.items()
    for mistake in mistakes
    for frontend in mistake.frontends
]


def call(frontend: str, op: str, arrays: Arrays) -> None:
    if frontend == "numpy":
        getattr(amx_kernels, op)(*arrays.values())
        return
    ops = torch_ops()
    tensors = [cases.as_torch(value) if isinstance(value, np.ndarray) else value for value in arrays.values()]
    getattr(ops, op)(*tensors)


@pytest.mark.parametrize(("table", "mistake", "frontend"), ROWS)
def test_one_mistake(table, mistake, frontend):
    op, make, _ = TABLES[table]
    arrays = make()
    arrays[mistake.name] = mistake.change(arrays[mistake.name])
    before = {name: arrays[name].copy() for name in OUTPUTS if isinstance(arrays.get(name), np.ndarray)}
    kinds = (ValueError, TypeError) if frontend == "numpy" else RuntimeError
    with pytest.raises(kinds) as caught:
        call(frontend, op, arrays)
    message = str(caught.value)
    assert re.search(mistake.says, message), message
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    if isinstance(caught.value, TypeError) or "read-only" in message:
        assert message.startswith(f"{mistake.name} is ")
    else:
        assert message.startswith(f"{op}: ")
    for name, value in before.items():
        assert arrays[name].tobytes() == value.tobytes(), f"{name} was written"


@pytest.mark.parametrize("frontend", ["numpy", "torch"])
@pytest.mark.parametrize("table", TABLES)
def test_the_right_arguments_are_accepted(table, frontend):
    """Each table starts from a call that works: its mistakes are the only ones."""
    op, make, _ = TABLES[table]
    call(frontend, op, make())


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_query_tokens_must_divide_among_requests(op):
    arrays = attention_arrays()
    for name in ("out", "lse", "q_latent", "q_pe"):
        arrays[name] = arrays[name][:3]
    if op == "decode":
        del arrays["query_start_loc"]
        with pytest.raises(ValueError, match="3 query tokens for 2 requests in seq_lens, expected the same number"):
            amx_kernels.decode_attention_cpu(*arrays.values())
    else:
        with pytest.raises(ValueError, match=r"query_start_loc\[2\] is 4, expected between 2 .* and 3 \(tokens\)"):
            amx_kernels.extend_attention_cpu(*arrays.values())


def test_start_locations_are_needed_for_extend():
    arrays = attention_arrays() | {"query_start_loc": None}
    with pytest.raises(ValueError, match=r"query_start_loc is None, expected \[num_reqs \+ 1\]"):
        amx_kernels.extend_attention_cpu(*arrays.values())


def test_requests_without_new_tokens_need_no_blocks():
    """Block ids of a request that asks for nothing are not looked at."""
    data = cases.AttentionCase(2, (20, 7), query_lens=(2, 0), index_dtype="int64").build()
    data.block_table[1] = -1
    amx_kernels.extend_attention_cpu(
        data.out, data.lse, data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens,
        data.query_start_loc, data.scale,
    )  # fmt: skip
    data.check()


META = [
    pytest.param(table, name, id=f"{table}-{name}")
    for table, (_, make, _) in TABLES.items()
    for name, value in make().items()
    if isinstance(value, np.ndarray) and len([v for v in make().values() if isinstance(v, np.ndarray)]) > 1
] + [pytest.param("decode", "plan", id="decode-plan"), pytest.param("extend", "plan", id="extend-plan")]


@pytest.mark.parametrize(("table", "name"), META)
def test_mixed_devices(table, name):
    """One tensor on another device, whichever it is, never passes for a call that did something."""
    ops = torch_ops()
    op, make, _ = TABLES[table]
    arrays = make()
    before = {key: arrays[key].copy() for key in OUTPUTS if isinstance(arrays.get(key), np.ndarray)}
    tensors = {key: cases.as_torch(v) if isinstance(v, np.ndarray) else v for key, v in arrays.items()}
    if name == "plan":
        tensors["plan"] = cases.as_torch(np.zeros(40, np.int64))
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(RuntimeError, match=r"\w+ is on (meta, expected cpu|cpu, expected meta) like \w+"):
        getattr(ops, op)(*tensors.values())
    for key, value in before.items():
        assert arrays[key].tobytes() == value.tobytes()
