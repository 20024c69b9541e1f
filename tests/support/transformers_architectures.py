"""Tiny checkpoints of every causal language model of transformers, run with ``model_impl="transformers"``.

``python tests/support/transformers_architectures.py`` updates the table of docs/transformers.md, ``--own`` only its
column of Penstock's own implementations.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import transformers
from checkpoints import SMALL
from repository import ROOT
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock import demo
from penstock.core import PenstockError, SamplingParams
from penstock.frontend.llm import LLM
from penstock.models.registry import has_family

PAGE = ROOT / "docs" / "transformers.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
HEADER = "| architecture | Penstock | transformers |\n|---|---|---|\n"
ALONE = "runs, one sequence at a time"
REFUSED = "refused: "
SIZES: dict[str, Any] = SMALL | {
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "decoder_layers": 3,
    "chunk_size": 32,
    "dim": 64,
    "embedding_size": 64,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "encoder_layers": 2,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "is_decoder": True,
    "kv_lora_rank": 32,
    "linear_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "mamba_chunk_size": 32,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "multi_query": False,
    "n_group": 1,
    "n_inner": 96,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rotary_dim": 16,
    "shared_expert_intermediate_size": 32,
    "ssm_state_size": 16,
    "state_size": 16,
    "sliding_window": 24,
    "topk_group": 1,
    "v_head_dim": 16,
    "vocab_size_per_layer_input": 300,
    "word_embed_proj_dim": 64,
}
"""Small sizes; each configuration class gets the fields that it defines."""
ROBERTA = ("Camembert", "Data2VecText", "Roberta", "RobertaPreLayerNorm", "XLMRoberta", "XLMRobertaXL", "Xmod")
"""Models that count positions from the padding index on; their tables of positions have as many more rows."""
HYBRID = ("BailingHybrid", "KimiLinear", "OlmoHybrid", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next")
VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
"""Sizes of vision towers. The models run without images."""
OTHER_SIZES: dict[str, dict[str, Any]] = {
    **{f"{name}ForCausalLM": {"max_position_embeddings": 260} for name in ROBERTA},
    **{
        f"{name}ForCausalLM": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        for name in HYBRID
    },
    "Gemma3nForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "activation_sparsity_pattern": [0.0] * 3,
        "intermediate_size": [96] * 3,
    },
    "DbrxForCausalLM": {
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_top_k": 2},
    },
    "GitForCausalLM": {"vision_config": VISION | {"image_size": 32}},
    "GotOcr2ForConditionalGeneration": {"vision_config": VISION | {"mlp_dim": 64, "output_channels": 32}},
    "GPTNeoForCausalLM": {"attention_types": [[["local", "global", "local"], 1]], "window_size": 24},
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "LongcatFlashForCausalLM": {
        "num_layers": 2,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "head_dim": 16,
        "qk_head_dim": 32,
    },
    "Zamba2ForCausalLM": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16},
    "Inkling2ForCausalLM": {"unpadded_vocab_size": 300},
    "Inkling2LoopForCausalLM": {"unpadded_vocab_size": 300},
    "ReformerModelWithLMHead": {"axial_pos_embds": False},
    "ProphetNetForCausalLM": {
        "num_decoder_layers": 3,
        "num_encoder_layers": 2,
        "num_decoder_attention_heads": 4,
        "max_position_embeddings": 258,
    },
    "Qwen4ExpForCausalLM": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "XmodForCausalLM": {"max_position_embeddings": 260, "default_language": "en_XX"},
    "ZambaForCausalLM": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
MAX_PARAMETERS = 45_000_000


class Row(NamedTuple):
    """Row of the table."""

    architecture: str
    own: str
    """``runs`` if Penstock has an implementation of its own; else empty."""
    library: str
    """Result with the modules of transformers."""

    def __str__(self) -> str:
        return f"| `{self.architecture}` | {self.own} | {self.library} |\n"

    def is_refused(self) -> bool:
        """Whether no implementation runs the architecture."""
        return not self.own and self.library.startswith(REFUSED)


class Outcome(NamedTuple):
    """Result of a run of an architecture by the modules of transformers."""

    runs: bool
    reason: str = ""
    """Error message if the architecture is not supported."""
    wrong_tokens: int = 0
    difference: float = 0.0
    """Maximum difference between log probabilities of Penstock and transformers."""
    alone: bool = False
    """Whether each sequence of a step is computed alone."""


def architectures() -> dict[str, type[PreTrainedConfig]]:
    """Configuration class of each causal language model of transformers."""
    return {
        architecture: CONFIG_MAPPING[kind]
        for kind, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if kind in CONFIG_MAPPING and getattr(transformers, architecture).config_class is CONFIG_MAPPING[kind]
    }


def tiny(architecture: str, **more: Any) -> PreTrainedConfig:
    """A small configuration. Raises the error of the class if it accepts none of the variants tried."""
    kind = getattr(transformers, architecture).config_class
    if "text_config" in (kind.sub_configs or {}):
        return kind(text_config=_sized(_text_config(kind), more).to_dict(), **OTHER_SIZES.get(architecture, {}))
    return _sized(kind, OTHER_SIZES.get(architecture, {}) | more)


def _text_config(kind: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Configuration class of the decoder of a model with images or speech."""
    found = kind.sub_configs["text_config"]
    return (
        found
        if issubclass(found, PreTrainedConfig)
        else CONFIG_MAPPING[kind.sub_configs_defaults["text_config"].model_type]
    )


