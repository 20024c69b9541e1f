"""``penstock list`` and ``penstock rm``: models in the caches of the hub and of other sources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cli import penstock
from test_hub import WANTED, Hub

REPOSITORY = "org/chat"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment with empty caches, and a hub on this machine."""
    hub = Hub()
    try:
        yield {
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HF_HOME": str(tmp_path / "hf"),
            "HF_ENDPOINT": hub.url,
        }
    finally:
        hub.stop()


def test_downloaded_models_are_listed_and_deleted(environment: dict[str, str], tmp_path: Path) -> None:
    assert "no downloaded models" in penstock("list", **environment).stdout
    assert penstock("download", REPOSITORY, **environment).returncode == 0
    listed = penstock("list", **environment).stdout.splitlines()
    assert listed[0].split() == ["NAME", "SIZE", "MODIFIED", "FOLDER"] and listed[1].startswith(f"{REPOSITORY} ")
    (found,) = json.loads(penstock("list", "--json", **environment).stdout)
    assert found["name"] == REPOSITORY and found["complete"]
    assert found["size"] >= sum(map(len, WANTED.values()))
    assert Path(found["folder"]).is_relative_to(tmp_path / "hf")
    wrong = penstock("rm", REPOSITORY, "org/caht", **environment)
    assert wrong.returncode == 2 and "org/caht is not a downloaded model; did you mean org/chat?" in wrong.stderr
    assert Path(found["folder"]).exists(), "no model is deleted if a name is wrong"
    assert penstock("rm", REPOSITORY, **environment).stdout.startswith(f"deleted {REPOSITORY} ")
    assert not Path(found["folder"]).exists()
    assert json.loads(penstock("list", "--json", **environment).stdout) == []


def test_models_of_a_download_folder_are_listed(environment: dict[str, str], tmp_path: Path) -> None:
    folder = str(tmp_path / "models")
    assert penstock("download", REPOSITORY, "--download-dir", folder, **environment).returncode == 0
    assert json.loads(penstock("list", "--json", **environment).stdout) == []
    (found,) = json.loads(penstock("list", "--json", "--download-dir", folder, **environment).stdout)
    assert found["name"] == REPOSITORY
