"""Checkpoints of every family that llama.cpp's converter supports, limited to what GGUF files can express.

GGUF files lack some fields of ``config.json``: activations, sliding windows of Mistral and Qwen, Gemma's attention
scale and the pattern of its sliding window layers. The configurations here have the values that llama.cpp implies.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import image_checkpoints
import torch
import vision_checkpoints
from checkpoints import randomize, save
from families import FAMILIES, WITH_EXPERTS
from safetensors.torch import load_file, save_file
from state_families import FAMILIES as STATE_FAMILIES
from transformers import Llama4Config, Llama4ForConditionalGeneration, PreTrainedConfig, PreTrainedModel

from penstock import demo

VERSION = "0.3.36"
"""Version of llama-cpp-python, whose source package contains the converter."""
FULL = "full_attention"
NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
EXPERTS_ONLY = {"mlp_only_layers": [], "decoder_sparse_step": 1}
FIXED: dict[str, dict[str, Any]] = {
    "Llama": {"hidden_act": "silu"},
    "Mistral": {"sliding_window": None},
    "Qwen2": NO_WINDOW,
    "Gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0, "sliding_window": 24},
    "Gemma3": {"sliding_window": 24},
    "Cohere2": {"attention_bias": False, "num_hidden_layers": 4, "rotary_pct": 1.0},
    "SmolLM3": {"use_sliding_window": False, "no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "Starcoder2": {"sliding_window": None},
    "Glm": {"rms_norm_eps": 1e-5, "seq_length": 512},
    "DeepseekV2": {"attention_bias": False, "topk_method": "group_limited_greedy"},
    "DeepseekV3": {"attention_bias": False},
    "Qwen3Moe": {"hidden_act": "silu", "norm_topk_prob": True, **NO_WINDOW, **EXPERTS_ONLY},
    "Qwen2Moe": {"norm_topk_prob": False, "use_sliding_window": False, **EXPERTS_ONLY},
    "Mixtral": {"sliding_window": None},
    "Olmoe": {"norm_topk_prob": False, "rms_norm_eps": 1e-5},
    "Dots1": {"sliding_window": None},
    "Bloom": {"apply_residual_connection_post_layernorm": False},
    "Falcon": {"activation": "gelu", "bias": False, "parallel_attn": True},
    "Llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "use_qk_norm": True},
}
"""Values of fields that GGUF files do not state, by family."""


def config_of(family: str, seed: int) -> PreTrainedConfig:
    """A random configuration of a family that a GGUF file can express."""
    rng, draw = Random(f"{family} {seed}"), (FAMILIES | WITH_EXPERTS)[family]
    config = draw(rng)
    while family == "Gemma4" and "head_dim" not in str(config.to_dict()["per_layer_config"]):
        config = draw(rng)  # the converter needs heads of different sizes
    config.vocab_size = 3584  # size of the demo model's vocabulary
    for name, value in FIXED.get(family, {}).items():
        setattr(config, name, value)
    layers = config.num_hidden_layers
    if family in ("Gemma2", "Gemma3"):
        pattern = 2 if family == "Gemma2" else 6
        config.num_hidden_layers = layers = 4 if family == "Gemma2" else 7
        config.layer_types = [FULL if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]
        config.query_pre_attn_scalar = config.head_dim
        config.tie_word_embeddings = True
    if family == "Gemma":
        config.tie_word_embeddings = True
    if family in ("Cohere", "Cohere2"):
        config.tie_word_embeddings = True
    if family in ("Qwen2", "SmolLM3", "Dots1", "Qwen3Moe", "Qwen2Moe"):
        config.layer_types = [FULL] * layers
    if family == "SmolLM3":
        config.no_rope_layers = [int((layer + 1) % 4 != 0) for layer in range(layers)]
    if family == "Cohere2":
        config.layer_types = ["sliding_attention"] * 3 + [FULL]
    if family == "Glm":
        config.head_dim = config.hidden_size // config.num_attention_heads
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 10_000.0}
    if family in ("Gemma3n", "Gemma4"):
        config.tie_word_embeddings = True
        config.vocab_size_per_layer_input = 3584
    if family == "Gemma3n":
        config.altup_num_inputs, config.altup_active_idx, config.altup_correct_scale = 4, seed % 2, True
        if config.rope_parameters[FULL]["rope_type"] == "llama3":  # the converter leaves out its factors
            config.rope_parameters[FULL] = {"rope_type": "default", "rope_theta": 10_000.0}
    if family == "Falcon":
        config.ffn_hidden_size = 4 * config.hidden_size
        if not config.new_decoder_architecture:
            config.multi_query, config.num_kv_heads = True, 1
    if family == "Mpt":
        config.attn_config.softmax_scale = None
    if family == "Phi3":
        config.rope_parameters.setdefault("original_max_position_embeddings", 512)
    if family == "HunYuanDenseV1" and config.rope_parameters["rope_type"] == "dynamic":
        config.max_position_embeddings = 32_768
    if family == "Llama4":
        config.no_rope_layers = [int((layer + 1) % 4 != 0) for layer in range(layers)]
        config.layer_types = ["chunked_attention" if each else FULL for each in config.no_rope_layers]
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    return config


def _make_ternary(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randint(-1, 2, weight.shape) * 127 / 1024)


STATE_FIXED: dict[str, dict[str, Any]] = {
    "Qwen3Next": {"norm_topk_prob": True, "hidden_act": "silu", "mlp_only_layers": []},
    "Qwen3_5": {"hidden_act": "silu"},
    "Qwen3_5Moe": {"hidden_act": "silu"},
    "Mamba": {"expand": 2, "use_bias": False},
    "FalconMamba": {"expand": 2, "use_bias": False, "mixer_rms_eps": 1e-6},
    "Mamba2": {"use_bias": False, "time_step_limit": (0.0, math.inf)},
    "Bamba": {"hidden_act": "silu", "mamba_proj_bias": False, "mlp_bias": False, "time_step_limit": (0.0, math.inf)},
    "GraniteMoeHybrid": {
        **{"hidden_act": "silu", "mamba_proj_bias": False, "position_embedding_type": None},
        "time_step_limit": (0.0, math.inf),
    },
    "FalconH1": {
        **{"hidden_act": "silu", "mamba_proj_bias": False, "mlp_bias": False, "attention_bias": False},
        **{"projectors_bias": False, "mamba_norm_before_gate": False, "tie_word_embeddings": False},
        "time_step_limit": (0.0, math.inf),
    },
    "NemotronH": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 16},  # the converter needs a multiple of 64
        **{"mlp_hidden_act": "relu2", "time_step_min": 0.001, "mlp_bias": False, "use_bias": False},
    },
    "KimiLinear": {
        **{"hidden_act": "silu", "norm_topk_prob": True, "attention_bias": False, "n_group": 1, "topk_group": 1},
        "linear_num_heads": 4,
    },
    "Jamba": {"hidden_act": "silu", "mamba_proj_bias": False},
    "Lfm2": {"conv_bias": False},
    "Lfm2Moe": {"tie_word_embeddings": True, "conv_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
}
"""As ``FIXED``, for the families with recurrent state that llama.cpp supports."""


def state_config(family: str, seed: int) -> PreTrainedConfig:
    """A random configuration of a family with recurrent state that a GGUF file can express."""
    config = STATE_FAMILIES[family](Random(f"{family} {seed}"))
    config.vocab_size = 3584
    for name, value in STATE_FIXED[family].items():
        setattr(config, name, value)
    if family in ("Mamba", "FalconMamba"):
        config.intermediate_size = 2 * config.hidden_size
    if family == "GraniteMoeHybrid" and not config.num_local_experts:
        config.num_experts_per_tok = 0
    if family == "FalconH1":
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        for name in ("attention_in", "attention_out", "ssm_in", "ssm_out", "embedding", "lm_head", "key"):
            setattr(config, f"{name}_multiplier", Random(f"{name} {seed}").choice((0.5, 1.0, 2.0)))
        config.mlp_multipliers, config.ssm_multipliers = [0.5, 2.0], [0.5, 2.0, 1.0, 4.0, 0.25]
    if family == "KimiLinear":
        config.linear_num_heads = config.num_attention_heads
        config.mlp_layer_types = ["dense"] + ["sparse"] * (config.num_hidden_layers - 1)
    if family == "Lfm2Moe":
        config.num_dense_layers = min(config.num_dense_layers, 1)
    return config


def state_checkpoint(family: str, seed: int, folder: Path, ternary: bool = False) -> PreTrainedModel:
    """Write a checkpoint of random weights of a family with recurrent state, with the fields of published ones.

    Args:
        ternary: see ``checkpoint``.
    """
    config = state_config(family, seed)
    if ternary and family.startswith("Qwen"):
        config.linear_value_head_dim = 32  # a multiple of a block
    model = save(config, folder)
    if ternary:
        _make_ternary(model)
        model.save_pretrained(folder)
    if biases := [bias for name, bias in model.named_buffers() if name.endswith("expert_bias")]:
        for bias in biases:
            torch.nn.init.normal_(bias, std=0.2)
        model.save_pretrained(folder)
    if getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        model.set_experts_implementation("eager")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    if family == "Bamba":
        raw["attn_rotary_emb"] = config.hidden_size // config.num_attention_heads // 2
    if "Granite" in family or family == "NemotronH":
        types = raw.get("layer_types") or raw.get("layers_block_type") or config.layer_types
        old = {"linear_attention": "mamba", "full_attention": "attention"}  # names of transformers 4
        raw["layer_types" if "Granite" in family else "layers_block_type"] = [old.get(each, each) for each in types]
    if family == "NemotronH":
        raw["norm_eps"] = raw["layer_norm_epsilon"]
    if family == "NemotronH" and "moe" not in raw["layers_block_type"]:
        raw.pop("num_experts_per_tok", None)
    if family == "KimiLinear":
        raw |= _published_kimi(config)
        tensors = load_file(folder / "model.safetensors")
        dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
        renamed = {dense.sub(r"mlp.\1_proj", name): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    path.write_text(json.dumps(raw))
    return model


def _published_kimi(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of published checkpoints of Kimi-Linear, which transformers does not write."""
    layers = {kind: [i + 1 for i, each in enumerate(config.layer_types) if each == kind] for kind in config.layer_types}
    linear = {
        "full_attn_layers": layers[FULL],
        "kda_layers": layers["linear_attention"],
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
        "head_dim": config.linear_head_dim,
        "num_heads": config.linear_num_heads,
    }
    counts = {"num_experts": config.num_local_experts, "num_shared_experts": config.n_shared_experts}
    return {"linear_attn_config": linear, "first_k_dense_replace": 1, **counts}


