"""Quality loss of quantization, on real models, and on questions to the demo model.

python benchmarks/quantization_quality.py                            # SmolLM2-135M-Instruct and Gemma 3 270M
python benchmarks/quantization_quality.py --model demo               # the demo model's held-out answers and questions
python benchmarks/quantization_quality.py --model demo --planted     # with outliers in its activations
python benchmarks/quantization_quality.py --checkpoint NAME=FOLDER   # the model quantized by another tool

Measures each load-time quantization, each method of ``penstock quantize``, GGUF types, bitsandbytes, and int8 KV
caches: perplexity, also relative to bfloat16; Kullback-Leibler divergence of the next-token distribution from that of
bfloat16, averaged over tokens; share of tokens with the same top token; and bits per weight of the layers. For the demo
model also the share of held-out questions that a server answers correctly. Real models come from Python packages
(``tests/support/real_models.py``), and their text, in windows of 512 tokens, from the licenses installed by Debian (see
``--text``). Needs the dependency group ``test``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, prod
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
from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.gguf_file import GGUFFile
from penstock.core.quantization import SCHEMES
from penstock.frontend.gguf_folder import checkpoint_folder
from penstock.models.loader import LoadOptions, load_model
from penstock.models.model import Model
from penstock.ops import AttentionMetadata, Batch
from penstock.planning.kv_size import bytes_per_weight
from penstock.planning.model_size import model_size_of

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("examples/demo_model", "tests/support")]
import evaluate
import outliers
import real_models
from other_checkpoints import BITSANDBYTES, GGUF, write_bitsandbytes, write_gguf_type
from serving import Served

BLOCK = 64
WINDOW = 512
"""Tokens per window of a real model's text, including the BOS token."""
CHUNK = 128
"""Number of tokens in each comparison of distributions, to limit memory."""
LICENSES = [Path("/usr/share/common-licenses") / name for name in ("Apache-2.0", "GPL-3", "MPL-2.0", "GFDL-1.3")]
REAL = {"smollm2": real_models.smollm2, "gemma3": real_models.gemma3}
"""Real models by name."""
ON_CPUS = [name for name, scheme in SCHEMES.items() if not scheme.layers.floating]
WRITTEN = {
    **{name: QuantizeOptions(name) for name in METHODS},
    "awq -g32": QuantizeOptions("awq", group_size=32),
    "gptq -g32": QuantizeOptions("gptq", group_size=32),
    "gptq -g96": QuantizeOptions("gptq", group_size=96),
    "gptq -g128": QuantizeOptions("gptq", group_size=128),
    "gptq desc_act": QuantizeOptions("gptq", act_order="group"),
    "gptq 8 bits": QuantizeOptions("gptq", bits=8, group_size=-1),
    **{f"{method} unrotated": QuantizeOptions(method, rotation=0) for method in ("w8a8", "wint4", "w4a8", "gptq")},
    "gptq -g32 unrotated": QuantizeOptions("gptq", group_size=32, rotation=0),
}
"""Options of ``penstock quantize`` by name of the method."""
REAL_METHODS = ("wint4", "w8a8", "w8a8 unrotated", "awq -g32", "gptq", "gptq -g32", "gptq -g32 unrotated")
"""Methods of ``WRITTEN`` measured on real models by default."""


