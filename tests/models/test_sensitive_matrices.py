"""4-bit formats use 8 bits for value projections, and for down projections of every third layer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch
from encoder_checkpoints import draw_config
from families import FAMILIES, WITH_EXPERTS
from transformers import PreTrainedConfig, WhisperConfig
from transformers_architectures import save, tiny

from penstock.core.quantization import SCHEMES, Format
from penstock.layers import BuildContext
from penstock.models import read_config
from penstock.models.read_config import ModelImpl
from penstock.models.registry import family_of
from penstock.models.weights import Checkpoint
from penstock.models.weights.dummy import DummyWeights
from penstock.ops import backend
from penstock.parallel import Shard
from penstock.quant import Matrix

CPU = torch.device("cpu")
ENCODERS = {
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "gte": "GteModel",
    "modernbert": "ModernBertModel",
}
VALUES = {"v_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
"""Matrices that compute values, or in latent attention the latent vectors."""
OTHERS = re.compile("att|laurel|per_layer")
"""Pattern of matrices that are no down projections, and may have as many outputs."""
FUSED = {"c_attn", "query_key_value"}
"""Matrices that compute queries, keys and values together."""
OF_TRANSFORMERS = (
    "ApertusForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoXForCausalLM",
    "OPTForCausalLM",
    "PersimmonForCausalLM",
    "PhiForCausalLM",
    "YoutuForCausalLM",
)
"""Architectures that run with ``--model-impl transformers``."""


@dataclass(frozen=True)
class Built:
    """A matrix that a layer has requested from ``BuildContext``."""

    name: str
    outputs: int
    inputs: int
    bits: int


@dataclass(frozen=True)
class RecordingContext(BuildContext):
    """``BuildContext`` that records the format of each matrix of the layers."""

    built: list[Built] = field(default_factory=list)

    def matrix(
        self,
        names: list[str],
        inputs: int,
        shards: list[Shard],
        format: Format | None = None,
        bias: torch.Tensor | None = None,
    ) -> Matrix:
        for name, shard in zip(names, shards, strict=True):
            self.built.append(Built(name, shard.total, inputs, (format or self.scheme.format_of(name)).bits))
        return super().matrix(names, inputs, shards, format, bias)


def build(folder: Path, model_impl: ModelImpl = "penstock") -> list[Built]:
    """The quantized matrices of a checkpoint's layers with ``--quantization wint4``."""
    config = read_config(folder, model_impl)
    is_library = model_impl == "transformers"
    weights = Checkpoint(folder) if is_library else DummyWeights(folder, torch.bfloat16)
    context = RecordingContext(backend(CPU), weights, torch.bfloat16, CPU, 64, scheme=SCHEMES["wint4"])
    family_of(config).build(context, config, 0)
    return [each for each in context.built if each.bits]


def check(built: list[Built], hidden_size: int) -> None:
    """Check that each matrix has the bits of its role. Down projections are the matrices outside attention with as many
    outputs as the hidden size."""
    layers: dict[int, list[Built]] = {}
    for each in built:
        if numbers := [int(part) for part in each.name.split(".") if part.isdigit()]:
            layers.setdefault(numbers[0], []).append(each)
    assert layers.keys() >= {0, 1, 2}
    for number, matrices in layers.items():
        in_third = 8 if number % 3 == 2 else 4
        roles = set()
        for each in matrices:
            last, expected = each.name.split(".")[-1], 4
            if last in VALUES:
                expected, role = 8, "value"
            elif last in FUSED:
                expected, role = in_third, "value"
            elif not OTHERS.search(each.name) and each.outputs == hidden_size:
                expected, role = in_third, "down"
            else:
                role = "other"
            roles.add(role)
            assert each.bits == expected, each
        assert roles == {"value", "down", "other"}, matrices


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_sensitive_matrices_of_decoders_have_8_bits(family: str, tmp_path: Path) -> None:
    config = (FAMILIES | WITH_EXPERTS)[family](Random(family))
    config.intermediate_size = 96  # differs from the hidden size
    if family == "Gemma4":  # every layer has a projection of values, and no other matrix has as many outputs
        config.attention_k_eq_v, config.num_kv_shared_layers, config.hidden_size_per_layer_input = False, 0, 0
    if family == "Gemma3n":
        config.intermediate_size, config.num_kv_shared_layers = [96] * 6, 0
    save_config(config, tmp_path, f"{family}ForCausalLM")
    check(build(tmp_path), config.hidden_size)


@pytest.mark.parametrize("family", ENCODERS)
def test_sensitive_matrices_of_encoders_have_8_bits(family: str, tmp_path: Path) -> None:
    drawn = (draw_config(family, Random(seed)) for seed in count())
    config = next(config for config in drawn if config.num_hidden_layers == 3)
    save_config(config, tmp_path, ENCODERS[family])
    check(build(tmp_path), config.hidden_size)


def test_stored_4_bit_integers_keep_4_bits() -> None:
    """Weights in other stored formats are dequantized, and rounded to 8 bits."""
    scheme = SCHEMES["w4a8"]
    assert scheme.sensitive
    assert scheme.kept(scheme.sensitive, Format(4, 32, asymmetric=True)) == scheme.layers
    for stored in (Format(4, 64, floating=True), Format(8, 32), Format()):
        assert scheme.kept(scheme.sensitive, stored) == scheme.sensitive


def test_sensitive_matrices_of_whisper_decoder_have_8_bits(tmp_path: Path) -> None:
    sizes = {"decoder_layers": 3, "decoder_ffn_dim": 96, "decoder_attention_heads": 4, "max_target_positions": 64}
    sizes |= {"encoder_layers": 2, "encoder_ffn_dim": 96, "encoder_attention_heads": 4, "d_model": 64}
    save_config(WhisperConfig(**sizes), tmp_path, "WhisperForConditionalGeneration")
    check(build(tmp_path), 64)


@pytest.mark.parametrize("architecture", OF_TRANSFORMERS)
def test_sensitive_matrices_of_transformers_models_have_8_bits(architecture: str, tmp_path: Path) -> None:
    config = tiny(architecture)
    save(architecture, config, tmp_path)
    check(build(tmp_path, "transformers"), 64)


def save_config(config: PreTrainedConfig, folder: Path, architecture: str) -> None:
    config.architectures = [architecture]
    config.save_pretrained(folder)
