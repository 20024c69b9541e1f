"""PaddleNLP's table of recommended ``BLOCK_BS`` by model, compared with Penstock's formulas."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.kv_spec import SCALE_BYTES, bytes_per_token
from penstock.planning.kv_size import kv_specs
from penstock.planning.model_size import model_size_of

MEMORY = 80 * 2**30
"""Memory of a GPU in the table, in bytes."""
GPUS = 8
"""Number of GPUs per node in the table."""
LENGTH = 8192
"""Maximum number of tokens of a sequence in the table."""
RESERVE = 17.9e9
"""Bytes of a GPU not used for weights and KV cache. PaddleNLP does not document them: they are fitted to the first row,
and the other rows show the accuracy of the formulas."""
WEIGHT = {"int4": 0.5 + SCALE_BYTES / 128, "int8": 1.0, "fp8": 1.0}
"""Bytes per weight, by format."""

DEEPSEEK_V3 = model_size_of(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
    }
)
"""Size of DeepSeek-V3 and R1, which have the same ``config.json``."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    nodes: int
    layers: str
    """Format of the layers' weights, a key of ``WEIGHT``."""
    mtp: str
    """Format of the MTP layer's weights; empty: no MTP layer."""
    recommended: int
    """``BLOCK_BS`` in PaddleNLP's table."""

    @property
    def weights(self) -> float:
        """Bytes of weights per GPU."""
        mtp = DEEPSEEK_V3.mtp_weights * WEIGHT[self.mtp] if self.mtp else 0.0
        whole = DEEPSEEK_V3.layer_weights * WEIGHT[self.layers] + DEEPSEEK_V3.embedding_weights * 2 + mtp
        return whole / (self.nodes * GPUS)

    @property
    def sequence(self) -> int:
        """Bytes of KV cache of the longest sequence per GPU. Latent vectors are stored on all GPUs."""
        return bytes_per_token(kv_specs(DEEPSEEK_V3, mtp=bool(self.mtp))) * LENGTH

    @property
    def computed(self) -> int:
        """``BLOCK_BS`` by Penstock's formulas."""
        return int((MEMORY - RESERVE - self.weights) / self.sequence)


ROWS = (
    Row("DeepSeek-R1/a8w8_fp8_wint4", 1, "int4", "", 40),
    Row("DeepSeek-R1-MTP/a8w8_fp8_wint4", 1, "int4", "fp8", 36),
    Row("DeepSeek-R1/weight_only_int4", 1, "int4", "", 40),
    Row("DeepSeek-R1-MTP/weight_only_int4", 1, "int4", "int8", 36),
    Row("DeepSeek-R1-2nodes/a8w8_fp8", 2, "fp8", "", 50),
    Row("DeepSeek-R1-MTP-2nodes/a8w8_fp8", 2, "fp8", "fp8", 36),
    Row("DeepSeek-R1-2nodes/weight_only_int8", 2, "int8", "", 40),
    Row("DeepSeek-R1-MTP-2nodes/weight_only_int8", 2, "int8", "int8", 36),
)
