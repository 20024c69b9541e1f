"""From conversations to batches: render, encode, mask, and lay out in rows of equal length.

The corpus is drawn in slices of the training, each with the mixture of its moment (``corpus.shares_at``). Inside a
slice conversations of like length share a batch, so that no token of one is seen by another and little is padding;
the order of batches is shuffled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import corpus
import numpy as np
import tokenizer as bpe
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

BATCH_TOKENS = 8192
"""Tokens (padding included) a batch."""
LENGTHS = (48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048)
TOKENS = 44_000_000
"""Tokens the curriculum has, padding not counted."""
SLICES = 24
"""Parts of the curriculum, each with its own mixture and as many tokens as the others."""
REFINING = range(SLICES, SLICES + 6)
"""The parts of the same size that come after it."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a conversation and which of them the model is trained to give (bool), of one length."""

    ids: np.ndarray
    trained: np.ndarray


def render(tokenizer: PreTrainedTokenizerFast, conversation: corpus.Conversation, prompt_only: bool = False) -> str:
    """The conversation as text; with ``prompt_only``, all but the last answer, ready to be answered."""
    messages = conversation.messages[:-1] if prompt_only else conversation.messages
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=conversation.tools,
        tokenize=False,
        add_generation_prompt=prompt_only,
        enable_thinking=conversation.thinking,
    )
    return text


class Encoder:
    """Encodes conversations and finds the assistant's spans in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        encode = tokenizer.encode
        self.end = encode("<|im_end|>")[0]
        self.opening = np.array(encode("<|im_start|>assistant\n"))
        self.silent = np.array(encode("<think>\n\n</think>\n\n"))

    def __call__(self, texts: list[str]) -> list[Encoded]:
        return [self._mask(np.array(ids, np.uint16)) for ids in self.tokenizer(texts)["input_ids"]]

    def _mask(self, ids: np.ndarray) -> Encoded:
        trained = np.zeros(len(ids), bool)
        for start in _find(ids, self.opening) + len(self.opening):
            if np.array_equal(ids[start : start + len(self.silent)], self.silent):
                start += len(self.silent)  # an empty think block is part of the prompt
            stop = start + int(np.argmax(ids[start:] == self.end)) + 1
            trained[start:stop] = True
        return Encoded(ids, trained)


def _find(ids: np.ndarray, pattern: np.ndarray) -> np.ndarray:
    """Where ``pattern`` begins in ``ids``."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern))
    return np.flatnonzero((windows == pattern).all(1))


def train_tokenizer(out: Path, context: int, seed: int = 0, conversations: int = 400) -> None:
    """Train the tokenizer on ``conversations`` of every skill and save it in ``out``."""
    rng = Random(f"tokenizer:{seed}")
    template = bpe.train([], context)  # renders with the template before there is a vocabulary
    marks = re.compile("|".join(map(re.escape, (*bpe.SPECIAL, *bpe.MARKS))))

    def texts() -> Iterator[str]:
        for skill in tqdm(corpus.SKILLS, desc="tokenizer corpus", unit="skill"):
            count = conversations // 8 if "recall to" in skill else conversations
            for _ in range(count):
                yield from marks.split(render(template, corpus.converse(rng, corpus.Split.TRAIN, skill)))

    bpe.save(bpe.train(texts(), context), out)


def draw(seed: int, part: int, tokens: int, shares: dict[str, float], tokenizer_dir: str) -> list[Encoded]:
    """Draw conversations until every skill has its share of ``tokens``. Deterministic in ``(seed, part)``."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    encoder, drawn, total = Encoder(tokenizer), [], sum(shares.values())
    for skill, share in shares.items():
        rng, left = Random(f"train:{seed}:{part}:{skill}"), tokens * share / total
        while left > 0:
            batch = [render(tokenizer, corpus.converse(rng, corpus.Split.TRAIN, skill)) for _ in range(16)]
            for encoded in encoder(batch):
                if len(encoded.ids) > LENGTHS[-1]:
                    raise ValueError(f"a conversation of {skill!r} has {len(encoded.ids)} tokens")
                if left > 0:
                    drawn.append(encoded)
                    left -= len(encoded.ids)
    return drawn


def digest(drawn: list[Encoded]) -> str:
    """SHA-256 of token ids and masks, as hexadecimal."""
    return hashlib.sha256(b"".join(e.ids.tobytes() + e.trained.tobytes() for e in drawn)).hexdigest()


def layout(drawn: list[Encoded], rng: Random) -> list[tuple[np.ndarray, np.ndarray]]:
    """Group conversations by length into batches ``(ids, trained)``, each ``[rows, length]``, shuffled.

    ``rows * length`` is at most ``BATCH_TOKENS``. What does not fill a batch goes into the next longer one.
    """
    rng.shuffle(drawn)
    batches, waiting = [], sorted(drawn, key=lambda e: len(e.ids))
    for length in LENGTHS:
        rows = BATCH_TOKENS // length
        fitting = sum(len(e.ids) <= length for e in waiting)
        while fitting >= rows or (length == LENGTHS[-1] and fitting):
            group, waiting, fitting = waiting[:rows], waiting[rows:], fitting - min(rows, fitting)
            ids, trained = np.zeros((len(group), length), np.uint16), np.zeros((len(group), length), bool)
            for row, e in enumerate(group):
                ids[row, : len(e.ids)], trained[row, : len(e.ids)] = e.ids, e.trained
            batches.append((ids, trained))
    rng.shuffle(batches)
    return batches


def write(out: Path, tokenizer_dir: Path, tokens: int, seed: int, parts: Sequence[int] = range(SLICES)) -> None:
    """Draw ``parts`` of a curriculum of ``tokens``; write ``ids.bin``, ``trained.bin``, ``index.json`` in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    index, offset = [], 0
    with (
        ProcessPoolExecutor() as pool,
        (out / "ids.bin").open("wb") as ids_file,
        (out / "trained.bin").open("wb") as trained_file,
    ):
        jobs = [
            pool.submit(draw, seed, part, tokens // SLICES, corpus.shares_at(part / SLICES), str(tokenizer_dir))
            for part in parts
        ]
        for part, job in zip(parts, tqdm(jobs, desc=out.name, unit="slice"), strict=True):
            for ids, trained in layout(job.result(), Random(f"layout:{seed}:{part}")):
                ids_file.write(ids.tobytes())
                trained_file.write(trained.tobytes())
                index.append((offset, *ids.shape))
                offset += ids.size
    (out / "index.json").write_text(json.dumps(index))


class Batches:
    """The written corpus, memory-mapped; item ``i`` is ``(ids [rows, length] int64, trained [rows, length] bool)``."""

    def __init__(self, folder: Path) -> None:
        self.index: list[tuple[int, int, int]] = json.loads((folder / "index.json").read_text())
        self.ids = np.memmap(folder / "ids.bin", np.uint16, "r")
        self.trained = np.memmap(folder / "trained.bin", bool, "r")

    def __len__(self) -> int:
        return len(self.index)

    def digest(self) -> str:
        """SHA-256 of all token ids, as hexadecimal."""
        return hashlib.sha256(self.ids.data).hexdigest()

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        offset, rows, length = self.index[i]
        window = slice(offset, offset + rows * length)
        return self.ids[window].reshape(rows, length).astype(np.int64), self.trained[window].reshape(
            rows, length
        ).copy()
