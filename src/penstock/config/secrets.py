"""Masking of secrets in options, log lines and messages: by option name, in URLs, and by value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import msgspec

from penstock.core.errors import mask_long_messages

MASK = "***"
SECRET_NAME = re.compile(
    r"(?:.*[_-])?(?:token|secret|password|passwd|api[_-]?keys?|access[_-]?key|secret[_-]?key|credentials?|authorization|storage[_-]?url)",
    re.IGNORECASE,
)
"""Names of options, keys of JSON options, and environment variables whose values are secrets."""
URL_USER = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#\"'<>]+@")
URL_QUERY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?#\"'<>]*)[?#][^\s\"'<>]+")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:([^\s/?#\"'<>]+)@)?[^\s?#\"'<>]*(?:\?([^\s#\"'<>]*))?")
QUERY_NAME = re.compile(
    r".*(?:token|signature|password|passwd|secret|credentials?)|(?:.*[_.-])?(?:sig|key|apikey|auth|pwd)", re.IGNORECASE
)
"""Names of URL query parameters whose values are secrets, such as ``sig`` and ``X-Amz-Signature``."""
MIN_LENGTH = 8
"""Minimum characters of a secret that is masked by value: shorter values may occur in other text by chance."""
MIN_ENVIRONMENT_LENGTH = 16
"""Minimum characters of a secret from an environment variable, which may belong to other programs."""

_patterns: dict[str, None] = {}
_registered: re.Pattern[str] | None = None


def is_secret(name: str) -> bool:
    """True if the value of an option, key or environment variable of this name is a secret."""
    return SECRET_NAME.fullmatch(name) is not None


def register(configuration: msgspec.Struct, environment: Mapping[str, str] = os.environ) -> None:
    """Register the secrets of a configuration and of the environment: ``mask`` then masks their values in any text."""
    values = [value for value in _secrets_of(msgspec.to_builtins(configuration)) if len(value) >= MIN_LENGTH]
    for name, value in environment.items():
        found = [value] if is_secret(name) else _passwords(value)
        values += [each for each in found if len(each) >= MIN_ENVIRONMENT_LENGTH]
    _patterns.update(dict.fromkeys(form for value in values for form in _forms(value)))
    global _registered
    longest_first = sorted(_patterns, key=len, reverse=True)
    _registered = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
    mask_long_messages(mask_values)


def mask(text: str) -> str:
    """Mask registered secrets, and the user, password, query and fragment of each URL."""
    return mask_urls(mask_values(text))


def mask_values(text: str) -> str:
    """Mask registered secrets."""
    return _registered.sub(MASK, text) if _registered else text


def mask_urls(text: str) -> str:
    """Mask the user, password, query and fragment of each URL."""
    if "://" not in text:
        return text
    return URL_QUERY.sub(rf"\1?{MASK}", URL_USER.sub(rf"\1{MASK}@", text))


def public_url(text: str) -> str:
    """Remove the user, password, query and fragment of each URL."""
    return URL_QUERY.sub(r"\1", URL_USER.sub(r"\1", text))


def shown(configuration: msgspec.Struct) -> dict[str, Any]:
    """Options by section and name, with secrets masked."""
    result: dict[str, Any] = masked(msgspec.to_builtins(configuration))
    return result


def masked(value: Any, name: str = "") -> Any:
    """Mask secrets at all depths of an option's value, or of options by name. JSON text is masked like an object."""
    if is_secret(name):
        return MASK if value else value
    if isinstance(value, Mapping):
        return {key: masked(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(masked(inner) for inner in value)
    if not isinstance(value, str):
        return value
    document = _object_in(value)
    if document is None:
        return mask_urls(value)
    hidden = masked(document)
    return value if hidden == document else json.dumps(hidden, ensure_ascii=False)


def _secrets_of(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secrets_of(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets_of(inner, name)
    elif isinstance(value, str) and (document := _object_in(value)) is not None:
        yield from _secrets_of(document, name)
    elif isinstance(value, str):
        if is_secret(name):
            yield value
        yield from _passwords(value)
        for _, query in URL.findall(value):
            yield from (secret for key, secret in parse_qsl(query) if is_secret(key) or QUERY_NAME.fullmatch(key))


def _passwords(text: str) -> Iterator[str]:
    """Passwords in the URLs of a text, with and without user (``user:password``)."""
    for user, _ in URL.findall(text):
        if password := user.partition(":")[2]:
            yield from (user, password, unquote(password))


def _object_in(text: str) -> Any:
    """Parse a JSON object or array; None for any other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _forms(value: str) -> Iterator[str]:
    """Encodings of a value: plain, JSON, Python ``repr``, and URL."""
    yield from (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
    yield from (quote(value), quote(value, safe=""))
