"""A checkpoint that copies its prompt: it tries to generate any text, also where a constraint forbids parts of it.

The single layer attends to the token ``OFFSET`` positions earlier (queries and keys are constants, which rotary
embeddings turn into functions of the distance), and predicts this token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from penstock import demo

OFFSET = 600
"""Distance of a token from its copy; the maximum length of an output."""
CODE = 128
"""Dimensions of the code of a token."""


def copying_model(folder: Path, template: str, markers: Sequence[str] = ()) -> Path:
    """Write the checkpoint.

    Args:
        template: chat template.
        markers: texts to add to the tokenizer as added tokens.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.CHAT)
    new = [marker for marker in markers if marker not in tokenizer.get_vocab()]
    tokenizer.add_tokens([AddedToken(marker, special=True, normalized=False) for marker in new])
    tokenizer.chat_template = template
    return save_copying_model(folder, tokenizer, OFFSET, 4096)


def save_copying_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, offset: int, max_model_len: int, *, sliding_window: bool = False
) -> Path:
    """Write a checkpoint that predicts the token ``offset`` positions before the last one.

    Args:
        sliding_window: limit the attention to ``offset`` tokens, for long prompts.
    """
    config = MistralConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=4 * CODE,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=CODE,
        max_position_embeddings=max_model_len,
        sliding_window=offset + 1 if sliding_window else None,
        rope_theta=50.0,
        tie_word_embeddings=False,
        eos_token_id=int(tokenizer.eos_token_id),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = MistralForCausalLM(config).float()
    codes = torch.randn(config.vocab_size, CODE, generator=torch.Generator().manual_seed(1)).sign()
    frequencies = 50.0 ** -(torch.arange(0, CODE, 2) / CODE)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.zero_()
        embedding = model.get_input_embeddings().weight
        embedding[:, 0], embedding[:, CODE : 2 * CODE] = 1, codes
        attention.k_proj.weight[: CODE // 2, 0] = 10
        attention.q_proj.weight[:, 0] = 10 * torch.cat(
            [torch.cos(offset * frequencies), -torch.sin(offset * frequencies)]
        )
        attention.v_proj.weight[:, CODE : 2 * CODE] = torch.eye(CODE)
        attention.o_proj.weight[2 * CODE : 3 * CODE] = torch.eye(CODE)
        model.lm_head.weight[:, 2 * CODE : 3 * CODE] = codes
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompt_to_copy(token_ids: Sequence[int], end: int) -> list[int]:
    """Prompt after which the model generates ``token_ids``, and then the token ``end``."""
    assert len(token_ids) < OFFSET
    return [*token_ids, *[end] * (OFFSET + 1 - len(token_ids))]
