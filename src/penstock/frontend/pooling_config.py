"""Pooling configuration of a checkpoint, from ``config.json``, sentence-transformers' files, and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.checkpoint.config_json import CONFIG, read_config_json
from penstock.checkpoint.encoders import encoder_prefix, is_classifier, num_labels
from penstock.checkpoint.sentence_transformers import model_folder, read_modules, read_object
from penstock.config.options import ModelOptions
from penstock.core import Code, PenstockError, PoolingParams
from penstock.core.errors import invalid
from penstock.core.pooling import PoolingType
from penstock.text import Tokenizer

MODES: Mapping[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
"""Pooling types by boolean key in older files of sentence-transformers."""
POOLING_TYPES: Mapping[str, PoolingType] = {"last": "last", "lasttoken": "last", "mean": "mean", "cls": "cls"}
"""Pooling types by value of ``pooling_mode`` in newer files."""
FIELD = "pooling_type"
PROBLEMS: Mapping[str, Literal["none", "sigmoid", "softmax"]] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""Activation of a classifier's outputs by ``problem_type`` of ``config.json``."""
FUNCTIONS: Mapping[str, Literal["none", "sigmoid", "softmax"]] = {"Identity": "none", "Sigmoid": "sigmoid"}
"""Activation of a sentence-transformers cross-encoder by the name of its ``torch.nn`` class."""


PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
"""vLLM's pooling tasks. ``token_embed`` and ``token_classify`` return one vector per token."""


@dataclass(frozen=True)
class PoolerConfig:
    """Pooling of a model's prompts."""

    embedding: PoolingParams | None
    """Parameters of embeddings; None for a classifier."""
    classifier: PoolingParams | None = None
    """Parameters of classification and of pair scores; None for an embedding model."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    concatenate_pairs: bool = False
    """Concatenate the two texts of a pair instead of encoding them as a pair."""
    token_types: bool = False
    """True if token types mark the two texts of a pair (``token_type_ids``)."""
    lower_case: bool = False
    """Convert texts to lower case."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of texts by name (``query`` …), as in ``config_sentence_transformers.json``."""
    default_prompt: str = ""
    """Name of the default prefix; empty: no prefix."""

    @property
    def is_cross_encoder(self) -> bool:
        """True if the model scores a pair of texts in one pass."""
        return self.classifier is not None and len(self.labels) == 1

    def embedding_params(self, given: PoolingParams | None = None) -> PoolingParams:
        """Parameters of an embedding request. Raises ``PenstockError`` (``unsupported``) for a classifier."""
        if self.embedding is None:
            message = "this model is a classifier (/classify, /score) and does not support embeddings"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        return given.with_defaults(self.embedding) if given else self.embedding

    def classifier_params(self, given: PoolingParams | None = None) -> PoolingParams:
        """Parameters of a classification request. Raises ``PenstockError`` (``unsupported``) without a classifier."""
        if self.classifier is None:
            message = "this model has no classifier (--task score scores with a generative model's yes and no tokens)"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        return given.with_defaults(self.classifier) if given else self.classifier

    def params(self, task: PoolingTask | None, given: PoolingParams | None = None) -> PoolingParams:
        """Parameters of a request with a task; None: the checkpoint's task. Raises ``PenstockError`` (``unsupported``)
        if the model does not support the task."""
        task, given = task or ("classify" if self.classifier else "embed"), given or PoolingParams()
        if task.startswith("token_"):
            given = PoolingParams(pooling_type="all").with_defaults(given)
        return self.embedding_params(given) if task.endswith("embed") else self.classifier_params(given)

    def with_prompt(self, text: str, name: str | None = None) -> str:
        """Add the prefix ``name`` to a text; None: the default prefix. Raises ``PenstockError`` (``invalid``) for an
        unknown name."""
        name = self.default_prompt if name is None else name
        if name and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise invalid("prompt_name", f"{name[:100]!r} is not a prompt of this model; its prompts are: {known}")
        return self.normalize_case(self.prompts[name] + text if name else text)

    def normalize_case(self, text: str) -> str:
        """Convert a text to lower case if ``lower_case``."""
        return text.lower() if self.lower_case else text