def _sized(kind: type[PreTrainedConfig], more: Mapping[str, Any]) -> PreTrainedConfig:
    names = dict(kind.attribute_map)
    known = {name for each in kind.__mro__ for name in getattr(each, "__annotations__", {})}
    sizes = {names.get(name, name): value for name, value in SIZES.items() if names.get(name, name) in known}
    if "kv_lora_rank" in known:  # latent attention: separate key sizes, and as many key-value heads as heads
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = 4
    if "num_hidden_layers" in names and names["num_hidden_layers"] not in sizes:
        sizes[names["num_hidden_layers"]] = 3
    errors: list[Exception] = []
    for omitted in ((), ("bos_token_id",), ("head_dim",), ("bos_token_id", "head_dim", "v_head_dim")):
        try:
            return kind(**{name: value for name, value in sizes.items() if name not in omitted} | dict(more))
        except Exception as error:
            errors.append(error)
    raise errors[0]


def save(architecture: str, config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Write a checkpoint of random weights; return the model as loaded by transformers."""
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > MAX_PARAMETERS:
        message = f"{architecture} has {size} parameters; the maximum is {MAX_PARAMETERS}"
        raise ValueError(f"{message}: reduce its sizes in OTHER_SIZES")
    torch.manual_seed(0)
    model = kind(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.5 if name.endswith("bias") else 0.2)
        if "norm" in name.lower() or "ln" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.CHAT / name, folder / name)
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def draw(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


PROMPTS = [draw(length, length) for length in (1, 7, 40, 100)] + [draw(99, 64), draw(99, 64) + draw(1, 20)]
OPTIONS: dict[str, Any] = {
    "model_impl": "transformers",
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 256,
    "block_size": 16,
    "max_num_batched_tokens": 50,
    "num_gpu_blocks_override": 20,  # two thirds of the prompts fit at the same time
}
NEW_TOKENS = 8


def compare(llm: LLM, model: PreTrainedModel, prompts: list[list[int]] = PROMPTS) -> Outcome:
    """Run each prompt twice in one batch, and compare with transformers' ``generate`` and log probabilities."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True)
    wrong, difference, twice = 0, 0.0, [*prompts, *prompts]
    expected = [generate(model, prompt) for prompt in prompts]
    tables = [log_probabilities(model, prompt, tokens) for prompt, tokens in zip(prompts, expected, strict=True)]
    for i, output in enumerate(llm.generate(twice, params, use_tqdm=False)):
        completion = output.outputs[0]
        wrong += sum(a != b for a, b in zip(completion.token_ids, expected[i % len(prompts)], strict=True))
        for row, position in zip(tables[i % len(prompts)], completion.logprobs or [], strict=True):
            difference = max(difference, *(abs(found.logprob - row[i].item()) for i, found in position.items()))
    return Outcome(True, "", wrong, difference)


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log probabilities at each of the tokens after a prompt, ``[tokens, vocabulary]``."""
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers. Models whose ``generate`` fails, or disagrees with the model without a KV cache
    (Camembert, for which it counts positions from 0 on), run without its KV cache."""
    ids, options = torch.tensor([prompt]), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    try:
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **options)
        tokens: list[int] = output[0, len(prompt) :].tolist()
        if log_probabilities(model, prompt, tokens).argmax(-1).tolist() == tokens:
            return tokens
    except (IndexError, RuntimeError, TypeError, ValueError):  # for example decoders without their encoder
        pass
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


