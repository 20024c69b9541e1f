"""Cost of features, each compared with a counterpart, alternating in one run.

python benchmarks/features.py CHECKPOINT [--quantization w8a8]

- adapters: tokens per second with one or four LoRA adapters of rank 16 on every matrix, compared with no adapter;
- beams: compared with transformers' ``generate`` with the same number of beams;
- embeddings: compared with transformers' hidden states of the same texts.

Comparisons with transformers use the checkpoint's dtype.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from penstock import LLM, LoRARequest, SamplingParams

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--quantization", default="none", help="quantization of the model (default: none)")
    parser.add_argument("--batch", type=int, default=16, help="sequences with adapters (default: 16)")
    parser.add_argument("--beams", type=int, default=4, help="number of beams (default: 4)")
    parser.add_argument("--output-len", type=int, default=32, help="tokens per sequence (default: 32)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype="auto").eval()
    beams(args, model)
    embeddings(args, model)
    with tempfile.TemporaryDirectory() as folder:
        get_peft_model(model, LoraConfig(r=16, target_modules=ALL)).save_pretrained(folder)
        del model
        adapters(args, folder)


def in_turns(title: str, rounds: int, runs: list[Callable[[], None]]) -> list[float]:
    """Median seconds of each function, run alternately; the first round is a warm-up."""
    times: list[list[float]] = [[] for _ in runs]
    for number in tqdm(range(rounds + 1), desc=title, unit="round", leave=False):
        for run, taken in zip(runs, times, strict=True):
            begun = time.perf_counter()
            run()
            if number:
                taken.append(time.perf_counter() - begun)
    return [statistics.median(taken) for taken in times]


def adapters(args: argparse.Namespace, folder: str) -> None:
    llm = LLM(args.checkpoint, quantization=args.quantization, max_model_len=512, enable_lora=True)
    prompts = [[100 + i, *range(200, 215)] for i in range(args.batch)]
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)

    def run(names: list[str | None]) -> Callable[[], None]:
        requests = [LoRARequest(name, 0, folder) if name else None for name in names]
        each = [requests[i % len(requests)] for i in range(args.batch)]
        return lambda: void(llm.generate(prompts, params, use_tqdm=False, lora_request=each))

    none, one, four = in_turns("adapters", args.rounds, [run([None]), run(["a"]), run(["a", "b", "c", "d"])])
    print(
        f"adapters: {args.batch} sequences: {args.batch * args.output_len / none:.0f} tokens/s without adapters, "
        f"{none / one:.2f} times as many with one, {none / four:.2f} with four"
    )


def beams(args: argparse.Namespace, model: torch.nn.Module) -> None:
    llm = LLM(args.checkpoint, max_model_len=512)
    prompt = list(range(200, 216))
    params = SamplingParams(
        temperature=0, max_tokens=args.output_len, use_beam_search=True, best_of=args.beams, ignore_eos=True
    )
    ids, length = torch.tensor([prompt]), args.output_len
    options = {"num_beams": args.beams, "max_new_tokens": length, "min_new_tokens": length, "do_sample": False}

    @torch.inference_mode()
    def theirs() -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]

    ours, other = in_turns("beams", args.rounds, [lambda: void(llm.generate(prompt, params, use_tqdm=False)), theirs])
    print(
        f"beams: {args.beams} beams of {length} tokens: {ours:.2f} s, transformers {other:.2f} s "
        f"({other / ours:.1f} times)"
    )


def embeddings(args: argparse.Namespace, model: torch.nn.Module) -> None:
    llm = LLM(args.checkpoint, max_model_len=512, enable_prefix_caching=False)
    texts = [[100 + i, *range(200, 327)] for i in range(16)]
    ids = torch.tensor(texts)

    @torch.inference_mode()
    def theirs() -> None:
        states = model.model(input_ids=ids).last_hidden_state[:, -1]  # type: ignore[operator, union-attr]
        torch.nn.functional.normalize(states.float(), dim=-1)

    ours, other = in_turns("embeddings", args.rounds, [lambda: void(llm.embed(texts, use_tqdm=False)), theirs])
    print(f"embeddings: 16 of 128 tokens: {ours:.2f} s, transformers {other:.2f} s ({other / ours:.1f} times)")


def void(_: object) -> None:
    """Discard a result."""


if __name__ == "__main__":
    main()
