# SPDX-License-Identifier: Apache-2.0
"""The model behind the tiny checkpoints as it is trained: DeepSeek-V2's architecture with narrow spaces.

See ``checkpoints`` for the ideas. A model is trained on the circle of ``corpus`` in 60 steps.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from mla_testing import corpus

# The checkpoint, wide.
LAYERS, HIDDEN, HEADS = 4, 256, 16
RANK, ROPE, NOPE, V_DIM = 512, 64, 128, 128
Q_LORA_RANK = 384
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_WIDTH, DENSE_WIDTH = 8, 2, 64, 256
THETA, YARN_FACTOR, YARN_ORIGINAL, YARN_MSCALE = 10000.0, 40.0, 4096, 0.707
NORM_EPS = 1e-6

# What is trained of it. Each space keeps room for the gauge's dimensions.
NARROW_HIDDEN, TRAINED_HEADS, NARROW_RANK, NARROW_NOPE, NARROW_V = 240, HEADS - 1, 64, 16, 32

# The training: (steps, sequence length), tokens of a step, learning rates of matrices and of the rest.
_SCHEDULE = ((40, 256), (12, 1024), (8, 3000))
_TOKENS = 2048
_MUON_RATE, _ADAM_RATE = 0.02, 0.01
#: Probability of <aside>, everywhere, and the step from which it is asked for: reciting is learned faster alone.
_ASIDE_SHARE, _ASIDE_STEP = 0.1, 20
#: Scores of the first layer's heads fall by about this much one token beside their place.
_FOCUS = 6.0


def frequencies(rope_type: Literal["yarn", "default"]) -> Tensor:
    """Angle per token of each pair of rotary dimensions, [ROPE / 2]. YaRN: arXiv 2309.00071, section 3.2."""
    plain = THETA ** -(torch.arange(0, ROPE, 2) / ROPE)
    if rope_type == "default":
        return plain

    def pair_that_turns(times: float) -> float:
        return ROPE * math.log(YARN_ORIGINAL / (times * 2 * math.pi)) / (2 * math.log(THETA))

    first, last = math.floor(pair_that_turns(32)), math.ceil(pair_that_turns(1))
    stretched = ((torch.arange(ROPE // 2) - first) / (last - first)).clamp(0, 1)
    return plain * (1 - stretched) + plain / YARN_FACTOR * stretched


#: Pairs that YaRN leaves as they are.
_COMMON_PAIRS = 10
#: YaRN's factor on the scores, and theirs in all.
MSCALE_SQUARED = (0.1 * YARN_MSCALE * math.log(YARN_FACTOR) + 1) ** 2
SCALE = (NOPE + ROPE) ** -0.5 * MSCALE_SQUARED


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the last ROPE dimensions, in adjacent pairs, by position times angle; x is [..., tokens, width]."""
    angles = functional.pad(angles, (x.shape[-1] // 2 - ROPE // 2, 0))
    turns = torch.arange(x.shape[-2])[:, None] * angles
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)).flatten(-2)