def checkpoint(family: str, seed: int, folder: Path, ternary: bool = False) -> PreTrainedModel:
    """Write a checkpoint of random weights.

    Args:
        ternary: draw matrices with three values, which ``Q8_0`` and ``F16`` represent exactly, even if transposed.
    """
    model = save(config_of(family, seed), folder)
    if ternary:
        _make_ternary(model)
        model.save_pretrained(folder)
    if family != "Llama4":  # Llama 4's experts have only one implementation
        model.set_experts_implementation("eager")  # other implementations compute some values in lower precision
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if family == "HunYuanMoEV1":  # published checkpoints have one value per layer
        layers, top_k = config["num_hidden_layers"], config["moe_topk"]
        config["moe_topk"] = top_k if isinstance(top_k, list) else [top_k] * layers
        config |= {"moe_intermediate_size": [config["intermediate_size"]] * layers, "num_shared_expert": [1] * layers}
    if family == "Bloom":
        config["seq_length"] = 512
    if family == "Mpt":  # name in published checkpoints
        config["architectures"] = ["MPTForCausalLM"]
    if family == "DeepseekV3":
        config |= {"scoring_func": "sigmoid"}
    path.write_text(json.dumps(config))
    return model


def llama4() -> PreTrainedModel:
    vision = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 128}
    vision |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    config = Llama4Config(text_config=config_of("Llama4", 0).to_dict(), vision_config=vision)
    return Llama4ForConditionalGeneration(config)


