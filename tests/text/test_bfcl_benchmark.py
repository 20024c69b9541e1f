"""Outcomes and tables of ``benchmarks/bfcl``, computed from given answers."""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

import pytest
from repository import ROOT

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
QUESTION = {"category": "simple_python", "tools": [{"function": {"name": "get_weather", "parameters": CITY}}]}
GOOD = ("get_weather", '{"city": "Paris"}')
TEXT = "<tool_call>\n{}\n</tool_call>"


@pytest.fixture
def judging(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "bfcl"))
    return importlib.import_module("judging")


def result(*calls: tuple[str, str], finish_reason: str = "tool_calls") -> dict[str, Any]:
    """Result of the driver for an answer with these calls."""
    message = {"tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]}
    return {"choice": {"message": message, "finish_reason": finish_reason}}


@pytest.mark.parametrize(
    ("outcome", "problem", "answer", "text"),
    [
        ("well-formed", "", result(GOOD), TEXT),
        ("malformed", "unknown tool 'get_time'", result(("get_time", "{}")), TEXT),
        ("malformed", "are not JSON", result(("get_weather", '{"city": "')), TEXT),
        ("malformed", "$.city: 3 is not of type 'string'", result(("get_weather", '{"city": 3}')), TEXT),
        ("malformed", "'city' is a required property", result(("get_weather", "{}")), TEXT),
        ("malformed", "is not of type 'object'", result(("get_weather", "[]")), TEXT),
        ("malformed", "returned as text, or left out", result(finish_reason="stop"), TEXT),
        ("malformed", "returned as text, or left out", result(GOOD), TEXT + TEXT),
        ("cut off", "", result(("get_weather", '{"ci'), finish_reason="length"), "<tool_call>"),
        ("no call", "", result(finish_reason="stop"), "It rains."),
        ("errors", "Error code: 400", {"result": "Error during inference: Error code: 400"}, ""),
    ],
)
def test_answer_has_outcome(judging: ModuleType, outcome: str, problem: str, answer: dict[str, Any], text: str) -> None:
    judged = judging.judge(QUESTION | {"id": "1"}, answer, text, correct=False)
    assert judged.outcome == outcome
    assert problem in judged.problem if problem else not judged.problem


def test_undeclared_arguments_are_listed(judging: ModuleType) -> None:
    arguments = json.dumps({"city": "Paris", "unit": "C"})
    judged = judging.judge(QUESTION | {"id": "1"}, result(("get_weather", arguments)), TEXT, correct=True)
    assert judged.outcome == "well-formed" and judged.undeclared == ["unit"]


def test_lower_score_and_changed_text_are_regressions(judging: ModuleType) -> None:
    def run(name: str, correct: bool, text: str, plain: str) -> Any:
        answers = [judging.judge(QUESTION | {"id": "1"}, result(GOOD), TEXT, correct)]
        answers += [judging.judge(QUESTION | {"id": "2"}, result(finish_reason="stop"), text, correct=False)]
        return judging.Run(name=name, answers=answers, too_long={}, plain={"3": plain})

    base, same = run("before", True, "No.", "Hello."), run("same", True, "No.", "Hello.")
    assert not list(judging.regressions(base, same)) and not list(judging.faults(same))
    found = list(judging.regressions(base, run("after", False, "Yes.", "Bye.")))
    assert [line.split(": ")[1] for line in found] == ["simple_python", "**all**", "2", "3 without tools"]
    assert "1 of 1 are the same" in judging.comparison(base, same)


def test_malformed_call_scores_no_point_as_abstention(judging: ModuleType) -> None:
    question = QUESTION | {"id": "1", "category": "irrelevance"}
    run = judging.Run("before", [judging.judge(question, result(finish_reason="stop"), TEXT, True)], {}, {})
    assert judging.table(run).splitlines()[-1] == "| **all** | 0 | 0 | 0 | 0 | 1 | 0 | 0.0 % | 0 | 100.0 % | 0.0 % |"