@dataclass(frozen=True)
class Variant:
    """A quantized model to measure."""

    label: str
    made: str
    """How the model was quantized, for the table."""
    path: Path
    """Checkpoint folder or GGUF file."""
    quantization: str = "none"
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class Text:
    """Token ids of a text."""

    ids: list[int]
    num_measured: int
    """Number of tokens at the end that are measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="*", choices=[*REAL, "demo"], default=[*REAL], help="models to measure (default: real models)"
    )
    parser.add_argument(
        "--quantization", nargs="*", choices=ON_CPUS, default=ON_CPUS, help="quantizations at load (default: all)"
    )
    parser.add_argument(
        "--method", nargs="*", choices=WRITTEN, help="methods of penstock quantize (default: all for demo, else some)"
    )
    parser.add_argument("--gguf", nargs="*", choices=GGUF, help="GGUF types (default: all for the demo model)")
    parser.add_argument(
        "--bitsandbytes", nargs="*", choices=BITSANDBYTES, default=BITSANDBYTES, help="formats for demo (default: all)"
    )
    parser.add_argument("--checkpoint", nargs="*", default=[], metavar="NAME=FOLDER", help="quantized checkpoints")
    parser.add_argument("--planted", action="store_true", help="plant outliers first (examples/demo_model/outliers.py)")
    parser.add_argument("--calib-size", type=int, default=128, help="calibration samples of 512 tokens (default: 128)")
    parser.add_argument(
        "--text", type=Path, nargs="*", default=LICENSES, help="text for real models (default: licenses)"
    )
    parser.add_argument("--tokens", type=int, default=16 * WINDOW, help="tokens of the text (default: 8192)")
    parser.add_argument("--answers", type=int, default=8, help="answers of the demo model per skill (default: 8)")
    parser.add_argument("--questions", type=int, default=48, help="questions per skill; 0: no questions (default: 48)")
    parser.add_argument("--json", type=Path, help="write results to this file")
    args = parser.parse_args()

    found: list[dict[str, Any]] = []
    for name in args.model:
        with TemporaryDirectory() as scratch:
            model = REAL[name]().checkpoint if name in REAL else demo.CHAT
            if args.planted and name == "demo":
                outliers.plant(model, model := Path(scratch) / "planted")
            texts = list(answers(args.answers) if name == "demo" else windows(model, args.text, args.tokens))
            expected = Variant("", "", model)
            for variant in variants(args, name, model, Path(scratch)):
                row = {"model": name, "weights": variant.label, "made": variant.made}
                row["kv_cache_dtype"] = variant.kv_cache_dtype
                row |= compare(distributions(expected, texts), distributions(variant, texts), texts)
                if name == "demo" and args.questions:
                    row["right"] = share_right(variant, args.questions)
                found.append(row | {"bits": layer_bits(variant)})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {sum(text.num_measured for text in texts)} tokens\n")
        print(table([one for one in found if one["model"] == name]) + "\n", flush=True)


def variants(args: argparse.Namespace, name: str, model: Path, scratch: Path) -> Iterator[Variant]:
    """Variants to measure. Each checkpoint is quantized just before it is yielded."""
    is_demo = name == "demo"
    for quantization in args.quantization:
        yield Variant(quantization, "at load", model, quantization)
    for quantization in (each for each in ("none", "w8a8") if each in args.quantization):
        yield Variant(quantization, "at load", model, quantization, "int8")
    for number, method in enumerate(args.method if args.method is not None else WRITTEN if is_demo else REAL_METHODS):
        options = msgspec.structs.replace(WRITTEN[method], calib_size=args.calib_size, eval_size=1)
        quantize(model, scratch / str(number), options)
        yield Variant(method, "penstock quantize", scratch / str(number))
    for kind in args.gguf if args.gguf is not None else GGUF if is_demo else ():
        write_gguf_type(model, scratch / f"{kind}.gguf", kind)
        yield Variant(kind, "GGUF", scratch / f"{kind}.gguf")
    for kind in args.bitsandbytes if is_demo else ():
        write_bitsandbytes(model, scratch / f"bitsandbytes {kind}", kind)
        yield Variant(kind, "bitsandbytes", scratch / f"bitsandbytes {kind}")
    for given in args.checkpoint:
        label, _, folder = given.partition("=")
        yield Variant(label, "other tool", Path(folder))


def layer_bits(variant: Variant) -> float:
    """Bits per weight of the layers' matrices, including scales: as stored in the checkpoint, or in the engine if
    weights are quantized at load."""
    if variant.path.suffix == ".gguf":
        blocks = [tensor for name, tensor in GGUFFile(variant.path).tensors.items() if name.startswith("blk.")]
        matrices = [tensor for tensor in blocks if len(tensor.shape) > 1]
        return 8 * sum(tensor.size for tensor in matrices) / sum(prod(tensor.shape) for tensor in matrices)
    size = model_size_of(read_config_json(variant.path))
    if variant.quantization != "none":
        return 8 * bytes_per_weight(size, variant.quantization, "bfloat16")[0]
    files = [load_file(file) for file in sorted(variant.path.glob("*.safetensors"))]
    layers = [tensor for file in files for name, tensor in file.items() if ".layers." in name and "norm" not in name]
    return 8 * sum(tensor.nbytes for tensor in layers) / size.layer_weights


def answers(count: int) -> Iterator[Text]:
    """Held-out conversations of the demo model; the tokens of their answers are measured."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.CHAT)
    for conversations in evaluate.held_out(count, 1).values():
        for conversation in conversations:
            prompt = evaluate.render(tokenizer, conversation, prompt_only=True)
            answer = evaluate.render(tokenizer, conversation).removesuffix("\n").removeprefix(prompt)
            answer_ids = tokenizer.encode(answer)
            yield Text(tokenizer.encode(prompt) + answer_ids, len(answer_ids))