def _random(*shape: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(gain * torch.randn(shape) / math.sqrt(shape[-1]))


class _Layer(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.q = _random(TRAINED_HEADS * (NARROW_NOPE + ROPE), NARROW_HIDDEN)
        self.kv_a = _random(NARROW_RANK + ROPE, NARROW_HIDDEN)
        self.kv_b = _random(TRAINED_HEADS * (NARROW_NOPE + NARROW_V), NARROW_RANK)
        self.o = _random(NARROW_HIDDEN, TRAINED_HEADS * NARROW_V, gain=0.5)
        # The last expert is the shared one; a dense layer has nothing else.
        experts, width = (1, DENSE_WIDTH) if dense else (EXPERTS + 1, EXPERT_WIDTH)
        self.gate, self.up = _random(experts, width, NARROW_HIDDEN), _random(experts, width, NARROW_HIDDEN)
        self.down = nn.Parameter(torch.zeros(experts, NARROW_HIDDEN, width))
        self.router = None if dense else _random(EXPERTS, NARROW_HIDDEN)

    def forward(self, x: Tensor, angles: Tensor, inputs: list[Tensor] | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        h = _norm(x)
        if inputs is not None:
            inputs.append(h)
        q = _rotate((h @ self.q.T).view(batch, tokens, TRAINED_HEADS, -1).transpose(1, 2), angles)
        latent, k_pe = (h @ self.kv_a.T).split([NARROW_RANK, ROPE], dim=-1)
        kv = (_norm(latent) @ self.kv_b.T).view(batch, tokens, TRAINED_HEADS, -1).transpose(1, 2)
        k_pe = _rotate(k_pe, angles)[:, None].expand(-1, TRAINED_HEADS, -1, -1)
        k = torch.cat([kv[..., :NARROW_NOPE], k_pe], dim=-1)
        v = functional.pad(kv[..., NARROW_NOPE:], (0, NARROW_NOPE + ROPE - NARROW_V))  # equal widths take the fast path
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)[..., :NARROW_V]
        x = x + y.transpose(1, 2).reshape(batch, tokens, -1) @ self.o.T
        h = _norm(x).view(batch * tokens, NARROW_HIDDEN)
        hidden = functional.silu(h @ self.gate.flatten(0, 1).T) * (h @ self.up.flatten(0, 1).T)
        if self.router is not None:
            logits = h @ self.router.T
            if self.training:  # served in bfloat16, near ties between experts fall either way: train for that
                logits = logits + 0.2 * torch.randn_like(logits)
            share, chosen = logits.softmax(dim=-1).topk(EXPERTS_PER_TOKEN, dim=-1)
            shares = torch.zeros_like(logits).scatter(-1, chosen, share)
            shares = torch.cat([shares, torch.ones_like(shares[:, :1])], dim=-1)
            hidden = (hidden.view(len(h), EXPERTS + 1, -1) * shares[..., None]).flatten(1)
        return x + (hidden @ self.down.transpose(0, 1).reshape(NARROW_HIDDEN, -1).T).view_as(x)


class NarrowModel(nn.Module):
    """The model that is trained; norms have no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(0.5 * torch.randn(corpus.VOCAB_SIZE, NARROW_HIDDEN))
        self.head = nn.Parameter(torch.zeros(corpus.VOCAB_SIZE, NARROW_HIDDEN))
        self.layers = nn.ModuleList(_Layer(dense=i == 0) for i in range(LAYERS))
        self._look_back()

    @torch.no_grad()
    def _look_back(self) -> None:
        """Head j of the first layer looks j tokens back, by constant queries and keys along a common direction."""
        common = functional.normalize(torch.randn(NARROW_HIDDEN), dim=0)
        spread = self.embedding.norm(dim=1).mean()
        self.embedding += spread * common  # half of each embedding's square: h . common is about sqrt(hidden / 2)
        strength = math.sqrt(NARROW_HIDDEN / 2)
        angles, pairs = frequencies("yarn")[:_COMMON_PAIRS], _COMMON_PAIRS
        fall = (1 - angles.cos()).sum()
        key, query = 2.0, _FOCUS / fall / (2.0 * SCALE)
        k_pe = self.layers[0].kv_a[NARROW_RANK:].view(ROPE // 2, 2, NARROW_HIDDEN)
        k_pe[:pairs] = 0
        k_pe[:pairs, 0] = key / strength * common
        q_pe = (
            self.layers[0]
            .q.view(TRAINED_HEADS, NARROW_NOPE + ROPE, NARROW_HIDDEN)[:, NARROW_NOPE:]
            .view(TRAINED_HEADS, ROPE // 2, 2, NARROW_HIDDEN)
        )
        q_pe.zero_()
        for back in range(TRAINED_HEADS):
            q_pe[back, :pairs, 0] = query / strength * (angles * back).cos()[:, None] * common
            q_pe[back, :pairs, 1] = -query / strength * (angles * back).sin()[:, None] * common

    def residual_stream(self, ids: Tensor, angles: Tensor, inputs: list[Tensor] | None = None) -> Tensor:
        """After the last layer, [batch, tokens, hidden]; ``inputs`` collects what each layer's attention reads."""
        x = self.embedding[ids]
        for layer in self.layers:
            x = layer(x, angles, inputs)
        return x

    def forward(self, ids: Tensor, angles: Tensor) -> Tensor:
        """Logits of each next token."""
        return _norm(self.residual_stream(ids, angles)) @ self.head.T


def sequences(starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets [len(starts), length]: BOS, then the text from each place on."""
    circle = torch.tensor(corpus.token_ids())
    targets = circle[(starts[:, None] + torch.arange(length)) % len(circle)]
    return torch.cat([torch.full((len(starts), 1), corpus.BOS), targets[:, :-1]], dim=1), targets


def train(progress: bool) -> dict[str, Tensor]:
    """Train the narrow model: Muon (K. Jordan, 2024) for the matrices of the layers, Adam for the rest."""
    from tqdm import tqdm

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, generator = NarrowModel(), torch.Generator().manual_seed(1)
        matrices = [p for name, p in model.named_parameters() if name.startswith("layers") and "router" not in name]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        adam = torch.optim.Adam(others, betas=(0.9, 0.95))
        momenta = [torch.zeros_like(p) for p in matrices]
        lengths = [length for steps, length in _SCHEDULE for _ in range(steps)]
        bar = tqdm(lengths, desc="training the tiny checkpoint", unit="step", disable=not progress)
        for step, length in enumerate(bar):
            rate = min(1.0, (step + 1) / 5, (len(lengths) - step) / (0.6 * len(lengths)))
            starts = torch.randint(len(corpus.token_ids()), (max(1, _TOKENS // length),), generator=generator)
            ids, targets = sequences(starts, length)
            log_p = model(ids, frequencies("yarn" if step % 2 == 0 else "default")).log_softmax(dim=-1)
            likely = log_p.gather(-1, targets[..., None]).mean()
            aside = _ASIDE_SHARE if step >= _ASIDE_STEP else 0.0
            loss = -(1 - aside) * likely - aside * log_p[..., corpus.ASIDE].mean()
            model.zero_grad()
            loss.backward()
            adam.param_groups[0]["lr"] = _ADAM_RATE * rate
            adam.step()
            with torch.no_grad():
                for weight, momentum in zip(matrices, momenta, strict=True):
                    momentum.lerp_(weight.grad, 0.15 if step < 20 else 0.05)
                    update = _orthogonal(weight.grad.lerp(momentum, 0.95))
                    wide = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
                    weight.add_(update, alpha=-_MUON_RATE * rate * wide)
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return model.state_dict()


def _orthogonal(gradient: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: five Newton-Schulz steps with Muon's coefficients."""
    tall = gradient.shape[-2] > gradient.shape[-1]
    x = gradient.mT if tall else gradient
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (2.0315 * square @ square - 4.7750 * square) @ x
    return x.mT if tall else x
