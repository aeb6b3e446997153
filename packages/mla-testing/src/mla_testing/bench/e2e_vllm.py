# SPDX-License-Identifier: Apache-2.0
"""What an engine under measurement is given through vLLM's own seams: random weights, and contexts that exist already.

vLLM's dummy weights are all of one tiny size, norms included, so that every logit is nearly the same and no two
backends can be compared by their tokens. :class:`RandomWeights` scales matrices by their inputs, as trained ones are.

Measuring decode at long context would take minutes of prefill per sample. :class:`FilledContext`, a KV connector, says
of requests that ask for it that all but the last prompt token are in the cache; the rows there are random.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

__all__ = ["FILLED", "LOAD_FORMAT", "FilledContext", "RandomWeights", "kv_transfer_config"]

LOAD_FORMAT = "mla_bench_random"
#: ``SamplingParams.extra_args`` of a request whose context counts as computed.
FILLED = {"kv_transfer_params": {"filled_context": True}}
#: Queries longer than by their inputs' scale make attention pick out few keys, as trained models do.
_QUERY_SCALE = 3.0


@register_model_loader(LOAD_FORMAT)
class RandomWeights(BaseModelLoader):
    """Weights that depend on their names and shapes alone: equal in every engine of one model."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to download."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Norms 1, biases 0, embeddings of unit size, matrices [.., out, in] uniform with variance 1 / in."""
        generator = torch.Generator().manual_seed(20240507)
        for name, weight in sorted(model.named_parameters()):
            if not weight.is_floating_point():
                continue
            if weight.dim() < 2:
                weight.data.fill_(0.0 if "bias" in name else 1.0)
                continue
            deviation = 1.0 if "embed_tokens" in name else weight.shape[-1] ** -0.5
            if "q_proj" in name or "q_b_proj" in name:
                deviation *= _QUERY_SCALE
            bound = math.sqrt(3.0) * deviation
            weight.data.uniform_(-bound, bound, generator=generator)


def kv_transfer_config() -> dict[str, str]:
    """The engine argument that installs :class:`FilledContext`."""
    return {"kv_connector": "FilledContext", "kv_role": "kv_both", "kv_connector_module_path": __name__}


class FilledContext(KVConnectorBase_V1):
    """A connector that transfers nothing: the cache is filled once, at start, and requests may count on it."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Latent rows are normalised in a model: unit variance."""
        generator = torch.Generator().manual_seed(1)
        for cache in kv_caches.values():
            cache.normal_(generator=generator)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All but the last token, for requests that ask for it."""
        asked = (request.kv_transfer_params or {}).get("filled_context", False)
        return (max(0, request.num_tokens - 1 - num_computed_tokens) if asked else 0), False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
