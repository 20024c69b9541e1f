"""Small encoder checkpoints of random weights with a WordPiece tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    GteConfig,
    ModernBertConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

WORDS = "the a cat dog river bridge opens closes early late where when who is was in of train city light".split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
OF_MODERNBERT = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 32}


def draw_config(family: str, rng: Random) -> PreTrainedConfig:
    """A random configuration of an encoder family."""
    sizes = SIZES | {"num_attention_heads": rng.choice((2, 4)), "num_hidden_layers": rng.choice((1, 2, 3, 4))}
    act = rng.choice(("gelu", "gelu_new", "relu", "silu"))
    match family:
        case "bert":
            return BertConfig(**sizes, max_position_embeddings=320, hidden_act=act, type_vocab_size=rng.choice((1, 2)))
        case "roberta":
            return RobertaConfig(**sizes | {"pad_token_id": 1}, max_position_embeddings=322, type_vocab_size=1)
        case "xlm-roberta":
            position = {"max_position_embeddings": 322, "layer_norm_eps": rng.choice((1e-5, 1e-12))}
            return XLMRobertaConfig(**sizes | {"pad_token_id": 1}, **position, type_vocab_size=rng.choice((1, 2)))
        case "gte":
            return GteConfig(**sizes, max_position_embeddings=512, type_vocab_size=rng.choice((0, 1, 2)))
        case _:
            drawn = {
                name: rng.random() < 0.5 for name in ("norm_bias", "mlp_bias", "attention_bias", "classifier_bias")
            }
            pooling = {"classifier_pooling": rng.choice(("cls", "mean"))}
            return ModernBertConfig(**sizes, **OF_MODERNBERT, **drawn, **pooling, max_position_embeddings=512)


def save_encoder(config: PreTrainedConfig, folder: Path, labels: int = 0) -> Any:
    """Save a checkpoint with transformers; return the model. ``labels``: classes of a classifier; 0: no classifier."""
    torch.manual_seed(0)
    if labels:
        config.num_labels = labels
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModel.from_config(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.5 if name.endswith("bias") else 0.2)
        if "norm" in name.lower():
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.eval().save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with BERT's special tokens and token types; its vocabulary is ``WORDS``."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": INPUTS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | names))


def draw_text(rng: Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))
