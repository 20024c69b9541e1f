"""Whisper checkpoints with random weights, and audio."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

RATE = 16_000
SECONDS = 6
"""Length of a window in seconds; 30 in published models."""
END = "<|endoftext|>"
START = "<|startoftranscript|>"
LANGUAGES = ("en", "de", "zh")
TASKS = ("translate", "transcribe")
ALIGNMENT_HEADS = [[1, 0], [2, 1], [1, 1]]
SPECIAL = [END, START, *(f"<|{name}|>" for name in (*LANGUAGES, *TASKS, "startofprev", "nospeech", "notimestamps"))]


def save_random(
    folder: Path, seed: int = 3, bins: int = 80, tied: bool = True, english: bool = False
) -> WhisperForConditionalGeneration:
    """Save a checkpoint with all its files. Language and timestamp tokens are about as likely as other tokens.

    Args:
        bins: number of mel bins.
        english: save an English-only model.
    """
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", special=False) for i in range(50 * SECONDS + 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END).save_pretrained(folder)
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    ends = {"eos_token_id": ids[END], "pad_token_id": ids[END], "bos_token_id": ids[END]}
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=96,
        decoder_ffn_dim=80,
        num_mel_bins=bins,
        max_source_positions=50 * SECONDS,
        max_target_positions=64,
        init_std=0.2,
        tie_word_embeddings=tied,
        decoder_start_token_id=ids[START],
        **ends,
    )
    model = WhisperForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("layer_norm.weight") else 0.0, 0.2)
    multilingual = {
        "is_multilingual": True,
        "lang_to_id": {f"<|{name}|>": ids[f"<|{name}|>"] for name in LANGUAGES},
        "task_to_id": {name: ids[f"<|{name}|>"] for name in TASKS},
    }
    model.model.decoder.embed_tokens.weight.data[ids[END]] *= 0.2  # makes transcripts long
    model.generation_config = GenerationConfig(
        decoder_start_token_id=ids[START],
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        max_initial_timestamp_index=50,
        suppress_tokens=[1, 2, 3],
        begin_suppress_tokens=[32, ids[END]],
        max_length=64,
        alignment_heads=ALIGNMENT_HEADS,
        **ends,
        **({"is_multilingual": False} if english else multilingual),
    )
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=bins, chunk_length=SECONDS).save_pretrained(folder)
    return model


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones and noise, ``[samples]`` float32 with values of 16-bit audio."""
    rng, time = np.random.default_rng(seed), np.arange(int(RATE * seconds)) / RATE
    pitch = rng.uniform(100, 2000, int(seconds * 2) + 1)[(time * 2).astype(int)]
    samples = 0.3 * np.sin(2 * np.pi * pitch * time) * np.sin(3 * time) + 0.05 * rng.normal(size=len(time))
    return np.round(samples * 32_767).astype(np.int16).astype(np.float32) / 32_768


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    """A 16-bit WAV file with the same samples in all channels."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(np.repeat((samples * 32_768).astype(np.int16), channels).tobytes())
    return file.getvalue()
