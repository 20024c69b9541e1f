"""Translates a Triton model repository with TensorRT-LLM's models (``config.pbtxt``) to our flags."""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.checkpoint.config_json import read_config_json
from penstock.checkpoint.rope import max_model_len_of_config
from penstock.config.profiles import translate
from penstock.config.profiles.triton import ONE_ENGINE
from penstock.config.settings import did_you_mean, settings
from penstock.core.errors import invalid

from .engine_folder import settings_of
from .repository_parameters import CHOICES, PARAMETERS, Flags, attention_windows, device_groups

logger = logging.getLogger(__name__)

NAMES = ("--model-repository", "--model_repository", "--model-store", "--model-repo", "--model_repo")
STEPS = ("preprocessing", "postprocessing")
ENGINE, BLS = "tensorrt_llm", "tensorrt_llm_bls"


@dataclass
class MergedSettings:
    """The settings of the files read so far."""

    flags: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, flags: Flags, source: str) -> None:
        """Raises ``PenstockError`` (``invalid``) where two files contradict each other."""
        for name, value in flags.items():
            if self.flags.setdefault(name, value) != value:
                raise invalid(source, f"has the value {value!r}, but {self.sources[name]} has {self.flags[name]!r}")
            self.sources.setdefault(name, source)


@dataclass
class File:
    """A ``config.pbtxt``."""

    path: Path
    config: Any
    """A ``ModelConfig``."""
    name: str
    kind: str
    """The kind of model."""

    def text(self, key: str) -> str:
        """A parameter, empty where the template is not filled in."""
        result = self.config.parameters[key].string_value if key in self.config.parameters else ""
        return "" if result.startswith("${") else result

    @property
    def over(self) -> list[str]:
        """The models that an ensemble is made of, or that one of business logic calls."""
        if self.kind == BLS:
            return [self.text("tensorrt_llm_model_name") or ENGINE]
        return [step.model_name for step in self.config.ensemble_scheduling.step]