def outcome(architecture: str, folder: Path) -> Outcome | None:
    """Run a tiny model of an architecture; None if it accepts no small configuration."""
    try:
        model = save(architecture, tiny(architecture), folder)
    except Exception:
        return None
    try:
        with warnings() as messages:
            llm = LLM(folder, **OPTIONS)
    except PenstockError as error:
        return _refused(model, str(error).partition(" over a paged KV cache: ")[2] or str(error))
    return compare(llm, model)._replace(
        alone=any("one sequence of a step after the other" in each for each in messages)
    )


@contextmanager
def warnings() -> Iterator[list[str]]:
    """Context manager that yields the warnings of the models run by transformers."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("penstock.models.transformers")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def _refused(model: PreTrainedModel, reason: str) -> Outcome | None:
    """Outcome of an architecture that Penstock refuses; None if the configuration does not work in transformers
    either."""
    try:
        model(torch.tensor([PROMPTS[1]]), use_cache=False)
    except Exception:
        return None
    return Outcome(False, reason)


def rows() -> Iterator[Row]:
    """Rows of the table. Raises ``AssertionError`` if an architecture computes wrong tokens or log probabilities."""
    for architecture in sorted(architectures(), key=str.lower):
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(architecture, Path(folder))
        if found is None:
            yield Row(architecture, own(architecture), "not tried")
        elif found.runs:
            assert not found.wrong_tokens, (architecture, found)
            assert found.difference < 1e-3, (architecture, found)
            yield Row(architecture, own(architecture), ALONE if found.alone else "runs")
        else:
            yield Row(architecture, own(architecture), f"{REFUSED}{found.reason}")


def own(architecture: str) -> str:
    """``Row.own`` of an architecture."""
    return "runs" if has_family(architecture) else ""


def table() -> list[Row]:
    """The table in docs/transformers.md."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].partition("|---|---|---|\n")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|", 2)] for line in lines]
    return [Row(name.strip("`"), own, library) for name, own, library in cells]


def summary(found: Sequence[Row]) -> str:
    """The sentence above the table."""
    own, refused = sum(row.own == "runs" for row in found), sum(map(Row.is_refused, found))
    alone, together = (sum(row.library == text for row in found) for text in (ALONE, "runs"))
    return (
        f"Of {len(found)} architectures Penstock's own implementations run {own}, the modules of transformers "
        f"{together + alone} ({alone} of\nthese one sequence at a time). {refused} are refused: neither runs them.\n"
    )


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    done: list[Row] = []
    for row in (row._replace(own=own(row.architecture)) for row in table()) if "--own" in sys.argv else rows():
        print(row, file=sys.stderr, flush=True)
        done.append(row)
    text = f"{summary(done)}\n{HEADER}" + "".join(map(str, done))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
