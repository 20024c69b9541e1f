"""Write a checkpoint quantized by a common tool, and its weights as dequantized by the same tool.

``test_quantized_ecosystem.py`` runs this program in an environment with the tool:

    python ecosystem.py TOOL CHECKPOINT TARGET
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

DEQUANTIZED = "dequantized.safetensors-of-the-tool"


def save_weights(weights: dict[str, Any], folder: Path) -> None:
    tensors = {name: weight.detach().contiguous().clone() for name, weight in weights.items()}
    import_module("safetensors.torch").save_file(tensors, folder / DEQUANTIZED)


def bitsandbytes(source: Path, target: Path) -> None:
    torch, transformers, tool = map(import_module, ("torch", "transformers", "bitsandbytes"))
    four = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    kinds = {
        "nf4": four | {"bnb_4bit_quant_type": "nf4"},
        "nf4-double": four | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "fp4-bfloat16": four | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "bfloat16"},
        "int8": {"load_in_8bit": True},
    }
    for kind, options in kinds.items():
        config = transformers.BitsAndBytesConfig(**options)
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(source, quantization_config=config, dtype=torch.float32, device_map="cpu")
        model.save_pretrained(target / kind)
        weights = {}
        for name, module in model.named_modules():
            if isinstance(module, tool.nn.Linear4bit):
                data, state = module.weight.data, module.weight.quant_state
                weights[f"{name}.weight"] = tool.functional.dequantize_4bit(data, state)
            elif isinstance(module, tool.nn.Linear8bitLt):
                data, largest = module.weight.data, module.weight.SCB
                weights[f"{name}.weight"] = tool.functional.int8_vectorwise_dequant(data, largest)
        save_weights(weights, target / kind)


def llmcompressor(source: Path, target: Path) -> None:
    torch, transformers, tool = map(import_module, ("torch", "transformers", "llmcompressor"))
    rounding = import_module("llmcompressor.modifiers.quantization").QuantizationModifier
    gptq = import_module("llmcompressor.modifiers.gptq").GPTQModifier
    linear = {"targets": "Linear", "ignore": ["lm_head"]}
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    groups = {
        "a": {
            "targets": ["re:.*self_attn.*"],
            "weights": int8 | {"strategy": "channel"},
            "input_activations": int8 | {"strategy": "token", "dynamic": True},
        },
        "b": {
            "targets": ["re:.*mlp.*"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        },
    }
    recipes = {
        scheme: rounding(scheme=scheme, **linear)
        for scheme in ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W4AFP8", "FP8_DYNAMIC", "FP8_BLOCK")
    }
    recipes["mixed"] = rounding(config_groups=groups, ignore=["lm_head"])
    recipes["gptq"] = gptq(scheme="W4A16", actorder="weight", **linear)
    ids = torch.randint(2, 300, (8, 64), generator=torch.Generator().manual_seed(0)).tolist()
    rows = import_module("datasets").Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 64] * 8})
    data = {"dataset": rows, "num_calibration_samples": 8, "max_seq_length": 64, "splits": None}
    load = transformers.AutoModelForCausalLM.from_pretrained
    for kind, recipe in recipes.items():
        model = load(source, dtype=torch.bfloat16)
        tool.oneshot(model=model, recipe=recipe, **(data if kind == "gptq" else {}))
        model.save_pretrained(target / kind, save_compressed=True)
        model = load(target / kind, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False))
        linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        save_weights({f"{name}.weight": linears[name].weight for name in linears if name != "lm_head"}, target / kind)


def gptqmodel(source: Path, target: Path) -> None:
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"
    torch, tool = map(import_module, ("torch", "gptqmodel"))
    four = {"bits": 4, "group_size": 32}
    kinds = {
        "symmetric": four,
        "asymmetric": four | {"sym": False},
        "act-order": four | {"desc_act": True},
        "v2": four | {"sym": False, "format": "gptq_v2"},
        "8-bits": {"bits": 8, "group_size": 64},
        "3-bits": {"bits": 3, "group_size": 32},
        "by-module": four | {"dynamic": {r"-:.*layers\.1\.mlp.*": {}, ".*self_attn.*": {"bits": 8}}},
    }
    ids = torch.randint(2, 300, (8, 64), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": row, "attention_mask": [1] * 64} for row in ids]
    for kind, options in kinds.items():
        model = tool.GPTQModel.load(str(source), tool.QuantizeConfig(**options), device="cpu")
        model.quantize(data, batch_size=1)
        model.save(str(target / kind))
        model = tool.GPTQModel.load(str(target / kind), device="cpu", backend=tool.BACKEND.TORCH, dtype=torch.float16)
        quantized = [(name, module) for name, module in model.model.named_modules() if hasattr(module, "qweight")]
        save_weights({f"{name}.weight": module.dequantize_weight().T for name, module in quantized}, target / kind)


def awq(source: Path, target: Path) -> None:
    """Copy an AWQ checkpoint, and dequantize it with GPTQModel, which quantizes to AWQ only on GPUs."""
    folder, shutil = target / "awq", import_module("shutil")
    shutil.copytree(source, folder)
    dequantize = import_module("gptqmodel.quantization.awq.utils.packing_utils").dequantize_gemm
    tensors = import_module("safetensors.torch").load_file(folder / "model.safetensors")
    names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    parts = {name: [tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")] for name in names}
    save_weights({f"{name}.weight": dequantize(*tensors, 4, 32).T for name, tensors in parts.items()}, folder)


if __name__ == "__main__":
    tools = {"bitsandbytes": bitsandbytes, "llmcompressor": llmcompressor, "gptqmodel": gptqmodel, "awq": awq}
    tools[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
