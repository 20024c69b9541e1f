"""Checks of whole models: error relative to float32, CUDA graphs against eager mode, and contract 2 (the bits of a
request's output do not depend on other requests)."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from engines import Answer, answers, engine, prompts, request, time_decoding
from shapes import Model, Scale

MAX_LAYERS = 6
"""Maximum number of layers of models compared with float32: their weights are written to disk."""
CAPTURED = (1, 2, 3, 8, 33, 64, 256)
"""Sizes of CUDA graphs; other batch sizes are padded to one of them."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 7, "logprobs": 3},
}


def models(scale: Scale, model_name: str) -> dict[str, Any]:
    """Compare the logits after each token of a prompt with the float32 reference, with the same rounded weights."""
    model, found = next(each for each in scale.models if each.name == model_name), {}
    short = replace(model, layers=min(model.layers, MAX_LAYERS))
    with TemporaryDirectory() as folder:
        save_weights(short, Path(folder), torch.device(scale.device), getattr(torch, scale.dtype))
        for format in ("bf16", "fp8"):
            found[f"{short.name}, {short.layers} layers, {format}"] = _against_float32(
                short, scale, format, Path(folder)
            )
    return found


def save_weights(model: Model, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Write a checkpoint with random weights."""
    from safetensors.torch import save_file

    model.save(folder)
    generator = torch.Generator(device).manual_seed(0)
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def matrix(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5
        return drawn.to(dtype).cpu()

    def norm(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=generator, device=device) + 0.5).to(dtype).cpu()

    tensors = {"model.embed_tokens.weight": matrix(model.vocab, model.hidden), "model.norm.weight": norm(model.hidden)}
    if not model.tied:
        tensors["lm_head.weight"] = matrix(model.vocab, model.hidden)
    for i in range(model.layers):
        shapes = {
            "self_attn.q_proj": (q, model.hidden),
            "self_attn.k_proj": (kv, model.hidden),
            "self_attn.v_proj": (kv, model.hidden),
            "self_attn.o_proj": (model.hidden, q),
            "mlp.gate_proj": (model.inter, model.hidden),
            "mlp.up_proj": (model.inter, model.hidden),
            "mlp.down_proj": (model.hidden, model.inter),
        }
        norms = {"input_layernorm": model.hidden, "post_attention_layernorm": model.hidden}
        if model.kind == "qwen3":
            norms |= {"self_attn.q_norm": model.head_dim, "self_attn.k_norm": model.head_dim}
        tensors |= {f"model.layers.{i}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": norm(size) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors")


def _against_float32(model: Model, scale: Scale, format: str, folder: Path) -> dict[str, Any]:
    given = prompts(model, 1, scale.probe)[0]
    fixed = {"model": str(folder), "load_format": "auto", "max_num_seqs": 2, "max_model_len": 2 * scale.probe}
    fixed |= {"max_num_batched_tokens": max(scale.probe, 64), "num_gpu_blocks_override": 64}

    def logits(**options: Any) -> torch.Tensor:
        with engine(model, scale, format, **fixed | options) as one:
            (answer,) = answers(one, [request("a", given, 1, return_context_logits=True)]).values()
        return torch.frombuffer(bytearray(answer.context_logits), dtype=torch.float32).view(len(given), model.vocab)

    exact = logits(ops="reference", dtype="float32")
    pytorch, ours = logits(ops="reference"), logits()
    error, theirs = _error(ours, exact), _error(pytorch, exact)
    return {
        "error": error,
        "error of PyTorch in this dtype": theirs,
        "same top token": float((ours.argmax(-1) == exact.argmax(-1)).double().mean()),
        "right": error <= max(1.5 * theirs, 1e-4),
    }


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def graphs(scale: Scale) -> dict[str, Any]:
    """Check that CUDA graphs and eager mode give the same bits, and time a decode step of both."""
    model, found = scale.models[0], dict[str, Any]()
    outputs = dict[str, list[Answer]]()
    for name, eager in (("graphs", False), ("eager", True)):
        fixed = {"max_num_batched_tokens": scale.chunks[0], "num_gpu_blocks_override": scale.compared_blocks}
        with engine(model, scale, enforce_eager=eager, **fixed | scale.options) as one:
            together = [
                request(f"{kind} {i}", prompt, scale.probe_output, **sampling)
                for i, prompt in enumerate(prompts(model, 3, scale.probe))
                for kind, sampling in SAMPLINGS.items()
            ]
            outputs[name] = list(answers(one, together).values())
            timed = time_decoding(one, prompts(model, 1, scale.context, 5), scale.steps, scale.chunks[0])
            found[f"milliseconds of a step, {name}"] = timed.step * 1e3
    return found | {"right": outputs["graphs"] == outputs["eager"]}


def contract(scale: Scale, model_name: str, format: str) -> dict[str, Any]:
    """Check that a request's tokens and logprobs are identical alone, in a batch, in chunks, with the prefix cache, and
    with one or two steps in flight."""
    model = next(each for each in scale.compared if each.name == model_name)
    rows: list[dict[str, Any]] = []
    expected: dict[str, Answer] = {}
    for settings in _settings(scale, format):
        try:
            rows += _compare(model, scale, format, settings, expected)
        except Exception as error:
            failure = "".join(traceback.format_exception(error))[-1500:]
            rows.append({"model": model.name, "format": format, **settings, "right": False, "failure": failure})
    return {"checks": rows, "count": len(rows), "wrong": [row for row in rows if not row["right"]]}


def _settings(scale: Scale, format: str) -> Iterator[dict[str, Any]]:
    whole, *parts = scale.chunks
    yield {"max_num_batched_tokens": whole, "max_concurrent_batches": 2}
    if format != scale.formats[0]:
        return
    yield {"max_num_batched_tokens": whole, "max_concurrent_batches": 1, "enforce_eager": True}
    for chunk in parts:
        yield {"max_num_batched_tokens": chunk, "max_concurrent_batches": 2, "max_num_seqs": min(chunk, 64)}


def _compare(
    model: Model, scale: Scale, format: str, settings: dict[str, Any], expected: dict[str, Answer]
) -> list[dict[str, Any]]:
    """Compare outputs of one engine with the first outputs, which are stored in ``expected``."""
    probe = prompts(model, 1, scale.probe, 3)[0]
    others = [n for n in scale.others if n < settings.get("max_num_seqs", 256) - 1]
    rounds = [(0, False), (0, True), *((n, False) for n in others), *((n, True) for n in others[-1:])]
    found = []
    fixed = {"cudagraph_capture_sizes": CAPTURED, "num_gpu_blocks_override": scale.compared_blocks} | scale.options
    with engine(model, scale, format, **fixed | settings) as one:
        for number, (count, is_warm) in enumerate(rounds):
            salt = "" if is_warm or not number else str(number)  # the first round fills the cache
            other_requests = [
                request(f"o{i}", prompts(model, 1, length, i)[0], 1 + i % scale.probe_output, temperature=0.7, seed=i)
                for i, length in enumerate(1 + i * 37 % scale.other_tokens for i in range(count))
            ]
            probes = [request(kind, probe, scale.probe_output, salt, **options) for kind, options in SAMPLINGS.items()]
            middle = len(other_requests) // 2
            outputs = answers(one, [*other_requests[:middle], *probes, *other_requests[middle:]])
            for kind in SAMPLINGS:
                answer, first = outputs[kind], expected.setdefault(kind, outputs[kind])
                row = {"model": model.name, "format": format, **settings, "others": count, "sampling": kind}
                row |= {"cached tokens": answer.cached_tokens, "cached": is_warm}
                same = (answer.token_ids, answer.logprobs) == (first.token_ids, first.logprobs)
                found.append(row | {"right": same and bool(answer.cached_tokens) >= is_warm})
    return found
