# SPDX-License-Identifier: Apache-2.0
"""The Python module: without torch, with every way of holding bfloat16, in threads and after fork."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading as python_threads
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
from calls import attend

import amx_kernels
from mla_testing import bf16
from mla_testing.cases import AttentionCase, BmmCase, ConcatCase

CASE = AttentionCase(16, (33, 300, 5), query_lens=(3, 1, 5), block_size=16)


def run(program: str, **environment: str) -> str:
    """Output of a program in a fresh interpreter that can import what this one can."""
    paths = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_torch():
    """Importing and computing needs no torch, even if it is installed and broken."""
    program = """
        import sys
        sys.modules["torch"] = None  # any import of torch now raises ImportError
        import amx_kernels
        from mla_testing import cases
        data = cases.AttentionCase(16, (5, 40), block_size=16).build()
        arguments = (data.out, data.lse, data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens)
        amx_kernels.decode_attention_cpu(*arguments, data.scale)
        data.check()
        data = cases.BmmCase(2, 5, 40, 64).build()
        amx_kernels.bmm_cpu(data.out, data.mat1, amx_kernels.convert_weight_packed(data.mat2), True)
        data.check()
        print(sorted(name for name in sys.modules if name == "torch" or name.startswith("torch.")))
    """
    assert run(program) == "['torch']\n"


def test_torch_is_not_imported_where_it_is_installed():
    assert run("import sys, amx_kernels.ops; print('torch' in sys.modules)") == "False\n"


def test_the_torch_module_says_that_torch_is_missing():
    program = """
        import sys
        sys.modules["torch"] = None
        try:
            import amx_kernels.torch
        except ImportError as error:
            print("torch" in str(error))
    """
    assert run(program) == "True\n"


def test_tiers_can_be_listed_without_numpy():
    """What doctor needs works in the barest of environments."""
    program = """
        import sys
        sys.modules["numpy"] = None
        import amx_kernels
        print(len(amx_kernels.isa.tiers()))
        try:
            amx_kernels.bmm_cpu
        except ImportError as error:
            print("numpy" in str(error))
    """
    assert run(program) == "5\nTrue\n"


def test_every_function_is_there():
    for name in amx_kernels.__all__:
        assert getattr(amx_kernels, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'flash_attention'"):
        amx_kernels.flash_attention  # noqa: B018  (the access is the test)


def test_ml_dtypes_arrays_are_the_same_bits(tier):
    data, other = CASE.build(), CASE.build()
    attend(data)
    names = [f.name for f in fields(other) if getattr(getattr(other, f.name), "dtype", None) == np.uint16]
    attend(replace(other, **{name: getattr(other, name).view(ml_dtypes.bfloat16) for name in names}))
    other.check()
    np.testing.assert_array_equal(data.out, other.out)


def test_packing_keeps_the_type_it_was_given():
    weight = BmmCase(2, 1, 50, 70).build().mat2
    packed = amx_kernels.convert_weight_packed(weight.view(ml_dtypes.bfloat16))
    assert packed.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(packed.view(np.uint16), amx_kernels.convert_weight_packed(weight))


class Exported:
    """An array of some other library: all it has is DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **arguments):
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_dlpack(tier):
    """Inputs and metadata by DLPack are used in place, outputs too."""
    data = CASE.build()
    names = ("q_latent", "q_pe", "kv_cache", "block_table", "seq_lens", "query_start_loc")
    attend(replace(data, **{name: Exported(getattr(data, name)) for name in names}))
    data.check()


def test_torch_tensors(tier):
    """Tensors go through the Python module as well, bfloat16 included, and are written in place."""
    pytest.importorskip("torch")
    data = CASE.build()
    attend(data.torch(), ops=amx_kernels)
    data.check()
    product = BmmCase(2, 17, 40, 64).build()
    tensors = product.torch()
    amx_kernels.bmm_cpu(tensors.out, tensors.mat1, amx_kernels.convert_weight_packed(tensors.mat2), True)
    product.check()
    cached = ConcatCase(20).build()
    tensors = cached.torch()
    amx_kernels.concat_and_cache_mla_cpu(tensors.kv_c, tensors.k_pe, tensors.kv_cache, tensors.slot_mapping)
    cached.check()


