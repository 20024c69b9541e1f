"""Write the built-in calibration texts, from the demo model's corpus.

python calibration.py ../../src/penstock/calibration/texts.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import corpus

CHARACTERS = 1_400_000
"""Enough for 512 samples of 512 tokens."""


def conversations(characters: int = CHARACTERS) -> Iterator[corpus.Conversation]:
    """Training conversations with the mixture at the end of the curriculum, with a total of ``characters``. Without
    tools, reasoning and system messages, which some chat templates do not support."""
    rng, remaining = Random("calibration"), characters
    skills, shares = list(corpus.SHARES), list(corpus.SHARES.values())
    while remaining > 0:
        drawn = corpus.converse(rng, corpus.Split.TRAIN, rng.choices(skills, shares)[0])
        if drawn.tools or drawn.thinking or any(set(each) != {"role", "content"} for each in drawn.messages):
            continue
        if any(message["role"] not in ("user", "assistant") for message in drawn.messages):
            continue
        remaining -= sum(len(message["content"]) for message in drawn.messages)
        yield drawn


def lines(characters: int = CHARACTERS) -> str:
    """The conversations as JSON lines."""
    records = ({"messages": drawn.messages} for drawn in conversations(characters))
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.parse_args().out.write_bytes(gzip.compress(lines().encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
