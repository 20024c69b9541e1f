"""How a checkpoint pools: from ``config.json``, the files of sentence-transformers, and options."""

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
POOLING_TYPES: Mapping[str, PoolingType] = {"last": "last", "lasttoken": "last", "mean": "mean", "cls": "cls"}
"""Values of ``pooling_mode`` in newer files."""
FIELD = "pooling_type"
PROBLEMS: Mapping[str, Literal["none", "sigmoid", "softmax"]] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""``problem_type`` of ``config.json`` → what makes probabilities of a classifier's outputs."""
FUNCTIONS: Mapping[str, Literal["none", "sigmoid", "softmax"]] = {"Identity": "none", "Sigmoid": "sigmoid"}
"""Classes of ``torch.nn`` that cross-encoders of sentence-transformers name → the same."""


PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]
"""vLLM's tasks; those of tokens give a vector for each."""


@dataclass(frozen=True)
class PoolerConfig:
    """How prompts are pooled."""

    embedding: PoolingParams | None
    """Of embeddings; None for a checkpoint that classifies."""
    classifier: PoolingParams | None = None
    """Of classes and of scores of pairs; None for a checkpoint that makes embeddings."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    joins_texts: bool = False
    """Whether a pair is one text after the other, not two texts."""
    token_types: bool = False
    """Whether the model tells the two texts of a pair apart by token types."""
    lower_case: bool = False
    """Whether texts are made lower case."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """What texts begin with, by name: ``query`` …"""
    default_prompt: str = ""
    """Name of the prompt of texts for which none is named; empty for none."""

    @property
    def scores_pairs(self) -> bool:
        """Whether it is a cross-encoder, which reads a pair of texts at once."""
        return self.classifier is not None and len(self.labels) == 1

    def embedding_params(self, given: PoolingParams | None = None) -> PoolingParams:
        """Parameters of an embedding. Raises ``PenstockError`` (``unsupported``) for a checkpoint that makes none."""
        if self.embedding is None:
            words = "this checkpoint classifies (/classify, /score), and makes no embeddings"
            raise PenstockError(Code.UNSUPPORTED, words, "model")
        return given.with_defaults(self.embedding) if given else self.embedding

    def classifier_params(self, given: PoolingParams | None = None) -> PoolingParams:
        """Parameters of classes. Raises ``PenstockError`` (``unsupported``) for a checkpoint without them."""
        if self.classifier is None:
            words = "this checkpoint has no classifier (--task score has a model that generates answer yes or no)"
            raise PenstockError(Code.UNSUPPORTED, words, "model")
        return given.with_defaults(self.classifier) if given else self.classifier

    def params(self, task: PoolingTask | None, given: PoolingParams | None = None) -> PoolingParams:
        """Parameters of a task; None is what the checkpoint is for. Raises as the above."""
        task, given = task or ("classify" if self.classifier else "embed"), given or PoolingParams()
        if task.startswith("token_"):
            given = PoolingParams(pooling_type="all").with_defaults(given)
        return self.embedding_params(given) if task.endswith("embed") else self.classifier_params(given)

    def with_prompt(self, text: str, name: str | None = None) -> str:
        """A text to embed, after the prompt of that name. Raises ``PenstockError`` (``invalid``) for an unknown one."""
        name = self.default_prompt if name is None else name
        if name and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise invalid("prompt_name", f"{name[:100]!r} is no prompt of this checkpoint; known are: {known}")
        return self.folded(self.prompts[name] + text if name else text)

    def folded(self, text: str) -> str:
        """A text in lower case where the checkpoint wants it."""
        return text.lower() if self.lower_case else text


def read_pooler(folder: Path, options: ModelOptions, tokenizer: Tokenizer) -> PoolerConfig:
    """Read how a checkpoint pools; by default a decoder the last token's hidden state and an encoder the first one's,
    normalized.

    Raises ``PenstockError``: ``invalid`` where a file is broken, ``unsupported`` where it asks for another pooling.
    """
    config = read_config_json(folder, weights=False) if (folder / CONFIG).is_file() else {}
    sbert = read_object(folder / "sentence_bert_config.json")
    given = read_object(model_folder(folder) / "config_sentence_transformers.json")
    task, classifies = options.pooling_task, is_classifier(config)
    shared: dict[str, Any] = {
        "token_types": encoder_prefix(config) in ("bert", "roberta", "gte")
        and int(config.get("type_vocab_size") or 0) > 1,
        "lower_case": bool(sbert.get("do_lower_case")),
        "prompts": {str(name): str(text) for name, text in dict(given.get("prompts") or {}).items() if text},
        "default_prompt": str(given.get("default_prompt_name") or ""),
    }
    if classifies and task != "embed":
        labels = config.get("id2label") or {}
        names = [str(labels.get(str(number), f"LABEL_{number}")) for number in range(num_labels(config))]
        return PoolerConfig(None, _classifier(config, options), tuple(names), **shared)
    embedding = _embedding(folder, config, options)
    if task not in ("classify", "score"):
        return PoolerConfig(embedding, **shared)
    return PoolerConfig(embedding, _yes_or_no(options, tokenizer), ("LABEL_0",), joins_texts=True, **shared)


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
            raise PenstockError(Code.UNSUPPORTED, f"config.json asks for the activation {function!r:.80}", "model")
        activation = FUNCTIONS[name]
    use = None if options.pooling_activation == "auto" else options.pooling_activation == "on"
    return PoolingParams(pooling_type=kind, head="classifier", activation=activation, use_activation=use)


def _yes_or_no(options: ModelOptions, tokenizer: Tokenizer) -> PoolingParams:
    """A generating model that answers with one of two tokens, as Qwen3-Reranker: the probability of the second one."""
    tokens = options.classifier_tokens
    if len(tokens) != 2:
        raise invalid("classifier_tokens", "must be two tokens: the one for no, then the one for yes", 2)
    ids = [tokenizer.token_to_id(token) for token in tokens]
    for token, token_id in zip(tokens, ids, strict=True):
        if token_id is None:
            raise invalid("classifier_tokens", f"{token[:50]!r} is no token of this model")
    use = None if options.pooling_activation == "auto" else options.pooling_activation == "on"
    found = tuple(token_id for token_id in ids if token_id is not None)
    return PoolingParams(pooling_type="last", token_ids=found, activation="sigmoid", use_activation=use)


def _mode(folder: Path) -> PoolingType:
    if not (folder / "config.json").exists():
        raise invalid("model", f"{folder} has no config.json that says how it pools")
    config = read_object(folder / "config.json")
    if config.get("include_prompt") is False:
        raise PenstockError(Code.UNSUPPORTED, f"{folder} leaves prompts out of the mean (include_prompt)", FIELD)
    names = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    newer = config.get("pooling_mode")
    if isinstance(newer, str) and newer in POOLING_TYPES:
        return POOLING_TYPES[newer]
    if newer is not None or len(names) != 1 or names[0] not in MODES:
        asked = newer or ", ".join(names) or "nothing"
        message = f"{folder} asks for pooling by {asked}; last token, first token (cls) and mean are supported"
        raise PenstockError(Code.UNSUPPORTED, message, FIELD)
    return MODES[names[0]]