def read_pooler(folder: Path, options: ModelOptions, tokenizer: Tokenizer) -> PoolerConfig:
    """Read the pooling configuration of a checkpoint. The default is the normalized hidden state of the last token for
    a decoder, and of the first token for an encoder.

    Raises ``PenstockError``: ``invalid`` if a file is malformed, ``unsupported`` for an unsupported kind of pooling.
    """
    config = read_config_json(folder, weights=False) if (folder / CONFIG).is_file() else {}
    sbert = read_object(folder / "sentence_bert_config.json")
    prompts = read_object(model_folder(folder) / "config_sentence_transformers.json")
    task, classifies = options.pooling_task, is_classifier(config)
    shared: dict[str, Any] = {
        "token_types": encoder_prefix(config) in ("bert", "roberta", "gte")
        and int(config.get("type_vocab_size") or 0) > 1,
        "lower_case": bool(sbert.get("do_lower_case")),
        "prompts": {str(name): str(text) for name, text in dict(prompts.get("prompts") or {}).items() if text},
        "default_prompt": str(prompts.get("default_prompt_name") or ""),
    }
    if classifies and task != "embed":
        labels = config.get("id2label") or {}
        names = [str(labels.get(str(number), f"LABEL_{number}")) for number in range(num_labels(config))]
        return PoolerConfig(None, _classifier(config, options), tuple(names), **shared)
    embedding = _embedding(folder, config, options)
    if task not in ("classify", "score"):
        return PoolerConfig(embedding, **shared)
    return PoolerConfig(embedding, _yes_or_no(options, tokenizer), ("LABEL_0",), concatenate_pairs=True, **shared)


def _embedding(folder: Path, config: Mapping[str, Any], options: ModelOptions) -> PoolingParams:
    modules = read_modules(folder)
    kind: PoolingType = "last" if encoder_prefix(config) is None else "cls"
    if options.pooling_type != "auto":
        kind = options.pooling_type
    elif modules is not None:
        kind = next((_mode(module.folder) for module in modules if module.kind == "Pooling"), kind)
    kinds = [module.kind for module in modules or ()]
    normalize = modules is None or "Normalize" in kinds
    if options.pooling_activation != "auto":
        normalize = options.pooling_activation == "on"
    return PoolingParams(pooling_type=kind, normalize=normalize, head="dense" if "Dense" in kinds else "")


def _classifier(config: Mapping[str, Any], options: ModelOptions) -> PoolingParams:
    kind: PoolingType = "last" if encoder_prefix(config) is None else "cls"
    if config.get("classifier_pooling") == "mean":
        kind = "mean"
    if options.pooling_type != "auto":
        kind = options.pooling_type
    activation = PROBLEMS.get(str(config.get("problem_type")))
    if activation is None:
        activation = "sigmoid" if num_labels(config) == 1 else "softmax"
    nested = config.get("sentence_transformers") or {}
    if function := nested.get("activation_fn") or config.get("sbert_ce_default_activation_function"):
        name = str(function).rpartition(".")[2]
        if name not in FUNCTIONS:
            message = f"config.json has the activation {function!r:.80}; Identity and Sigmoid are supported"
            raise PenstockError(Code.UNSUPPORTED, message, "model")
        activation = FUNCTIONS[name]
    use = None if options.pooling_activation == "auto" else options.pooling_activation == "on"
    return PoolingParams(pooling_type=kind, head="classifier", activation=activation, use_activation=use)


def _yes_or_no(options: ModelOptions, tokenizer: Tokenizer) -> PoolingParams:
    """Parameters of a generative reranker such as Qwen3-Reranker: the probability of the "yes" token against "no"."""
    tokens = options.classifier_tokens
    if len(tokens) != 2:
        message = f"must be two tokens, first the one for no, then the one for yes; it has {len(tokens)}"
        raise invalid("classifier_tokens", message, 2)
    ids = [tokenizer.token_to_id(token) for token in tokens]
    for token, token_id in zip(tokens, ids, strict=True):
        if token_id is None:
            raise invalid("classifier_tokens", f"{token[:50]!r} is not a token of this model")
    use = None if options.pooling_activation == "auto" else options.pooling_activation == "on"
    found = tuple(token_id for token_id in ids if token_id is not None)
    return PoolingParams(pooling_type="last", token_ids=found, activation="sigmoid", use_activation=use)


def _mode(folder: Path) -> PoolingType:
    if not (folder / "config.json").exists():
        raise invalid("model", f"{folder} has no config.json, so its pooling is unknown: set pooling_type")
    config = read_object(folder / "config.json")
    if config.get("include_prompt") is False:
        message = f"{folder} excludes prompts from pooling (include_prompt is false), which is not supported"
        raise PenstockError(Code.UNSUPPORTED, message, FIELD)
    names = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    mode = config.get("pooling_mode")
    if isinstance(mode, str) and mode in POOLING_TYPES:
        return POOLING_TYPES[mode]
    if mode is not None or len(names) != 1 or names[0] not in MODES:
        given = mode or ", ".join(names) or "none"
        message = f"{folder} has the pooling mode {given}; last token, first token (cls) and mean are supported"
        raise PenstockError(Code.UNSUPPORTED, message, FIELD)
    return MODES[names[0]]
