"""Tokenizer files other than the vocabulary: settings, special and added tokens, chat templates.

Precedence is that of transformers. ``special_tokens_map.json`` and ``added_tokens.json`` (old checkpoints) are used
only if ``tokenizer_config.json`` has no ``added_tokens_decoder``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken

from penstock.core.errors import invalid

from .vocabulary import MAX_TOKENS

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""Folder of further templates, ``NAME.jinja``."""
PROCESSOR_TEMPLATE = "chat_template.json"
PROCESSOR_CONFIGS = ("processor_config.json", "preprocessor_config.json")
"""A checkpoint with one of these files has a processor, whose template takes precedence over the tokenizer's."""
MODEL_CONFIG = "config.json"
NAMES = (CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, TEMPLATE, PROCESSOR_TEMPLATE, *PROCESSOR_CONFIGS, MODEL_CONFIG)
OWN_TEMPLATES = {"deepseek_v32": Path(__file__).parent / "templates" / "deepseek_v32.jinja"}
"""Our templates by ``model_type``, for models whose checkpoints have a program in place of a chat template."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the templates for chats without and with tools."""
MAX_BYTES = 128 * 2**20
"""Maximum size of a vocabulary file in bytes; the largest known file has 33 MB."""
MAX_SIDE_BYTES = 16 * 2**20
"""Maximum size of any other file in bytes."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles whose tokens transformers adds first, in this order."""
LISTS = ("additional_special_tokens", "extra_special_tokens")
"""Keys of special tokens without a role. The value of the second key may also be an object: role → token."""


class SideFiles(NamedTuple):
    """Contents of the side files."""

    config: dict[str, Any]
    """Content of ``tokenizer_config.json``."""
    special: dict[str, str]
    """Special tokens by role (``bos_token``, ``image_token``, ...)."""
    special_tokens: tuple[AddedToken, ...]
    """All special tokens, in the order in which transformers adds them."""
    added: dict[int, AddedToken]
    """Added tokens by id."""
    templates: dict[str, str]
    """Chat templates by name."""
    model_type: str
    """``model_type`` in ``config.json``; empty if absent."""


def read_side_files(folder: Path) -> SideFiles:
    """Read the side files of a checkpoint.

    Raises ``PenstockError`` (``invalid``) for a file that is too large or not JSON, and ``AttributeError``,
    ``KeyError``, ``TypeError`` or ``ValueError`` for a value of the wrong type.
    """
    config = read_object(folder / CONFIG)
    named = dict(config)
    declared = config.get("added_tokens_decoder")
    if declared is None:
        named |= read_object(folder / SPECIAL_TOKENS)
    by_role: dict[str, Any] = {}
    for role, token in named.items():
        if not role.endswith("_token") or token is None or isinstance(token, bool):  # add_bos_token is a bool
            continue
        if not isinstance(token, str | Mapping):
            raise TypeError(f"{role} must be a string or an object, not {token!r:.50}")
        if _content(token):
            by_role[role] = token
    extras: list[Any] = []
    for key in LISTS:
        tokens = named.get(key) or []
        if isinstance(tokens, Mapping):
            by_role |= tokens
        else:
            extras += tokens
    special = {role: _content(token) for role, token in by_role.items()}
    first = [by_role[role] for role in ROLES if role in by_role]
    others = [token for role, token in by_role.items() if role not in ROLES]
    special_tokens = tuple(_added_token(token, special=True) for token in (*first, *others, *extras))
    if declared is None:
        specials = {token.content for token in special_tokens}
        ids = read_object(folder / ADDED_TOKENS)
        declared = {
            token_id: {"content": token, "special": token in specials, "normalized": token not in specials}
            for token, token_id in ids.items()
        }
    added = {int(token_id): _added_token(token) for token_id, token in declared.items()}
    if (last := max(added, default=0)) >= MAX_TOKENS:
        raise invalid("tokenizer", f"{folder} has an added token with id {last}; the limit is {MAX_TOKENS}", MAX_TOKENS)
    model_type = str(read_object(folder / MODEL_CONFIG).get("model_type") or "")
    return SideFiles(
        config, special, special_tokens, dict(sorted(added.items())), _templates(folder, config, model_type), model_type
    )


def side_paths(folder: Path) -> list[Path]:
    """The existing files that ``read_side_files`` reads."""
    paths = [folder / name for name in NAMES] + _additional(folder)
    return [path for path in paths if path.is_file()]


def read(path: Path) -> bytes:
    """Read a file. Raises ``PenstockError`` (``invalid``) if it cannot be read or exceeds its maximum size."""
    limit = MAX_SIDE_BYTES if path.name in NAMES or path.suffix == ".jinja" else MAX_BYTES
    try:
        if (size := path.stat().st_size) > limit:
            raise invalid("tokenizer", f"{path} has {size / 2**20:.0f} MiB; the limit is {limit // 2**20} MiB", limit)
        return path.read_bytes()
    except OSError as error:
        raise invalid("tokenizer", f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing. Too large or other files raise ``PenstockError``."""
    if not path.is_file():
        return {}
    try:
        result = json.loads(read(path))
        json.dumps(result, ensure_ascii=False).encode()  # raises for unpaired surrogates
    except (ValueError, RecursionError) as error:
        raise invalid("tokenizer", f"{path} is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise invalid("tokenizer", f"{path} is not a JSON object (found: {type(result).__name__})")
    return result


def choose_template(templates: Mapping[str, str], tools: bool) -> str | None:
    """Return the template for chats with or without tools; None if absent."""
    return templates.get(TOOL_USE if tools and TOOL_USE in templates else DEFAULT)


def _templates(folder: Path, config: Mapping[str, Any], model_type: str) -> dict[str, str]:
    """The templates of the first source with a template; a missing default template is taken from the next source.
    Without any, one of ``OWN_TEMPLATES``."""
    named = config.get("chat_template") or {}
    if isinstance(named, str):
        named = {DEFAULT: named}
    elif not isinstance(named, Mapping):
        named = {entry["name"]: entry["template"] for entry in named}
    files = {path.stem: read(path).decode() for path in _additional(folder)}
    if (folder / TEMPLATE).is_file():
        files[DEFAULT] = read(folder / TEMPLATE).decode()
    has_processor = any((folder / name).is_file() for name in PROCESSOR_CONFIGS)
    processor = _processor_templates(folder)
    sources = [processor, files, named] if has_processor else [files, named, processor]
    found = [source for source in sources if source]
    if not found and model_type in OWN_TEMPLATES:
        return {DEFAULT: OWN_TEMPLATES[model_type].read_text()}
    default = {name: text for source in reversed(found) for name, text in source.items() if name == DEFAULT}
    templates = {**default, **(found[0] if found else {})}
    return {str(name): str(text) for name, text in templates.items()}


def _processor_templates(folder: Path) -> dict[str, str]:
    for path in (folder / PROCESSOR_CONFIGS[0], folder / PROCESSOR_TEMPLATE):
        if template := read_object(path).get("chat_template"):
            return dict(template) if isinstance(template, Mapping) else {DEFAULT: template}
    return {}


def _additional(folder: Path) -> list[Path]:
    return sorted((folder / TEMPLATES).glob("*.jinja"))


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _added_token(token: str | Mapping[str, Any], **flags: bool) -> AddedToken:
    """A token with the flags of its object; ``flags`` override them."""
    if isinstance(token, Mapping):
        flags = {flag: bool(token[flag]) for flag in FLAGS if flag in token} | flags
    return AddedToken(_content(token), **flags)