def expand_arguments(arguments: list[str]) -> list[str]:
    """The arguments with ``--model-repository`` replaced by the flags of its files, before all others, which override
    them.

    Raises ``PenstockError`` (``invalid``) for files that cannot be read, and for unsupported settings.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*NAMES, dest="repository", type=Path)
    parser.add_argument("--tensorrt_llm_model_name", "--tensorrt-llm-model-name", dest="engines", default="")
    parser.add_argument("--world_size", "--world-size", dest="size", default="1")
    given, rest = parser.parse_known_args(arguments[1:])
    if given.repository is None:
        return arguments
    overridden = {each.lstrip("-").partition("=")[0].replace("-", "_") for each in rest if each.startswith("--")}
    return [arguments[0], *_arguments(read(given.repository, given.engines, overridden, given.size)), *rest]


def read(repository: Path, engines: str = "", overridden: Collection[str] = (), world_size: str = "1") -> Flags:
    """Settings by name. Raises ``PenstockError`` as ``expand_arguments`` does.

    Args:
        engines: expected names of the engines, separated by commas.
        overridden: settings that override those of each engine's files.
        world_size: number of ranks that the launcher was told to start; "1" also where it starts none itself
            (orchestrator mode).
    """
    if not (paths := sorted(repository.glob("*/config.pbtxt"))):
        return _checkpoints(repository)
    files = [_file(path) for path in paths]
    over = _group_by_engine(repository, files)
    for name in filter(None, engines.split(",")):
        if name not in over:
            raise invalid("tensorrt_llm_model_name", f"{repository} has no engine {name!r}; it has {', '.join(over)}")
    result = {name: _settings(engine_files) for name, engine_files in over.items()}
    for name, flags in result.items():
        ranks = flags.get("tensor_parallel_size", 1) * flags.get("pipeline_parallel_size", 1)
        if world_size not in ("1", str(ranks)):
            message = f"is {world_size}, and the engine of {name} is for {ranks} (tp_size times pp_size)"
            raise invalid("world_size", message, ranks)
    if list(result) == [ENGINE] and all(file.name == file.kind for file in files):
        return result[ENGINE]
    shared = {key for flags in result.values() for key in flags if settings()[key].section == "server"}
    together = MergedSettings()
    for name, flags in result.items():
        together.add({key: flags[key] for key in shared if key in flags}, f"{repository / name}")
    models = {
        name: {key: value for key, value in flags.items() if key not in (*shared, *overridden)}
        | {"kserve": {file.name: file.kind for file in over[name]}}
        for name, flags in result.items()
    }
    return together.flags | {"models": json.dumps(models)}


def _checkpoints(repository: Path) -> Flags:
    """The flags for a folder of Hugging Face checkpoints, one folder each."""
    result = {path.parent.name: str(path.parent) for path in sorted(repository.glob("*/config.json"))}
    if not result:
        message = f"{repository} holds no folder with a config.pbtxt, nor one with a checkpoint (config.json)"
        raise invalid("model_repository", message)
    return {"models": json.dumps(result)}


def _file(path: Path) -> File:
    config = _parse_model_config(path)
    name = config.name or path.parent.name
    if name in PARAMETERS:
        kind = name
    elif config.ensemble_scheduling.step or config.platform == "ensemble":
        kind = "ensemble"
    elif config.backend == "tensorrtllm" or "gpt_model_path" in config.parameters:
        kind = ENGINE
    elif "tensorrt_llm_model_name" in config.parameters:
        kind = BLS
    else:
        kind = next((kind for kind in STEPS if kind in name), "")
    if not kind:
        message = f"the model {name!r} is not one of TensorRT-LLM's: {', '.join(PARAMETERS)}, or a copy of one of them"
        raise invalid(str(path), message)
    return File(path, config, name, kind)


def _group_by_engine(repository: Path, files: list[File]) -> dict[str, list[File]]:
    """Engine → its ``config.pbtxt`` and those of the models that use it."""
    over = {file.name: [file] for file in files if file.kind == ENGINE}
    if not over:
        raise invalid("model_repository", f"{repository} has no model tensorrt_llm that says where its engine is")
    whose: dict[str, str] = {}
    for file in files:
        if file.kind in ("ensemble", BLS):
            used_models = file.over
            engine = next(
                (name for name in used_models if name in over),
                "" if used_models and len(over) > 1 else next(iter(over)),
            )
            if not engine:
                message = (
                    f"uses {', '.join(used_models)}, none of which is an engine; the engines are {', '.join(over)}"
                )
                raise invalid(str(file.path), message)
            over[engine].append(file)
            whose |= {name: engine for name in used_models if name not in whose}
    for file in files:
        if file.kind in STEPS:
            over[whose.get(file.name, next(iter(over)))].append(file)
    return over


def _settings(files: list[File]) -> dict[str, Any]:
    """The settings of an engine's file and those of the models that use it."""
    result = MergedSettings()
    for file in files:
        _add(result, file)
    engine, tokenizer = result.flags.pop("engine_dir", None), result.flags.get("tokenizer")
    if engine is None:
        raise invalid(str(files[0].path), "does not say where its engine is (gpt_model_path)")
    built = settings_of(Path(engine))
    if "model" not in built:
        built["model"] = _checkpoint(Path(engine), tokenizer)
    ranks = built.get("tensor_parallel_size", 1) * built.get("pipeline_parallel_size", 1)
    for file in files:
        if windows := file.text("max_attention_window_size"):
            _check_windows(f"{file.path}: max_attention_window_size", attention_windows(windows), built)
        if (text := file.text("gpu_device_ids")) and (count := len(device_groups(text)[0])) != ranks:
            words = (
                f"{text!r} has {count} devices for each instance, and the engine is for {ranks} (tp_size times pp_size)"
            )
            raise invalid(f"{file.path}: gpu_device_ids", words, ranks)
    return built | _drafts(result.flags)