WITH_VISION: dict[str, Callable[[], PreTrainedModel]] = {
    "Qwen2VL": image_checkpoints.qwen2_vl,
    "Qwen2_5_VL": image_checkpoints.qwen2_5_vl,
    "Qwen3VL": image_checkpoints.qwen3_vl,
    "Qwen3VLMoe": partial(image_checkpoints.qwen3_vl_moe, mlp_only_layers=[]),
    "Gemma3": vision_checkpoints.gemma3,
    "Mistral3": vision_checkpoints.mistral3,
    "Ministral3": vision_checkpoints.ministral3,
    "Llava": vision_checkpoints.FAMILIES["llava"].model,
    "Llama4": llama4,
}
"""Small models with a vision encoder, by the name of the architecture without ``ForConditionalGeneration``."""


def vision_checkpoint(family: str, folder: Path) -> PreTrainedModel:
    """Write a checkpoint of random weights of a model with a vision encoder."""
    drawn = WITH_VISION[family]()
    text = drawn.config.text_config
    text.vocab_size = 3584
    if family == "Gemma3":
        text.num_hidden_layers, text.tie_word_embeddings = 7, True
        text.layer_types = ["sliding_attention"] * 5 + [FULL, "sliding_attention"]
    torch.manual_seed(0)
    model = type(drawn)(drawn.config)
    randomize(model)
    model.eval().save_pretrained(folder)
    if family == "Qwen3VLMoe":  # published checkpoints have transposed experts, unlike those of save_pretrained
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, file, {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.CHAT / name, folder / name)
    return model


