"""The quality that quantization costs, measured with the demo model on held-out text and questions.

python benchmarks/quantization_quality.py
python benchmarks/quantization_quality.py --planted                  # a model with outliers in its activations
python benchmarks/quantization_quality.py --checkpoint NAME=FOLDER   # the demo model as another tool has quantized it

For each format that weights are rounded to when they are loaded, each method of ``penstock quantize``, types of GGUF,
bitsandbytes, and int8 KV caches: the perplexity of held-out answers, the Kullback-Leibler divergence of the next-token
distribution from that in bfloat16, averaged over the answers' tokens, the share of tokens with the same top token, the
share of held-out questions that are answered right, asked over OpenAI's API of a server, and the bytes of the layers.
Needs the dependency group ``test``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from penstock import demo, ops
from penstock.calibration.options import METHODS, QuantizeOptions
from penstock.calibration.quantize import quantize
from penstock.core.quantization import SCHEMES
from penstock.frontend.gguf_folder import checkpoint_folder
from penstock.models import Model, load_model
from penstock.ops import AttentionMetadata, Batch
from penstock.planning.gguf_file import GGUFFile

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("examples/demo_model", "tests")]
import evaluate
import outliers
from other_checkpoints import BITSANDBYTES, GGUF, write_bitsandbytes, write_gguf_type
from serving import Served

BLOCK = 64
ON_CPUS = [name for name, scheme in SCHEMES.items() if not scheme.layers.floating]
WRITTEN = {
    **{name: QuantizeOptions(name) for name in METHODS},
    "awq -g32": QuantizeOptions("awq", group_size=32),
    "gptq -g32": QuantizeOptions("gptq", group_size=32),
    "gptq desc_act": QuantizeOptions("gptq", act_order="group"),
    "gptq 8 bits": QuantizeOptions("gptq", bits=8, group_size=-1),
}
"""What ``penstock quantize`` writes."""


@dataclass(frozen=True)
class Variant:
    """The model as it is measured."""

    label: str
    made: str
    path: Path
    """A folder, or a GGUF file."""
    quantization: str = "none"
    kv_cache_dtype: str = "auto"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", nargs="*", choices=ON_CPUS, default=ON_CPUS, help="at load (default: all)")
    parser.add_argument("--method", nargs="*", choices=WRITTEN, default=[*WRITTEN], help="(default: all)")
    parser.add_argument("--gguf", nargs="*", choices=GGUF, default=GGUF, help="types (default: all)")
    parser.add_argument("--bitsandbytes", nargs="*", choices=BITSANDBYTES, default=BITSANDBYTES, help="(default: all)")
    parser.add_argument("--checkpoint", nargs="*", default=[], metavar="NAME=FOLDER", help="others to measure")
    parser.add_argument("--planted", action="store_true", help="plant outliers first (examples/demo_model/outliers.py)")
    parser.add_argument("--calib-size", type=int, default=128, help="samples of 512 tokens (default: 128)")
    parser.add_argument("--texts", type=int, default=8, help="held-out answers a skill for the divergence (default: 8)")
    parser.add_argument("--questions", type=int, default=48, help="questions a skill; 0 asks none (default: 48)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()

    texts = list(answers(args.texts))
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as scratch:
        model = demo.CHAT
        if args.planted:
            outliers.plant(model, model := Path(scratch) / "planted")
        expected = list(distributions(Variant("", "", model), texts))
        for variant in variants(args, model, Path(scratch)):
            own = compare(expected, distributions(variant, texts), texts)
            if args.questions:
                own["right"] = share_right(variant, args.questions)
            named = {"weights": variant.label, "made": variant.made, "kv_cache_dtype": variant.kv_cache_dtype}
            found.append(named | own | {"bytes": layer_bytes(variant)})
            if args.json:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{sum(own for _, own in texts)} tokens of answers, {args.questions} questions a skill\n")
    print(table(found))


def variants(args: argparse.Namespace, model: Path, scratch: Path) -> Iterator[Variant]:
    """Those that were asked for; what ``penstock quantize`` makes is made when it comes to its turn."""
    for name in args.quantization:
        yield Variant(name, "at load", model, name)
    for name in (name for name in ("none", "w8a8") if name in args.quantization):
        yield Variant(name, "at load", model, name, "int8")
    for number, name in enumerate(args.method):
        options = msgspec.structs.replace(WRITTEN[name], calib_size=args.calib_size, eval_size=1)
        quantize(model, scratch / str(number), options)
        yield Variant(name, "penstock quantize", scratch / str(number))
    for name in args.gguf:
        write_gguf_type(model, scratch / f"{name}.gguf", name)
        yield Variant(name, "GGUF", scratch / f"{name}.gguf")
    for name in args.bitsandbytes:
        write_bitsandbytes(model, scratch / f"bitsandbytes {name}", name)
        yield Variant(name, "bitsandbytes", scratch / f"bitsandbytes {name}")
    for given in args.checkpoint:
        name, _, folder = given.partition("=")
        yield Variant(name, "elsewhere", Path(folder))


def layer_bytes(variant: Variant) -> int:
    """Bytes of the layers' tensors in the checkpoint, or, of weights that are rounded at load, of what they are rounded
    to."""
    if variant.path.suffix == ".gguf":
        tensors_of_file = GGUFFile(variant.path).tensors
        return sum(tensor.size for name, tensor in tensors_of_file.items() if name.startswith("blk."))
    tensors = [load_file(file) for file in sorted(variant.path.glob("*.safetensors"))]
    layers = [(name, tensor) for file in tensors for name, tensor in file.items() if ".layers." in name]
    format = SCHEMES[variant.quantization].layers
    if not format.bits:
        return sum(tensor.nbytes for _, tensor in layers)
    matrices = [tensor for _, tensor in layers if tensor.dim() == 2]
    groups = [len(tensor) * -(-tensor.shape[1] // (format.group_size or tensor.shape[1])) for tensor in matrices]
    return sum(tensor.numel() * format.bits // 8 for tensor in matrices) + 4 * sum(groups)


def answers(count: int) -> Iterator[tuple[list[int], int]]:
    """Token ids of held-out conversations, and how many of the last make up the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.CHAT)
    for conversations in evaluate.held_out(count, 1).values():
        for conversation in conversations:
            prompt = evaluate.render(tokenizer, conversation, prompt_only=True)
            answer = evaluate.render(tokenizer, conversation).removesuffix("\n").removeprefix(prompt)
            own = tokenizer.encode(answer)
            yield tokenizer.encode(prompt) + own, len(own)


