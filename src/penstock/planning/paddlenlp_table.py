"""PaddleNLP's table of recommended ``BLOCK_BS`` by model and memory, beside what the sums give."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planning.kv_size import kv_specs
from penstock.planning.kv_spec import SCALE_BYTES, bytes_per_token
from penstock.planning.model_size import Shape, shape_of

MEMORY = 80 * 2**30
"""Bytes of each GPU in the table."""
GPUS = 8
"""Of a node."""
LENGTH = 8192
"""Tokens for which its models are exported."""
RESERVE = 17.9e9
"""Bytes of a GPU that weights and cache leave free. The document does not say how many: they are chosen so that the
first row agrees, and the others are compared with it."""
WEIGHT = {"int4": 0.5 + SCALE_BYTES / 128, "int8": 1.0, "fp8": 1.0}
"""Bytes of a weight."""

DEEPSEEK_V3 = shape_of(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
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
"""Of its ``config.json``: V3 and R1 have the same."""


@dataclass(frozen=True)
class Row:
    """One of the table."""

    name: str
    nodes: int
    layers: str
    """What weights of layers are kept in."""
    ahead: str
    """The same of the layer that guesses (MTP); nothing where there is none."""
    recommended: int

    @property
    def weights(self) -> float:
        """Bytes on each GPU."""
        shape: Shape = DEEPSEEK_V3
        ahead = shape.ahead_weights * WEIGHT[self.ahead] if self.ahead else 0.0
        whole = shape.layer_weights * WEIGHT[self.layers] + shape.embedding_weights * 2 + ahead
        return whole / (self.nodes * GPUS)

    @property
    def sequence(self) -> int:
        """Bytes that a sequence of the longest length keeps on each GPU, which all keep the same latent vectors."""
        return bytes_per_token(kv_specs(DEEPSEEK_V3, mtp=bool(self.ahead))) * LENGTH

    @property
    def summed(self) -> int:
        """``BLOCK_BS`` by the sums."""
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
