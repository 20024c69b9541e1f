"""Shapes of the benchmark's models, and the bytes and operations of their steps."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
}
FORMATS = {"bf16": "none", "fp8": "fp8", "int8": "w8a8", "int4": "wint4"}
"""Values of the option ``quantization`` by name in the tables."""


@dataclass(frozen=True)
class Model:
    """Shape of a decoder. Weights are random (``load_format="dummy"``), since no result depends on them."""

    name: str
    kind: str
    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    theta: float
    experts: int = 0
    """Number of experts per layer; ``inter`` is the size of one expert. 0: a dense model."""
    top_k: int = 0
    batches: tuple[int, ...] = (1, 8, 64, 256)
    """Batch sizes of timed decoding, limited by the KV cache."""
    other: dict[str, Any] = field(default_factory=dict, hash=False)
    """Additional entries of ``config.json``."""

    def config(self) -> dict[str, Any]:
        """Content of ``config.json``."""
        return (
            {
                "architectures": [ARCHITECTURES[self.kind]],
                "model_type": self.kind,
                "hidden_size": self.hidden,
                "intermediate_size": self.inter,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "vocab_size": self.vocab,
                "tie_word_embeddings": self.tied,
                "rope_theta": self.theta,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 32768,
                "hidden_act": "silu",
                "attention_bias": False,
                "torch_dtype": "bfloat16",
                "bos_token_id": None,
                "eos_token_id": 1,
                "pad_token_id": 0,
            }
            | self._experts()
            | self.other
        )

    def _experts(self) -> dict[str, Any]:
        if not self.experts:
            return {}
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.inter,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def save(self, folder: Path) -> Path:
        """Write ``config.json`` to a folder; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        return folder

    @property
    def attention_weights(self) -> int:
        """Number of weights of a layer's attention."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    def weight_bytes(self, format: str, tokens: int) -> float:
        """Bytes of weights and scales read by a step with ``tokens`` tokens. Experts: expected number of active experts
        if all are equally likely."""
        from penstock.core.quantization import SCHEMES

        def each(format: Any) -> float:
            """Bytes per weight; per-output scales are negligible."""
            scale = 4 / format.group_size if format.group_size and format.rows_per_scale == 1 else 0
            return format.bits / 8 + scale if format.bits else 2

        scheme, mlp = SCHEMES[FORMATS[format]], 3 * self.hidden * self.inter
        if self.experts:
            mlp = round(mlp * self.experts * (1 - (1 - self.top_k / self.experts) ** tokens))
            mlp += self.hidden * self.experts
        layers = self.layers * (self.attention_weights + mlp)
        return layers * each(scheme.layers) + self.head_weights * each(scheme.head)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of 16-bit keys and values of ``tokens`` tokens."""
        return 2 * 2 * tokens * self.layers * self.kv_heads * self.head_dim

    def flops(self, tokens: int, contexts: int, sampled: int) -> float:
        """Floating-point operations of a step.

        Args:
            tokens: number of computed tokens.
            contexts: sum over these tokens of the number of tokens that each attends to.
            sampled: number of tokens whose logits are computed.
        """
        mlp = 3 * self.hidden * self.inter * max(self.top_k, 1) + self.hidden * self.experts
        products = 2 * tokens * self.layers * (self.attention_weights + mlp) + 2 * sampled * self.head_weights
        return products + 4 * contexts * self.layers * self.heads * self.head_dim


QWEN3 = Model("Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 1e6)
LLAMA = Model("Llama-3.1-8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 5e5)
QWEN3_MOE = Model("Qwen3-30B-A3B", "qwen3_moe", 2048, 768, 48, 32, 4, 128, 151936, False, 1e6, 128, 8, (1, 8, 64))
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "moe_layer_freq": 1,
}
DEEPSEEK = Model("DeepSeek-V2-Lite", "deepseek_v2", 2048, 10944, 27, 16, 16, 64, 102400, False, 1e4, other=LATENT)
"""Model with latent attention. Only used to compare bits, since its bytes and operations are not modeled here."""
TINY = Model("tiny", "qwen3", 64, 96, 1, 4, 2, 16, 301, False, 1e4)


@dataclass(frozen=True)
class Scale:
    """Sizes of the benchmark, on a GPU or in Triton's interpreter."""

    interpret: bool = False
    models: tuple[Model, ...] = (QWEN3, LLAMA)
    """Models for measurements of speed, and for comparison of outputs with float32."""
    compared: tuple[Model, ...] = (
        QWEN3,
        replace(LLAMA, layers=8),
        replace(QWEN3_MOE, layers=6),
        replace(DEEPSEEK, layers=6),
    )
    """Models for comparison of bits in different batches; the first model is compared in all formats."""
    measured: tuple[Model, ...] = (QWEN3_MOE,)
    """Additional models for measurements of speed, without comparison with float32."""
    dtype: str = "bfloat16"
    """Dtype of the computation. The interpreter multiplies bfloat16 incorrectly."""
    formats: tuple[str, ...] = ("bf16", "fp8", "int8", "int4")
    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1024
    steps: int = 32
    """Minimum number of timed decode steps."""
    prompts: tuple[int, ...] = (2048, 8192)
    probe: int = 230
    """Prompt length of the compared sequences; with their outputs they exceed 256 tokens."""
    probe_output: int = 60
    others: tuple[int, ...] = (1, 6, 30, 62, 254)
    """Numbers of additional sequences in the batch of the compared sequences (one per kind of sampling)."""
    other_tokens: int = 300
    chunks: tuple[int, ...] = (8192, 160)
    """``max_num_batched_tokens`` of the compared engines."""
    compared_blocks: int = 1024
    """KV blocks of each compared engine; several engines share a GPU. The largest batches need more blocks, so that
    some sequences are preempted."""
    ops: str = "cuda"
    options: dict[str, Any] = field(default_factory=dict)
    """Options of all engines."""

    @property
    def device(self) -> str:
        return "cpu" if self.interpret else "cuda"


FULL = Scale()
INTERPRETED = Scale(
    interpret=True,
    models=(TINY,),
    compared=(TINY, replace(TINY, name="tiny-experts", kind="qwen3_moe", experts=4, top_k=2)),
    measured=(),
    dtype="float16",
    formats=("bf16", "fp8", "int8", "int4"),
    batches=(1, 2),
    context=17,
    steps=1,
    prompts=(33,),
    probe=20,
    probe_output=3,
    others=(2,),
    other_tokens=20,
    chunks=(64, 9),
    options={"block_size": 16, "num_gpu_blocks_override": 64, "max_model_len": 512, "max_num_seqs": 8},
)
