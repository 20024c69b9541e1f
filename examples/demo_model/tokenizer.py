"""Tokenizer of the demo model: byte-level BPE trained on its corpus.

Digits and Chinese characters are always separate tokens, so that a number or a name is tokenized the same way in every
context; every byte is in the vocabulary, so that any text round-trips.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 3584
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special, as in Qwen3: decoding keeps them."""

WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train(texts: Iterable[str], context: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on rendered conversations."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{Han}"), behavior="isolated"),
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False) for token in MARKS])
    reserved = len(SPECIAL) + len(MARKS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - reserved,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )
    core.train_from_iterator(texts, trainer)
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    core.add_tokens([AddedToken(token, special=False) for token in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer's files, with the current template and a class name that exists in all transformers
    versions."""
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    kept = ("clean_up_tokenization_spaces", "eos_token", "model_max_length", "pad_token")
    config = {key: value for key, value in json.loads(path.read_text()).items() if key in kept}
    config |= {"model_input_names": ["input_ids", "attention_mask"], "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")
