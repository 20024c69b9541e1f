"""A request with which engines die: it fails, and all others get the output of an undisturbed engine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from penstock import LLM, AsyncLLM, SamplingParams
from penstock.core import Code
from penstock.frontend.outputs import RequestOutput

COUNTRIES = (
    *("France", "Germany", "Italy", "Spain", "Portugal", "Norway", "Sweden", "Finland", "Denmark", "Poland"),
    *("Austria", "Hungary", "Greece", "Turkey", "Egypt", "Kenya", "Nigeria", "Ghana", "Morocco", "Peru"),
    *("Chile", "Brazil", "Mexico", "Cuba", "Japan", "China", "India", "Nepal", "Thailand", "Vietnam"),
    *("Iceland", "Ireland", "Belgium", "Croatia", "Serbia", "Romania", "Bulgaria", "Ukraine", "Estonia", "Latvia"),
    *("Tunisia", "Algeria", "Libya", "Sudan", "Ethiopia", "Uganda", "Tanzania", "Zambia", "Angola", "Senegal"),
)
FATAL = "Canada"
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FAMILY = """
from dataclasses import replace
from penstock.models import imported
from penstock.models.families.qwen3 import FAMILY as QWEN3

FAMILY = replace(QWEN3, build=imported("fatal_layers:build"))
"""
LAYERS = """
import os
from penstock.models.decoder import Decoder

class FatalDecoder(Decoder):
    def argmax(self, hidden, bitmask=None):
        tokens = super().argmax(hidden, bitmask)
        if {token} in tokens.tolist():
            os.abort()
        return tokens

build = FatalDecoder
"""


def question(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


def install(folder: Path, token: int) -> None:
    """Write a package whose model aborts its process when it generates ``token``."""
    (folder / "fatal_family.py").write_text(FAMILY)
    (folder / "fatal_layers.py").write_text(LAYERS.format(token=token))
    metadata = folder / "fatal_family-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fatal-family\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[penstock.models]\nfatal = fatal_family:FAMILY\n")


@pytest.mark.slow
def test_only_request_that_aborts_the_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(num_gpu_blocks_override=400)
    expected = [llm.chat(question(country), PARAMS)[0].outputs[0].token_ids for country in (*COUNTRIES, FATAL)]
    fatal = next(token for token in expected[-1] if not any(token in one for one in expected[:-1]))
    install(tmp_path, fatal)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    async def ask(llm: AsyncLLM, country: str) -> RequestOutput:
        async for output in llm.chat(question(country), PARAMS):
            last = output
        return last

    async def run() -> list[RequestOutput]:
        async with AsyncLLM(num_gpu_blocks_override=400) as llm:
            outputs = await asyncio.gather(*(ask(llm, country) for country in (*COUNTRIES, FATAL)))
            again = await ask(llm, COUNTRIES[0])
            return [*outputs, again]

    *outputs, failed, again = asyncio.run(run())
    assert [output.outputs[0].token_ids for output in outputs] == expected[:-1]
    assert again.outputs[0].token_ids == expected[0]
    failure = failed.outputs[0].failure
    assert failure is not None and failure.code is Code.INTERNAL
    assert "3 engines died while they computed this request" in failure.message
    assert failed.outputs[0].token_ids == expected[-1][: expected[-1].index(fatal)]
