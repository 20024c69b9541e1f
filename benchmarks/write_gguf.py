"""Write a checkpoint as a GGUF file, to compare Penstock and llama.cpp.

python benchmarks/write_gguf.py CHECKPOINT OUT.gguf --type Q4_0

Types that llama.cpp's Python library cannot quantize to get random blocks, as speed does not depend on the values.
``Q4_K_M`` is llama.cpp's mixture of Q4_K and Q6_K. Needs the dependency group ``test``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from gguf_files import QUANTIZABLE, SCALE_OFFSETS, add_tokenizer, write_gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder with model.safetensors and a byte-level tokenizer.json")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--type", choices=[*QUANTIZABLE, *sorted(SCALE_OFFSETS.keys() - QUANTIZABLE), "Q4_K_M"], default="Q4_0"
    )
    parser.add_argument("--pre", default="qwen2", help="name of the pre-tokenizer (default: qwen2)")
    args = parser.parse_args()

    def type_of(name: str) -> str:
        if args.type != "Q4_K_M":
            return str(args.type)
        return "Q6_K" if name in ("token_embd.weight", "output.weight") or _is_precise(name) else "Q4_K"

    write_gguf(args.checkpoint, args.out, type_of, lambda writer: add_tokenizer(writer, args.checkpoint, args.pre))


def _is_precise(name: str) -> bool:
    """True for value and down projections of every other layer, which are Q6_K in llama.cpp's mixture."""
    return "attn_v" in name or "ffn_down" in name if int(name.split(".")[1]) % 2 else False


if __name__ == "__main__":
    main()