def fetch_converter(cache: Path) -> Path:
    """Return the folder of llama.cpp's converter, downloaded once from the package index. Raises ``RuntimeError`` if
    the download fails."""
    folder = cache / f"llama-cpp-python-{VERSION}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--dest", cache]
        done = subprocess.run([*command, f"llama-cpp-python=={VERSION}"], capture_output=True, text=True, check=False)
        archives = list(cache.glob(f"llama_cpp_python-{VERSION}.tar.gz"))
        if done.returncode or not archives:
            raise RuntimeError(f"llama-cpp-python {VERSION} cannot be downloaded: {done.stderr[-300:]}")
        with tarfile.open(archives[0]) as archive:
            root = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/"
            files = [file for file in archive.getmembers() if file.name.startswith(root) and file.name.endswith(".py")]
            archive.extractall(folder, files, filter="data")
        archives[0].unlink()
    return folder / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"


CONVERT = """
import json
import sys
import traceback
from pathlib import Path
root = sys.argv[1]
sys.path[:0] = [root, str(Path(root, "gguf-py"))]
import torch
import gguf
from safetensors import safe_open
from conversion import ModelBase, TextModel, get_model_class

TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"  # the demo's tokenizer is unknown to the converter
reply, sys.stdout = sys.stdout, sys.stderr


def names_in(file):
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


for line in sys.stdin:
    model, out, kind, vocabulary = json.loads(line)
    error = ""
    try:
        chosen = get_model_class(ModelBase.load_hparams(Path(model), False)["architectures"][0])
        if vocabulary == "gpt2":
            changes = {"model_arch": chosen.model_arch, "set_vocab": TextModel._set_vocab_gpt2}
            chosen = type(chosen.__name__, (chosen,), changes)
        chosen.no_mtp = not any(name.startswith("mtp.") for name in names_in(Path(model, "model.safetensors")))
        with torch.inference_mode():
            chosen(Path(model), getattr(gguf.LlamaFileType, kind), Path(out)).write()
    except Exception:
        error = traceback.format_exc()[-3000:]
    print(json.dumps(error), file=reply, flush=True)
"""
"""Program of the converter process. Each line of standard input is a JSON array of the arguments of
``Converter.convert``. The reply is a JSON string: the traceback of an error, or an empty string after success."""


class Converter:
    """llama.cpp's converter, in another process that is started once for all conversions.

    Args:
        root: folder of llama.cpp.
    """

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CONVERT, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": ""},
        )

    def convert(self, checkpoint: Path, file: Path, kind: str, vocabulary: Literal["gpt2", "model"] = "gpt2") -> None:
        """Convert a checkpoint. Raises ``RuntimeError`` with the converter's traceback.

        Args:
            kind: name of the file's type in ``gguf.LlamaFileType``.
            vocabulary: "gpt2" for checkpoints with the demo's tokenizer; "model": the converter's method for the model.
        """
        assert self._process.stdin and self._process.stdout
        print(json.dumps([str(checkpoint), str(file), kind, vocabulary]), file=self._process.stdin, flush=True)
        if error := json.loads(self._process.stdout.readline()):
            raise RuntimeError(error)

    def close(self) -> None:
        self._process.communicate()
