"""The shared secret with which the nodes of a cluster authenticate each other."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from penstock.config.user_folders import user_folder
from penstock.core.errors import invalid

logger = logging.getLogger(__name__)

FIELD = "cluster_secret_file"
MIN_LENGTH = 16


def default_path() -> Path:
    return user_folder("XDG_CONFIG_HOME", ".config") / "penstock" / "cluster-secret"


def read_secret(file: str, make: bool) -> bytes:
    """Read the secret from a file; an empty name means ``default_path``.

    Args:
        make: create the file at ``default_path`` if it is missing, readable by this user only.

    Raises ``PenstockError`` (``invalid``) if the file is missing, readable by other users, or too short.
    """
    path = Path(file).expanduser() if file else default_path()
    if make and not file and not path.exists():
        _make(path)
    try:
        with path.open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise invalid(FIELD, f"{path} is accessible to other users: run chmod 600 {path}")
            secret = opened.read(4096).strip()
    except OSError as error:
        advice = "leave out this option to create a secret" if make else "copy this file from node 0, which creates it"
        raise invalid(FIELD, f"{path} cannot be read ({error.strerror}); {advice}") from error
    if len(secret) < MIN_LENGTH:
        raise invalid(FIELD, f"{path} has {len(secret)} characters; give at least {MIN_LENGTH}", MIN_LENGTH)
    return secret


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.link(file.name, path)  # atomic: another process may create it at the same time
    except FileExistsError:
        return
    except OSError as error:
        raise invalid(FIELD, f"{path} cannot be created: {error.strerror}; give the path of another file") from error
    logger.warning("created the cluster secret %s: copy this file to the same path on every other node", path)
