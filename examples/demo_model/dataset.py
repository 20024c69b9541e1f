"""Dataset: renders, tokenizes and masks conversations, and groups them into batches.

The corpus consists of slices in the order of training. The mixture of skills of a slice depends on its position
(``corpus.shares_at``). Within a slice, conversations of similar length share a batch, one per row, so that there is
little padding; batches are shuffled.
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
"""Number of tokens per batch, including padding."""
LENGTHS = (48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048)
TOKENS = 44_000_000
"""Number of tokens of the curriculum, without padding."""
SLICES = 24
"""Number of slices of the curriculum, of equal size, each with its mixture of skills."""
REFINING = range(SLICES, SLICES + 6)
"""Numbers of the refining slices, which follow the curriculum and have the same size."""


@dataclass(frozen=True)
class Encoded:
    """Token ids of a conversation, and a bool mask of the same length of those that are trained on."""

    ids: np.ndarray
    trained: np.ndarray


def render(tokenizer: PreTrainedTokenizerFast, conversation: corpus.Conversation, prompt_only: bool = False) -> str:
    """Render a conversation; with ``prompt_only`` without the last answer, as a prompt."""
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
    """Tokenizes conversations and finds the assistant's spans in them."""

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
    """Positions of ``pattern`` in ``ids``."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern))
    return np.flatnonzero((windows == pattern).all(1))


def train_tokenizer(out: Path, context: int, seed: int = 0, conversations: int = 400) -> None:
    """Train the tokenizer on ``conversations`` conversations of every skill and save it in ``out``."""
    rng = Random(f"tokenizer:{seed}")
    template = bpe.train([], context)  # only renders the chat template
    marks = re.compile("|".join(map(re.escape, (*bpe.SPECIAL, *bpe.MARKS))))

    def texts() -> Iterator[str]:
        for skill in tqdm(corpus.SKILLS, desc="tokenizer corpus", unit="skill"):
            count = conversations // 8 if "recall to" in skill else conversations
            for _ in range(count):
                yield from marks.split(render(template, corpus.converse(rng, corpus.Split.TRAIN, skill)))

    bpe.save(bpe.train(texts(), context), out)


def draw(seed: int, part: int, tokens: int, shares: dict[str, float], tokenizer_dir: str) -> list[Encoded]:
    """Draw conversations until every skill has its share of ``tokens``. Deterministic for ``(seed, part)``."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    encoder, drawn, total = Encoder(tokenizer), [], sum(shares.values())
    for skill, share in shares.items():
        rng, left = Random(f"train:{seed}:{part}:{skill}"), tokens * share / total
        while left > 0:
            batch = [render(tokenizer, corpus.converse(rng, corpus.Split.TRAIN, skill)) for _ in range(16)]
            for encoded in encoder(batch):
                if len(encoded.ids) > LENGTHS[-1]:
                    message = f"a conversation of {skill!r} has {len(encoded.ids)} tokens"
                    raise ValueError(f"{message}; the maximum is {LENGTHS[-1]}")
                if left > 0:
                    drawn.append(encoded)
                    left -= len(encoded.ids)
    return drawn


def digest(drawn: list[Encoded]) -> str:
    """SHA-256 of token ids and masks in hexadecimal."""
    return hashlib.sha256(b"".join(e.ids.tobytes() + e.trained.tobytes() for e in drawn)).hexdigest()


def layout(drawn: list[Encoded], rng: Random) -> list[tuple[np.ndarray, np.ndarray]]:
    """Group conversations by length into batches ``(ids, trained)``, each ``[rows, length]``, shuffled.

    ``rows * length`` is at most ``BATCH_TOKENS``. Conversations that do not fill a batch go into the next longer one.
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
    """Memory-mapped corpus; item ``i`` is ``(ids [rows, length] int64, trained [rows, length] bool)``."""

    def __init__(self, folder: Path) -> None:
        self.index: list[tuple[int, int, int]] = json.loads((folder / "index.json").read_text())
        self.ids = np.memmap(folder / "ids.bin", np.uint16, "r")
        self.trained = np.memmap(folder / "trained.bin", bool, "r")

    def __len__(self) -> int:
        return len(self.index)

    def digest(self) -> str:
        """SHA-256 of all token ids in hexadecimal."""
        return hashlib.sha256(self.ids.data).hexdigest()

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        offset, rows, length = self.index[i]
        window = slice(offset, offset + rows * length)
        return self.ids[window].reshape(rows, length).astype(np.int64), self.trained[window].reshape(
            rows, length
        ).copy()
