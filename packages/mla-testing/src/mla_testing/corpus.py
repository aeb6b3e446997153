# SPDX-License-Identifier: Apache-2.0
"""The text the tiny checkpoints know by heart: language reference topics that every Python installation carries.

The text is one closed circle: after its last token comes its first, so it can be continued from anywhere, for ever.
A byte-level BPE tokenizer is trained on it. Both depend only on the Python version.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = [
    "ASIDE",
    "BOS",
    "EOS",
    "VOCAB_SIZE",
    "prompts",
    "save_tokenizer",
    "text",
    "text_prompts",
    "token_ids",
    "tokenizer",
]

#: Special tokens; the text holds none of them.
BOS, EOS, ASIDE = 0, 1, 2
VOCAB_SIZE = 1024

_CHARACTERS = 14_000
_TOPICS = """
    assert booleans break class comparisons context-managers continue del dynamic-features exceptions for function
    global identifiers if in integers lambda lists naming nonlocal numbers raise return try while with yield
"""


@functools.cache
def text() -> str:
    """About 14,000 characters of English about Python.

    Raises:
        RuntimeError: this Python lacks the ``pydoc_data`` package.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text of the tiny checkpoints; use a Python with its whole "
            "standard library (Debian and Ubuntu: install libpython3-stdlib)"
        ) from error
    parts, length = [], 0
    for name in _TOPICS.split():
        part = topics.get(name, "").strip()
        if part and length < _CHARACTERS:
            parts.append(part[: _CHARACTERS - length].rsplit("\n", 1)[0])
            length += len(parts[-1]) + 2
    return "\n\n".join(parts) + "\n\n"


@functools.cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of ``VOCAB_SIZE`` entries, trained on the text; it puts BOS before what it encodes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<bos>", "<eos>", "<aside>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text()], trainer)
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return made


@functools.cache
def token_ids() -> tuple[int, ...]:
    """The circle of tokens, without BOS."""
    return tuple(tokenizer().encode(text(), add_special_tokens=False).ids)


def save_tokenizer(folder: Path, model_max_length: int = 4096) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json as checkpoints have them."""
    tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model_max_length,
        },
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Pieces of the text as token ids, BOS first.

    They start and end between words, so that encoding :func:`text_prompts` of the same arguments gives the same ids.

    Args:
        seed: chooses the places.
        lengths: tokens of each prompt, BOS included.

    Raises:
        ValueError: a length below 2 or beyond the text.
    """
    circle, starts = token_ids(), _word_starts()
    chooser = random.Random(seed)
    pieces = []
    for length in lengths:
        if not 2 <= length <= len(circle):
            raise ValueError(f"length is {length}, expected 2 to {len(circle)} tokens")
        places = [s for s in sorted(starts) if s + length - 1 in starts]
        if not places:
            raise ValueError(f"no {length - 1} tokens of the text lie between two word boundaries; try {length + 1}")
        start = chooser.choice(places)
        pieces.append([BOS, *circle[start : start + length - 1]])
    return pieces


def text_prompts(seed: int, lengths: Sequence[int]) -> list[str]:
    """As :func:`prompts`, decoded, without BOS."""
    return [tokenizer().decode(ids[1:]) for ids in prompts(seed, lengths)]


@functools.cache
def _word_starts() -> frozenset[int]:
    """Places where a new word starts, the end of the text included."""
    words = tokenizer().encode(text(), add_special_tokens=False).word_ids
    inner = (i for i in range(1, len(words)) if words[i] != words[i - 1] and _starts_word(i))
    return frozenset([0, *inner, len(words)])


def _starts_word(index: int) -> bool:
    """Whether the token at ``index`` opens with the space before a word: such places survive cutting."""
    piece = tokenizer().id_to_token(token_ids()[index])
    return len(piece) > 1 and piece[0] == "Ġ" and piece[1].isalpha()