@pytest.mark.parametrize("count", [0, -1, 5000])
def test_wrong_thread_counts_are_refused(threads, count):
    before = amx_kernels.get_num_threads()
    with pytest.raises(ValueError, match=f"num_threads is {count}, expected between 1 and 4096"):
        amx_kernels.set_num_threads(count)
    assert amx_kernels.get_num_threads() == before


def test_threads_default_to_the_cpus_allowed():
    program = """
        import os, amx_kernels
        allowed = sorted(os.sched_getaffinity(0))[:1]
        os.sched_setaffinity(0, allowed)
        print(amx_kernels.get_num_threads())
    """
    assert run(program) == "1\n"


def test_calls_from_several_python_threads(tier, threads):
    """Calls release the GIL and share one pool; each gives its own right result."""
    amx_kernels.set_num_threads(3)
    built = [AttentionCase(16, (40 * i + 1, 600), block_size=16, seed=i).build() for i in range(6)]
    failures: list[BaseException] = []

    def work(data):
        try:
            for _ in range(3):
                data.out[...] = bf16.NAN
                attend(data)
                data.check()
        except BaseException as failure:
            failures.append(failure)

    workers = [python_threads.Thread(target=work, args=(data,)) for data in built]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures[0]


def test_after_fork():
    """A pool does not survive fork; the child gets its own."""
    program = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import amx_kernels
        from mla_testing import cases
        amx_kernels.set_num_threads(3)
        def check():
            data = cases.AttentionCase(16, (700, 900), block_size=16).build()
            arguments = (data.out, data.lse, data.q_latent, data.q_pe, data.kv_cache, data.block_table, data.seq_lens)
            amx_kernels.decode_attention_cpu(*arguments, data.scale)
            data.check()
        check()
        child = os.fork()
        if child == 0:
            check()
            os._exit(7)
        _, status = os.waitpid(child, 0)
        check()
        print(os.waitstatus_to_exitcode(status))
    """
    assert run(program) == "7\n"


def test_more_dimensions_than_any_argument_has():
    data = CASE.build()
    with pytest.raises(ValueError, match="out has 9 dimensions, expected at most 8"):
        attend(replace(data, out=data.out[None, None, None, None, None, None]))


def test_strides_between_elements_are_refused():
    """A bfloat16 view at odd bytes has no stride in elements."""
    raw = np.zeros(2 * 5 * 129, np.uint8)
    odd = np.ndarray((2, 5, 64), np.uint16, raw, strides=(645, 129, 2))
    out = np.zeros((2, 5, 16), np.uint16)
    with pytest.raises(ValueError, match="mat1 has a stride of 645 bytes in dimension 0, expected a multiple of its 2"):
        amx_kernels.bmm_cpu(out, odd, np.zeros((2, 16, 64), np.uint16), False)


def test_misaligned_arrays_are_refused():
    raw = np.zeros(2 * 5 * 64 * 2 + 1, np.uint8)
    odd = raw[1:].view(np.uint16).reshape(2, 5, 64)
    out = np.zeros((2, 5, 16), np.uint16)
    with pytest.raises(ValueError, match=r"mat1 starts at address 0x[0-9a-f]+, expected a multiple of 2"):
        amx_kernels.bmm_cpu(out, odd, np.zeros((2, 16, 64), np.uint16), False)


def test_big_endian_arrays_are_refused():
    data = CASE.build()
    for name, expected in (("seq_lens", "int32 or int64"), ("q_pe", "bfloat16"), ("lse", "float32")):
        array = getattr(data, name)
        with pytest.raises(ValueError, match=f"{name} is >.*, expected {expected}"):
            attend(replace(data, **{name: array.astype(array.dtype.newbyteorder(">"))}))
