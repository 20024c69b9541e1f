"""Translation of a Triton model repository with TensorRT-LLM models (``config.pbtxt``) to flags."""

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
from penstock.config.settings import settings
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean

from .engine_folder import settings_of
from .repository_parameters import CHOICES, PARAMETERS, Flags, attention_windows, device_groups

logger = logging.getLogger(__name__)

NAMES = ("--model-repository", "--model_repository", "--model-store", "--model-repo", "--model_repo")
STEPS = ("preprocessing", "postprocessing")
ENGINE, BLS = "tensorrt_llm", "tensorrt_llm_bls"


@dataclass
class MergedSettings:
    """Settings merged from several files."""

    flags: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def add(self, flags: Flags, source: str) -> None:
        """Add settings of a file. Raises ``PenstockError`` (``invalid``) if two files contradict each other."""
        for name, value in flags.items():
            if self.flags.setdefault(name, value) != value:
                raise invalid(
                    source, f"is {value!r}, but {self.sources[name]} is {self.flags[name]!r}: set the same value"
                )
            self.sources.setdefault(name, source)


@dataclass
class File:
    """A ``config.pbtxt`` file of the repository."""

    path: Path
    config: Any
    """Triton ``ModelConfig`` (protobuf)."""
    name: str
    kind: str
    """Kind of model: a key of ``PARAMETERS``."""

    def text(self, key: str) -> str:
        """Value of a parameter; empty if it is absent or an unfilled placeholder."""
        result = self.config.parameters[key].string_value if key in self.config.parameters else ""
        return "" if result.startswith("${") else result

    @property
    def used_models(self) -> list[str]:
        """Names of the models that an ensemble or a business logic script (BLS) calls."""
        if self.kind == BLS:
            return [self.text("tensorrt_llm_model_name") or ENGINE]
        return [step.model_name for step in self.config.ensemble_scheduling.step]


def expand_arguments(arguments: list[str]) -> list[str]:
    """Replace ``--model-repository`` by the flags of its files, placed first so that other arguments override them.

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
    """Read the settings of a repository, by name. Raises ``PenstockError`` as ``expand_arguments``.

    Args:
        engines: expected names of the engines, separated by commas.
        overridden: names of settings that other arguments set: the engines' files do not set them.
        world_size: number of ranks given to the launcher; "1" also in orchestrator mode, where it starts no ranks.
    """
    if not (paths := sorted(repository.glob("*/config.pbtxt"))):
        return _checkpoints(repository)
    files = [_file(path) for path in paths]
    by_engine = _group_by_engine(repository, files)
    for name in filter(None, engines.split(",")):
        if name not in by_engine:
            message = f"{repository} has no engine {name!r}, only {', '.join(by_engine)}"
            raise invalid("tensorrt_llm_model_name", message)
    result = {name: _settings(engine_files) for name, engine_files in by_engine.items()}
    for name, flags in result.items():
        ranks = flags.get("tensor_parallel_size", 1) * flags.get("pipeline_parallel_size", 1)
        if world_size not in ("1", str(ranks)):
            message = (
                f"is {world_size}, but the engine of {name} has {ranks} ranks (tp_size times pp_size): set {ranks}"
            )
            raise invalid("world_size", message, ranks)
    if list(result) == [ENGINE] and all(file.name == file.kind for file in files):
        return result[ENGINE]
    shared = {key for flags in result.values() for key in flags if settings()[key].section == "server"}
    together = MergedSettings()
    for name, flags in result.items():
        together.add({key: flags[key] for key in shared if key in flags}, f"{repository / name}")
    models = {
        name: {key: value for key, value in flags.items() if key not in (*shared, *overridden)}
        | {"kserve": {file.name: file.kind for file in by_engine[name]}}
        for name, flags in result.items()
    }
    return together.flags | {"models": json.dumps(models)}


def _checkpoints(repository: Path) -> Flags:
    """Flags for a repository of Hugging Face checkpoints."""
    result = {path.parent.name: str(path.parent) for path in sorted(repository.glob("*/config.json"))}
    if not result:
        message = f"{repository} has no folders with config.pbtxt or with a checkpoint (config.json)"
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
        message = (
            f"the model {name!r} is not a TensorRT-LLM model; supported are {', '.join(PARAMETERS)} and renamed copies"
        )
        raise invalid(str(path), message)
    return File(path, config, name, kind)


def _group_by_engine(repository: Path, files: list[File]) -> dict[str, list[File]]:
    """Group files by engine: the engine's ``config.pbtxt``, and the files of the models that use the engine."""
    groups = {file.name: [file] for file in files if file.kind == ENGINE}
    if not groups:
        raise invalid("model_repository", f"{repository} has no tensorrt_llm model, which names the engine folder")
    engine_of: dict[str, str] = {}
    for file in files:
        if file.kind in ("ensemble", BLS):
            used = file.used_models
            engine = next(
                (name for name in used if name in groups), "" if used and len(groups) > 1 else next(iter(groups))
            )
            if not engine:
                message = f"uses {', '.join(used)}, none of which is an engine; the engines are {', '.join(groups)}"
                raise invalid(str(file.path), message)
            groups[engine].append(file)
            engine_of |= {name: engine for name in used if name not in engine_of}
    for file in files:
        if file.kind in STEPS:
            groups[engine_of.get(file.name, next(iter(groups)))].append(file)
    return groups


