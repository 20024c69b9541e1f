"""Time to first token after a prefix cache hit: a hybrid model, and a model with attention in all layers.

python benchmarks/state_prefix_hits.py --tokens 8192

Both models have random weights, 24 layers and the same number of weights: the shape of Qwen3.5, where three of four
layers are gated delta nets, and the shape of Qwen3. Prompts are a document and a question of 32 tokens; the second
question about a document hits the prefix cache. The models alternate in one run; results are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from penstock import LLM, SamplingParams, demo
from penstock.checkpoint.config_json import read_config_json
from penstock.planning.model_size import model_size_of

COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
    "eos_token_id": None,
}
HYBRID = COMMON | {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    "intermediate_size": 3072,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
ATTENTION = COMMON | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
QUESTION = 32
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="lengths of documents")
    parser.add_argument("--rounds", type=int, default=5, help="number of documents of each length (default: 5)")
    args = parser.parse_args()
    gap = num_weights(HYBRID) - num_weights(ATTENTION | {"intermediate_size": 3072})
    size = 3072 + round(gap / (3 * COMMON["hidden_size"] * COMMON["num_hidden_layers"]) / 64) * 64
    models = {"hybrid": HYBRID, "attention": ATTENTION | {"intermediate_size": size}}
    for name, config in models.items():
        print(f"{name}: {num_weights(config) / 1e6:.0f} million weights")
    engines = {name: start(config, max(args.tokens)) for name, config in models.items()}
    print("| document | hybrid: computed | cached | attention: computed | cached | ratio, cached |")
    print("|---:|---:|---:|---:|---:|---:|", flush=True)
    rng = Random(0)
    for length in args.tokens:
        times: dict[str, list[list[float]]] = {name: [] for name in engines}
        for _ in range(args.rounds):
            document = [rng.randrange(2, 4096) for _ in range(length)]
            for name, llm in engines.items():
                times[name].append([ask(llm, document, rng, 0), ask(llm, document, rng, length)])
        medians = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()
        }
        cells = [f"{1e3 * seconds:.0f} ms" for pair in medians.values() for seconds in pair]
        ratio = medians["hybrid"][1] / medians["attention"][1]
        print(f"| {length:,} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)


def num_weights(config: dict[str, Any]) -> int:
    """Number of weights of all layers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        size = model_size_of(read_config_json(Path(folder)))
    return int(size.layer_weights)


def start(config: dict[str, Any], longest: int) -> LLM:
    """Start an engine with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (Path(folder) / file).write_bytes((demo.CHAT / file).read_bytes())
        return LLM(
            folder,
            load_format="dummy",
            max_model_len=longest + 2 * QUESTION,
            max_num_seqs=4,
            num_gpu_blocks_override=2 * longest // 64 + 8,
            weight_cache_dir="none",
        )


def ask(llm: LLM, document: list[int], rng: Random, cached: int) -> float:
    """Time to first token in seconds of a question about a document, of which ``cached`` tokens are cached."""
    prompt = document + [rng.randrange(2, 4096) for _ in range(QUESTION)]
    begin = time.perf_counter()
    (output,) = llm.generate([prompt], ONE, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert output.num_cached_tokens == cached, (output.num_cached_tokens, cached)
    return seconds


if __name__ == "__main__":
    main()