def distributions(variant: Variant, texts: Sequence[tuple[list[int], int]]) -> Iterator[Tensor]:
    """Log probabilities of each answer's tokens, ``[tokens, vocabulary]`` float32."""
    backend = ops.backend(torch.device("cpu"))
    folder = checkpoint_folder(variant.path) if variant.path.suffix == ".gguf" else variant.path
    model = load_model(folder, backend, quantization=variant.quantization)
    longest, kept = max(len(ids) for ids, _ in texts), variant.kv_cache_dtype.replace("auto", "")
    cache = backend.new_kv_cache(model.kv_specs(BLOCK, kept), -(-longest // BLOCK), torch.device("cpu"))
    for ids, own in tqdm(texts, desc=f"{variant.label} {variant.kv_cache_dtype}", unit="text", leave=False):
        yield log_probabilities(model, cache, ids, own)


def log_probabilities(model: Model, cache: list[Any], ids: list[int], own: int) -> Tensor:
    def queries(count: int, length: int) -> AttentionMetadata:
        starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, count], [length]))
        return AttentionMetadata(starts, lengths, torch.arange(-(-len(ids) // BLOCK), dtype=torch.int32)[None])

    batch = Batch(
        token_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        slot_mapping=torch.arange(len(ids)),
        attention=queries(len(ids), len(ids)),
        logits_indices=torch.arange(len(ids) - own - 1, len(ids) - 1),
        logits_attention=queries(own, len(ids) - 1),
    )
    return model.logits(model.forward(batch, cache)).log_softmax(-1)


def compare(
    expected: Sequence[Tensor], found: Iterator[Tensor], texts: Sequence[tuple[list[int], int]]
) -> dict[str, Any]:
    total, agree, tokens, loss = 0.0, 0, 0, 0.0
    for before, after, (ids, own) in zip(expected, found, texts, strict=True):
        total += float((before.exp() * (before - after)).sum())
        agree += int((before.argmax(-1) == after.argmax(-1)).sum())
        loss -= float(after.gather(1, torch.tensor(ids[-own:])[:, None]).sum())
        tokens += len(before)
    return {"perplexity": exp(loss / tokens), "divergence": total / tokens, "same_top_token": agree / tokens}


def share_right(variant: Variant, count: int) -> float:
    """Of held-out questions, asked over OpenAI's API of ``penstock serve``."""
    drawn = [c for conversations in evaluate.held_out(count, 0).values() for c in conversations]
    asked = [c for c in drawn if c.check is not evaluate.Check.FREE]
    flags = ["--quantization", variant.quantization, "--kv-cache-dtype", variant.kv_cache_dtype]
    with Served("--model", str(variant.path), *flags) as server:
        given = evaluate.Remote(f"{server.root}/v1", None).ask(asked)
    return sum(map(evaluate.is_right, given, asked)) / len(asked)


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| weights | quantized | KV cache | perplexity | KL, nats | same top token | right answers | bytes |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        right = f"{one['right']:.1%}" if "right" in one else "–"
        names = f"`{one['weights']}` | {one['made']} | `{one['kv_cache_dtype']}`"
        figures = f"{one['perplexity']:.4f} | {one['divergence']:.4f} | {one['same_top_token']:.2%}"
        lines.append(f"| {names} | {figures} | {right} | {one['bytes']:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