def _settings(files: list[File]) -> dict[str, Any]:
    """Merge the settings of an engine's files."""
    result = MergedSettings()
    for file in files:
        _add(result, file)
    engine, tokenizer = result.flags.pop("engine_dir", None), result.flags.get("tokenizer")
    if engine is None:
        raise invalid(str(files[0].path), "must have gpt_model_path, the engine folder")
    built = settings_of(Path(engine))
    if "model" not in built:
        built["model"] = _checkpoint(Path(engine), tokenizer)
    ranks = built.get("tensor_parallel_size", 1) * built.get("pipeline_parallel_size", 1)
    for file in files:
        if windows := file.text("max_attention_window_size"):
            _check_windows(f"{file.path}: max_attention_window_size", attention_windows(windows), built)
        if (text := file.text("gpu_device_ids")) and (count := len(device_groups(text)[0])) != ranks:
            message = f"has {count} devices per instance, but must have {ranks}, the ranks of the engine"
            raise invalid(f"{file.path}: gpu_device_ids", message, ranks)
    return built | _drafts(result.flags)


def _check_windows(source: str, windows: list[int], flags: Flags) -> None:
    """Raise ``PenstockError`` (``invalid``) for windows that would change the model's attention."""
    folder = Path(flags["model"])
    length = flags.get("max_model_len") or max_model_len_of_config(read_config_json(folder))
    if min(windows) >= length:
        return
    from penstock.models import read_config  # imports PyTorch

    for layer, own in enumerate(read_config(folder, flags.get("model_impl", "auto")).sliding_windows):
        needed, given = min(own or length, length), windows[layer % len(windows)]
        if given < needed:
            message = f"is {given}, but layer {layer} of the model attends to {needed} tokens, which cannot be changed"
            raise invalid(source, f"{message}: set {needed} or more, or omit it", needed)


def _drafts(flags: Flags) -> dict[str, Any]:
    """Move trees of draft tokens to ``speculative_config``."""
    result = {name: value for name, value in flags.items() if name not in CHOICES}
    for name in CHOICES.keys() & flags:
        given = json.loads(result.get("speculative_config", "{}"))
        if given.get("method", CHOICES[name]) != CHOICES[name]:
            raise invalid(name, f"requires the decoding_mode {CHOICES[name]}, is {given['method']}")
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
            _log_ignored(f"{file.path}: decoupled", "requests choose whether to stream")
    if model.dynamic_batching.max_queue_delay_microseconds:
        _log_ignored(f"{file.path}: max_queue_delay_microseconds", "a request joins the next step without delay")
    if sum(group.count for group in model.instance_group) > 1:
        _log_ignored(
            f"{file.path}: instance_group", f"{ONE_ENGINE}; --api-server-count sets the number of API processes"
        )


def _parse_model_config(file: Path) -> Any:
    """Parse a ``config.pbtxt`` as Triton's ``ModelConfig``."""
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        message = "needs packages that are not installed: pip install 'penstock-llm[grpc]'"
        raise invalid("model_repository", message) from error
    try:
        text = file.read_text(encoding="utf-8")
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(str(file), f"cannot be read: {error}") from error
    except text_format.ParseError as error:
        if unfilled := re.search(r":\s*(\$\{\w+\})", text):
            raise invalid(str(file), f"{unfilled[1]} is not filled: run fill_template.py") from error
        raise invalid(str(file), f"is not a model configuration: {error}") from error


def _checkpoint(engine: Path, tokenizer: str | None) -> str:
    """Find the checkpoint: in ``engine_dir``, or if that is a TensorRT engine, in ``tokenizer_dir``."""
    if _has_weights(engine):
        return str(engine)
    if tokenizer is not None and _has_weights(Path(tokenizer)):
        if engine.exists():
            _log_ignored(str(engine), f"TensorRT engines are not used; the checkpoint in {tokenizer} is served")
        return tokenizer
    message = f"{engine} has no Hugging Face checkpoint (config.json, *.safetensors), and neither has tokenizer_dir"
    raise invalid("engine_dir", f"{message}: set one of them to the folder of a checkpoint")


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
    logger.warning("%s is ignored: %s", source, why)
