"""Small checkpoints of random weights for tests."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import demo

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def save(config: PreTrainedConfig, folder: Path, **options: Any) -> PreTrainedModel:
    """Write a checkpoint of random weights with the tokenizer of the demo model; return the model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.eval().save_pretrained(folder, **options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.CHAT / name, folder / name)
    return model


def randomize(model: PreTrainedModel) -> None:
    """Set random weights, large enough that positions and windows matter."""
    import torch

    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.5 if name.endswith("bias") else 0.2)
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    for name, factor in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(factor, 0.5, 1.5)