def _check_windows(source: str, windows: list[int], flags: Flags) -> None:
    """Raises ``PenstockError`` (``invalid``) for windows that would change the model's attention."""
    folder = Path(flags["model"])
    length = flags.get("max_model_len") or max_model_len_of_config(read_config_json(folder))
    if min(windows) >= length:
        return
    from penstock.models import read_config  # imports PyTorch

    for layer, own in enumerate(read_config(folder, flags.get("model_impl", "auto")).sliding_windows):
        needed, given = min(own or length, length), windows[layer % len(windows)]
        if given < needed:
            message = (
                f"is {given}, and layer {layer} of the model attends to {needed} tokens, which cannot be changed: "
            )
            raise invalid(source, f"{message}give {needed} or more, or leave it out", needed)


def _drafts(flags: Flags) -> dict[str, Any]:
    """Settings in which trees of draft tokens have become part of ``speculative_config``."""
    result = {name: value for name, value in flags.items() if name not in CHOICES}
    for name in CHOICES.keys() & flags:
        given = json.loads(result.get("speculative_config", "{}"))
        if given.get("method", CHOICES[name]) != CHOICES[name]:
            raise invalid(name, f"is for the decoding_mode {CHOICES[name]}")
        result["speculative_config"] = json.dumps({"method": CHOICES[name], name: flags[name]})
    return result


def _add(settings: MergedSettings, file: File) -> None:
    known, model, ignored = PARAMETERS[file.kind], file.config, dict[str, str]()
    given = {key: text for key in sorted(model.parameters) if (text := file.text(key))}
    if unknown := next((key for key in given if key not in known), None):
        message = f"no such parameter of {file.kind}{did_you_mean(unknown, known)}"
        raise invalid(f"{file.path}: {unknown}", message)
    for name, value, source in translate(known, given, lambda key: f"{file.path}: {key}", ignored):
        settings.add({name: value}, source)
    for source, why in ignored.items():
        _log_ignored(source, why)
    if file.kind == ENGINE:
        if model.max_batch_size:
            settings.add({"max_num_seqs": model.max_batch_size}, f"{file.path}: max_batch_size")
        if not model.model_transaction_policy.decoupled:
            _log_ignored(f"{file.path}: decoupled", "each request says whether it is streamed")
    if model.dynamic_batching.max_queue_delay_microseconds:
        _log_ignored(
            f"{file.path}: max_queue_delay_microseconds", "a request joins the next step, and need not wait for others"
        )
    if sum(group.count for group in model.instance_group) > 1:
        _log_ignored(
            f"{file.path}: instance_group", f"{ONE_ENGINE}; --api-server-count says how many processes handle text"
        )


def _parse_model_config(file: Path) -> Any:
    """Parse a ``config.pbtxt`` as Triton's ``ModelConfig``."""
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        message = "needs classes that are not installed; try pip install 'penstock-llm[grpc]'"
        raise invalid("model_repository", message) from error
    try:
        text = file.read_text(encoding="utf-8")
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(str(file), f"cannot be read: {error}") from error
    except text_format.ParseError as error:
        if unfilled := re.search(r":\s*(\$\{\w+\})", text):
            raise invalid(str(file), f"{unfilled[1]} is not filled; fill_template.py does that") from error
        raise invalid(str(file), f"is not a model configuration: {error}") from error


def _checkpoint(engine: Path, tokenizer: str | None) -> str:
    """The folder of the checkpoint: ``engine_dir``, or ``tokenizer_dir`` where that holds TensorRT's engine."""
    if _has_weights(engine):
        return str(engine)
    if tokenizer is not None and _has_weights(Path(tokenizer)):
        if engine.exists():
            _log_ignored(str(engine), f"an engine is for TensorRT; the checkpoint in {tokenizer} is served")
        return tokenizer
    message = f"{engine} holds no checkpoint of Hugging Face (config.json, *.safetensors)"
    raise invalid("engine_dir", f"{message}, and neither does tokenizer_dir; let one of them be its folder")


def _has_weights(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) and not any(folder.glob("rank*"))


def _arguments(flags: Flags) -> Iterator[str]:
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield flag if value else f"--no-{flag[2:]}"
        else:
            yield from (flag, str(value))


def _log_ignored(source: str, why: str) -> None:
    logger.warning("%s has no meaning here and is ignored: %s", source, why)