def windows(model: Path, files: Sequence[Path], tokens: int) -> Iterator[Text]:
    """Split the first ``tokens`` tokens of a text into windows of ``WINDOW`` tokens."""
    from transformers import AutoTokenizer

    tokenizer, step = AutoTokenizer.from_pretrained(model), WINDOW - 1
    ids = tokenizer("\n".join(file.read_text() for file in files), add_special_tokens=False)["input_ids"]
    for first in range(0, min(len(ids), tokens) - step + 1, step):
        yield Text([tokenizer.bos_token_id, *ids[first : first + step]], step)


def distributions(variant: Variant, texts: Sequence[Text]) -> Iterator[Tensor]:
    """Log probabilities of each text's measured tokens in chunks, ``[tokens, vocabulary]`` float32."""
    backend = ops.backend(torch.device("cpu"))
    folder = checkpoint_folder(variant.path) if variant.path.suffix == ".gguf" else variant.path
    model = load_model(folder, backend, LoadOptions(dtype=torch.bfloat16, quantization=variant.quantization))
    longest, kept = max(len(text.ids) for text in texts), variant.kv_cache_dtype.replace("auto", "")
    cache = backend.new_kv_cache(model.kv_specs(BLOCK, kept), -(-longest // BLOCK), torch.device("cpu"))
    for text in texts:
        for hidden in hidden_states(model, cache, text).split(CHUNK):
            yield model.logits(hidden.contiguous()).log_softmax(-1)


def hidden_states(model: Model, cache: list[Any], text: Text) -> Tensor:
    """Hidden states that predict a text's measured tokens, ``[num_measured, hidden]``."""
    count = len(text.ids)

    def queries(size: int, length: int) -> AttentionMetadata:
        starts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, size], [length]))
        return AttentionMetadata(starts, lengths, torch.arange(-(-count // BLOCK), dtype=torch.int32)[None])

    batch = Batch(
        token_ids=torch.tensor(text.ids),
        positions=torch.arange(count),
        slot_mapping=torch.arange(count),
        attention=queries(count, count),
        logits_indices=torch.arange(count - text.num_measured - 1, count - 1),
        logits_attention=queries(text.num_measured, count - 1),
    )
    return model.forward(batch, cache)


def compare(expected: Iterator[Tensor], found: Iterator[Tensor], texts: Sequence[Text]) -> dict[str, Any]:
    divergence, agree, tokens, loss, loss_before = 0.0, 0, 0, 0.0, 0.0
    ids = [part for text in texts for part in torch.tensor(text.ids[-text.num_measured :]).split(CHUNK)]
    for before, after, targets in zip(expected, tqdm(found, total=len(ids), leave=False), ids, strict=True):
        divergence += float((before.exp() * (before - after)).sum())
        agree += int((before.argmax(-1) == after.argmax(-1)).sum())
        loss -= float(after.gather(1, targets[:, None]).sum())
        loss_before -= float(before.gather(1, targets[:, None]).sum())
        tokens += len(before)
    return {
        "perplexity": exp(loss / tokens),
        "ratio": exp((loss - loss_before) / tokens),
        "divergence": divergence / tokens,
        "same_top_token": agree / tokens,
    }


def share_right(variant: Variant, count: int) -> float:
    """Share of held-out questions that ``penstock serve`` answers correctly."""
    drawn = [c for conversations in evaluate.held_out(count, 0).values() for c in conversations]
    questions = [c for c in drawn if c.check is not evaluate.Check.FREE]
    flags = ["--quantization", variant.quantization, "--kv-cache-dtype", variant.kv_cache_dtype]
    with Served("--model", str(variant.path), *flags) as server:
        given = evaluate.Remote(f"{server.root}/v1", None).ask(questions)
    return sum(map(evaluate.is_right, given, questions)) / len(questions)


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| weights | quantized by | KV cache | perplexity | × bf16 | KL, nats | same top token | right | bits |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        right = f"{one['right']:.1%}" if "right" in one else "–"
        names = f"`{one['weights']}` | {one['made']} | `{one['kv_cache_dtype']}`"
        figures = (
            f"{one['perplexity']:.4f} | {one['ratio']:.4f} | {one['divergence']:.4f} | {one['same_top_token']:.2%}"
        )
        lines.append(f"| {names} | {figures} | {right} | {one['bits']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
