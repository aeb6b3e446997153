# SPDX-License-Identifier: Apache-2.0
"""``import amx_kernels.torch`` registers ``torch.ops.amx_kernels.*``, with fakes for torch.compile.

The ops and their schemas are those of :mod:`amx_kernels.ops`; threads are torch's. Errors are RuntimeError.
"""

from __future__ import annotations

from pathlib import Path

import torch

from amx_kernels import isa


def _load() -> None:
    library = Path(__file__).with_name("_torch.so")
    if not library.exists():
        raise ImportError(
            "amx_kernels was built without torch. Install torch, then build again with: "
            "pip install --no-build-isolation amx-kernels"
        )
    isa._library()  # what the shim links to, loaded first: if it is missing or broken, this says so
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise ImportError(
            f"amx_kernels' torch shim needs torch 2.10 or newer, found {torch.__version__}: {error}"
        ) from error


_load()


def _one_device(**tensors: torch.Tensor | None) -> None:
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    first = next(iter(devices.items()))
    for name, device in devices.items():
        if device != first[1]:
            raise RuntimeError(f"{name} is on {device}, expected {first[1]} like {first[0]}")


@torch.library.register_fake("amx_kernels::convert_weight_packed")
def _(weight):
    n, out_features, in_features = weight.shape
    return weight.new_empty((n, (out_features + 15) // 16, (in_features + 31) // 32 * 16, 32))


@torch.library.register_fake("amx_kernels::bmm_cpu")
def _(out, mat1, mat2, is_vnni, scale=None):
    _one_device(out=out, mat1=mat1, mat2=mat2, scale=scale)


@torch.library.register_fake("amx_kernels::concat_and_cache_mla_cpu")
def _(kv_c, k_pe, kv_cache, slot_mapping):
    _one_device(kv_c=kv_c, k_pe=k_pe, kv_cache=kv_cache, slot_mapping=slot_mapping)


@torch.library.register_fake("amx_kernels::plan_attention")
def _(seq_lens, query_start_loc, num_tokens, num_heads, num_threads):
    _one_device(seq_lens=seq_lens, query_start_loc=query_start_loc)
    size = torch.library.get_ctx().new_dynamic_size()
    return seq_lens.new_empty((size,), dtype=torch.int64)


@torch.library.register_fake("amx_kernels::decode_attention_cpu")
def _(out, lse, q_latent, q_pe, kv_cache, block_table, seq_lens, scale, plan=None):
    _one_device(out=out, lse=lse, q_latent=q_latent, q_pe=q_pe, kv_cache=kv_cache)
    _one_device(out=out, block_table=block_table, seq_lens=seq_lens, plan=plan)


@torch.library.register_fake("amx_kernels::extend_attention_cpu")
def _(out, lse, q_latent, q_pe, kv_cache, block_table, seq_lens, query_start_loc, scale, plan=None):
    _one_device(out=out, lse=lse, q_latent=q_latent, q_pe=q_pe, kv_cache=kv_cache)
    _one_device(out=out, block_table=block_table, seq_lens=seq_lens, query_start_loc=query_start_loc, plan=plan)


@torch.library.register_fake("amx_kernels::prefill_attention_cpu")
def _(out, lse, q_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, w_uk, w_uv, scale):
    _one_device(out=out, lse=lse, q_nope=q_nope, q_pe=q_pe, kv_cache=kv_cache, w_uk=w_uk, w_uv=w_uv)
    _one_device(out=out, block_table=block_table, seq_lens=seq_lens, query_start_loc=query_start_loc)
