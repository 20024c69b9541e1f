"""Cost of tools in requests whose answers have no calls: decode throughput with and without them, alternating; and the
times to compile large sets of tools.

python benchmarks/idle_tool_calls.py [CHECKPOINT]

The answers are free text of a fixed length (EOS has a logit bias of -100). Until a call begins, its guide only scans
tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import msgspec
from tqdm import tqdm

from penstock import LLM
from penstock.core import SamplingParams
from penstock.engine.guided.structural_tag import resolve_fallbacks
from penstock.frontend.tool_calls import ToolFunction, constrain_tool_calls


def functions(count: int, characters: int) -> list[ToolFunction]:
    """Functions with ten arguments each, whose schemas have about ``characters`` characters, most of them
    descriptions."""
    text = "d" * (characters // 10 - 60)
    types = ("string", "integer", "boolean", "number", "string")

    def schema(number: int) -> dict[str, Any]:
        properties = {f"argument_{number}_{i}": {"type": types[i % 5], "description": text} for i in range(10)}
        return {
            "type": "object",
            "properties": properties,
            "required": [*properties][:2],
            "additionalProperties": False,
        }

    return [ToolFunction(f"function_{number}", schema(number)) for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="", help="checkpoint (default: the built-in model)")
    parser.add_argument("--batch", type=int, default=64, help="number of sequences (default: 64)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens per sequence (default: 128)")
    parser.add_argument("--rounds", type=int, default=9, help="number of rounds (default: 9)")
    args = parser.parse_args()
    llm = LLM(args.checkpoint, max_model_len=1024, max_num_seqs=args.batch)
    inputs = llm._input_processor
    formats = inputs.chats.response_formats()
    end = dict.fromkeys(inputs.eos_token_ids, -100.0)
    without = SamplingParams(temperature=0.8, seed=1, max_tokens=args.output_len, logit_bias=end)
    constrained = constrain_tool_calls(without, functions(8, 1000), formats, "schema").sampling
    assert constrained.tool_calls, "the model's chat template has no known format of tool calls"
    prompts = [[100 + i, *range(200, 215)] for i in range(args.batch)]

    def run(params: SamplingParams) -> float:
        """Tokens per second of the batch."""
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - begun)

    run(without), run(constrained)  # warm up
    rates = []
    for i in tqdm(range(args.rounds), desc="rounds", unit="round"):  # in both orders
        pair = [run(params) for params in ((without, constrained) if i % 2 else (constrained, without))]
        rates.append(pair if i % 2 else pair[::-1])
    ratio = statistics.median(tools / plain for plain, tools in rates)
    plain, tools = (statistics.median(column) for column in zip(*rates, strict=True))
    print(f"{plain:.0f} tokens/s without tools, {tools:.0f} with; median of the rounds' ratios {ratio:.4f}")

    for count, size in ((10, 1000), (100, 10_000)):
        print(f"{count} tools of {size} characters:", compile_times(llm, functions(count, size)))


def compile_times(llm: LLM, tools: list[ToolFunction]) -> str:
    """Times to prepare and compile a set of tools, and to get it from the caches."""
    inputs, plain = llm._input_processor, SamplingParams()
    formats = inputs.chats.response_formats()
    compiler, times = llm.engine._grammar_compiler, {}
    llm.engine.set_vocabulary(inputs.vocabulary)
    for name in ("first", "again"):
        begun = time.perf_counter()
        params = constrain_tool_calls(plain, tools, formats, "schema").sampling.tool_calls
        assert params
        times[f"{name}: schemas to grammar"] = time.perf_counter() - begun
        begun = time.perf_counter()
        grammar = compiler.compile(params).result()
        times[f"{name}: compile"] = time.perf_counter() - begun
        assert not grammar.lowered_tools
    backend = compiler._backend
    assert backend
    tag = json.loads(params.constraint.structural_tag)
    resolved = msgspec.structs.replace(params.constraint, structural_tag=resolve_fallbacks(tag, ()))
    begun = time.perf_counter()
    request = backend.request(resolved)
    times["of it in the engine: grammar"] = time.perf_counter() - begun
    begun = time.perf_counter()
    backend.grammar(request, 0)
    times["second compilation"] = time.perf_counter() - begun
    return ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in times.items())


if __name__ == "__main__":
    main()
