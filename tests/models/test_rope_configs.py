"""Rotary embedding in all spellings of ``config.json``: the tables equal transformers', or an error is raised."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest
import torch
from rope_configs import CLASSES, LENGTH, Refused, draw, library_tables

from penstock.core import PenstockError
from penstock.layers.rope import rope_table
from penstock.models import read_config

DRAWS = int(os.environ.get("PENSTOCK_ROPE_DRAWS", "1000"))
"""Number of configurations per model type in the thorough test."""
BY_KIND = ("gemma3_text", "olmo3")
"""Model types with different rotary embeddings per layer type."""


def check(model_type: str, seed: int, folder: Path) -> str:
    """Compare one drawn configuration with transformers. Returns "equal" or "refused"."""
    config = draw(model_type, Random(f"{model_type} {seed}"))
    (folder / "config.json").write_text(json.dumps(config))
    try:
        expected = library_tables(json.loads(json.dumps(config)))
    except Refused:
        with pytest.raises(PenstockError):
            read_config(folder)
        return "refused"
    objects = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    if model_type not in BY_KIND and any("full_attention" in each for each in objects):
        try:
            ours = read_config(folder)
        except PenstockError as error:  # transformers ignores such objects
            assert "nested by layer type" in str(error)
            return "refused"
    ours = read_config(folder)
    for layer in range(ours.num_layers):
        rope = ours.rope_of(layer)
        assert rope is not None
        kind = "sliding_attention" if ours.sliding_windows[layer] else "full_attention"
        cos, sin, dim = expected.get("") or expected[kind]
        assert ours.rotary_dim == dim
        table = rope_table(dim, LENGTH, rope, ours.max_position_embeddings)
        torch.testing.assert_close(table, torch.cat((cos, sin), -1), atol=1e-5, rtol=0)
    return "equal"


@pytest.mark.parametrize("model_type", CLASSES)
def test_rope_tables_of_drawn_configs_equal_transformers(model_type: str, tmp_path: Path) -> None:
    assert "equal" in {check(model_type, seed, tmp_path) for seed in range(12)}


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", CLASSES)
def test_rope_tables_of_many_drawn_configs_equal_transformers(model_type: str, tmp_path: Path) -> None:
    for seed in range(12, DRAWS):
        check(model_type, seed, tmp_path)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_trained_length_outside_the_rope_object_is_read(place: str, tmp_path: Path) -> None:
    """Tests YaRN with ``original_max_position_embeddings`` at the top level of ``config.json``."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}
    rope = {place: {"rope_type": "yarn", "factor": 4.0}}
    config = {"model_type": "llama", **sizes, **rope, "original_max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = read_config(tmp_path)
    assert ours.rope_parameters["original_max_position_embeddings"] == 16
    assert ours.max_model_len == 64


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "linear"}, "rope_parameters of type linear lack factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "of type llama3 lack low_freq_factor and high_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "of type longrope lack long_factor"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "short_factor .* 1 numbers; 8 are",
        ),
        ({"rope_type": "axial"}, "rope_type 'axial' is not supported; supported are default"),
        ({"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_type": 5}, "rope_type is 5; it must be a non-empty string"),
        ("yarn", "invalid value"),
        ({"full_attention": {"rope_type": "default"}}, "nested by layer type"),
    ],
)
def test_invalid_rope_object_is_refused(rope: object, message: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, "rope_scaling": rope}))
    with pytest.raises(PenstockError, match=message):
        read_config(tmp_path)
