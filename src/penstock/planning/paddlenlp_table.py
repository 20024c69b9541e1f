"""PaddleNLP's table of recommended ``BLOCK_BS`` by model, beside what our formulas give."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.checkpoint.kv_spec import SCALE_BYTES, bytes_per_token
from penstock.planning.kv_size import kv_specs
from penstock.planning.model_size import model_size_of

MEMORY = 80 * 2**30
"""Bytes of a GPU in the table."""
GPUS = 8
"""GPUs of a node in the table."""
LENGTH = 8192
"""Tokens of the longest sequence of the table's models."""
RESERVE = 17.9e9
"""Bytes of a GPU that weights and cache leave free. The document does not name them: they are chosen so that the first
row agrees, and the other rows show how well the formulas do."""
WEIGHT = {"int4": 0.5 + SCALE_BYTES / 128, "int8": 1.0, "fp8": 1.0}
"""Bytes of a weight, by format."""

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
"""From its ``config.json``, which is the same for V3 and R1."""


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    nodes: int
    layers: str
    """Format of the layers' weights, a key of ``WEIGHT``."""
    mtp: str
    """Format of the MTP layer's weights; empty where the model has no MTP layer."""
    recommended: int
    """``BLOCK_BS`` in the document."""

    @property
    def weights(self) -> float:
        """Bytes of weights on each GPU."""
        mtp = DEEPSEEK_V3.mtp_weights * WEIGHT[self.mtp] if self.mtp else 0.0
        whole = DEEPSEEK_V3.layer_weights * WEIGHT[self.layers] + DEEPSEEK_V3.embedding_weights * 2 + mtp
        return whole / (self.nodes * GPUS)

    @property
    def sequence(self) -> int:
        """Bytes of KV cache of the longest sequence on each GPU. Latent vectors are on every GPU."""
        return bytes_per_token(kv_specs(DEEPSEEK_V3, mtp=bool(self.mtp))) * LENGTH

    @property
    def summed(self) -> int:
        """``BLOCK_BS`` by our formulas."""
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
