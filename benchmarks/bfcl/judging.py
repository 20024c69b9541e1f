"""Outcomes of answers, and tables of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jsonschema

MARKER = "<tool_call>"
"""Text with which the built-in model begins a call."""
ALL = "**all**"
"""Name of the row of all categories."""


class Outcome(StrEnum):
    """Result of a question with tools."""

    ERROR = "errors"
    NO_CALL = "no call"
    CUT_OFF = "cut off"
    MALFORMED = "malformed"
    WELL_FORMED = "well-formed"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a question with tools."""

    id: str
    category: str
    outcome: Outcome
    problem: str
    """Error message, or description of the malformed call; empty for other outcomes."""
    undeclared: list[str]
    """Arguments that the tool's schema neither lists nor forbids."""
    correct: bool
    """Result of BFCL's checker."""
    text: str
    """Generated text with the markers of calls."""
    calls: list[tuple[str, str]]
    """Name and arguments (JSON) of each returned call."""
    finish_reason: str
    strictness: str
    """Response header that names the tools with a lower level of constraints; empty if there are none."""


@dataclass(frozen=True, slots=True)
class Run:
    """Results of a server."""

    name: str
    answers: list[Answer]
    too_long: dict[str, int]
    """Number of questions left out, by category."""
    plain: dict[str, str]
    """Answers to questions without tools, by id."""


def judge(question: dict[str, Any], result: dict[str, Any], text: str, correct: bool) -> Answer:
    """Determine the outcome of a question.

    Args:
        question: ``id``, ``category``, ``messages`` and ``tools``.
        result: result of the driver.
        text: generated text with the markers of calls; empty after an error.
        correct: result of BFCL's checker.
    """
    choice = result.get("choice", {})
    functions = [call["function"] for call in choice.get("message", {}).get("tool_calls", [])]
    calls = [(function["name"], function["arguments"]) for function in functions]
    undeclared: list[str] = []
    if not choice:
        outcome, problem = Outcome.ERROR, str(result["result"])
    else:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in question["tools"]}
        problem = next(filter(None, (fault(schemas, *call) for call in calls)), "")
        if len(calls) < text.count(MARKER):
            problem = problem or "returned as text, or left out"
        if not calls and MARKER not in text:
            outcome = Outcome.NO_CALL
        elif choice["finish_reason"] == "length":
            outcome, problem = Outcome.CUT_OFF, ""
        else:
            outcome = Outcome.MALFORMED if problem else Outcome.WELL_FORMED
        if outcome is Outcome.WELL_FORMED:
            listed = {name: schema.get("properties", {}) for name, schema in schemas.items()}
            undeclared = [key for name, arguments in calls for key in json.loads(arguments) if key not in listed[name]]
    return Answer(
        id=question["id"],
        category=question["category"],
        outcome=outcome,
        problem=problem,
        undeclared=undeclared,
        correct=correct,
        text=text,
        calls=calls,
        finish_reason=choice.get("finish_reason", ""),
        strictness=result.get("strictness", ""),
    )


def fault(schemas: dict[str, Any], name: str, arguments: str) -> str:
    """Return the reason why a call is malformed; empty if it is well-formed.

    Args:
        schemas: JSON schema of the arguments by name of a tool.
        name: name in the call.
        arguments: JSON text of the arguments.
    """
    if name not in schemas:
        return f"unknown tool {name!r}"
    try:
        value = json.loads(arguments)
    except ValueError as error:
        return f"arguments of {name} are not JSON: {error}: {arguments}"
    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schemas[name]).iter_errors(value))
    return f"arguments of {name}: {error.json_path}: {error.message}" if error else ""


def table(run: Run) -> str:
    """Markdown table of the outcomes by category."""
    head = ["category", "too long", *Outcome, "share of well-formed", "with undeclared arguments", "score"]
    head += ["score without malformed calls"]
    rows = []
    for category, answers in by_category(run.answers):
        outcomes = Counter(answer.outcome for answer in answers)
        too_long = run.too_long.get(category, 0) if category != ALL else sum(run.too_long.values())
        undeclared = sum(bool(answer.undeclared) for answer in answers)
        counts = [outcomes[outcome] for outcome in Outcome]
        rows.append(
            [category, too_long, *counts, well_formed(answers), undeclared, score(answers), strict_score(answers)]
        )
    return markdown(head, rows)


def comparison(base: Run, run: Run) -> str:
    """Markdown table of a run compared with another one: scores, and answers that are the same."""
    both = (base.name, run.name)
    head = ["category", *(f"{what}: {name}" for what in SHARES for name in both)]
    head += ["answers without a call: same", "well-formed calls: same"]
    answers = {answer.id: answer for answer in run.answers}
    rows = []
    for category, before in by_category([answer for answer in base.answers if answer.id in answers]):
        after = [answers[answer.id] for answer in before]
        pairs = list(zip(before, after, strict=True))
        texts = [first.text == second.text for first, second in pairs if first.outcome is Outcome.NO_CALL]
        calls = [
            parsed(first) == parsed(second)
            for first, second in pairs
            if first.outcome is second.outcome is Outcome.WELL_FORMED
        ]
        same = [f"{sum(equal)} of {len(equal)}" for equal in (texts, calls)]
        shares = [measured(answers) for measured in SHARES.values() for answers in (before, after)]
        rows.append([category, *shares, *same])
    plain = [run.plain[key] == text for key, text in base.plain.items() if key in run.plain]
    return f"{markdown(head, rows)}\n\nAnswers without tools: {sum(plain)} of {len(plain)} are the same."


def faults(run: Run) -> Iterator[str]:
    """Errors and malformed calls of a run, a line each."""
    for answer in run.answers:
        if answer.problem:
            yield f"{run.name}: {answer.id}: {answer.outcome}: {answer.problem}\n    {answer.text!r}"


def regressions(base: Run, run: Run) -> Iterator[str]:
    """Lower scores, and changed answers without a call or without tools, compared with another run; a line each."""
    answers = {answer.id: answer for answer in run.answers}
    for category, before in by_category([answer for answer in base.answers if answer.id in answers]):
        after = [answers[answer.id] for answer in before]
        if points(after) < points(before):
            yield f"{run.name}: {category}: {points(after)} correct answers, {base.name} has {points(before)}"
    for answer in base.answers:
        if answer.outcome is Outcome.NO_CALL and answers.get(answer.id, answer).text != answer.text:
            yield f"{run.name}: {answer.id}: {answers[answer.id].text!r}, {base.name} has {answer.text!r}"
    for key, text in base.plain.items():
        if run.plain.get(key, text) != text:
            yield f"{run.name}: {key} without tools: {run.plain[key]!r}, {base.name} has {text!r}"


def by_category(answers: Iterable[Answer]) -> Iterator[tuple[str, list[Answer]]]:
    """Categories with their answers; at the end all answers."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.category, []).append(answer)
    yield from groups.items()
    yield ALL, [answer for group in groups.values() for answer in group]


def parsed(answer: Answer) -> list[tuple[str, Any]]:
    """Name and arguments of each well-formed call."""
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


def well_formed(answers: list[Answer]) -> str:
    """Share of well-formed answers among those with calls that were not cut off."""
    outcomes = Counter(answer.outcome for answer in answers)
    return share(outcomes[Outcome.WELL_FORMED], outcomes[Outcome.WELL_FORMED] + outcomes[Outcome.MALFORMED])


def score(answers: list[Answer]) -> str:
    """Share of answers that BFCL's checker accepts."""
    return share(sum(answer.correct for answer in answers), len(answers))


def strict_score(answers: list[Answer]) -> str:
    """The score, where malformed calls and calls that were cut off are wrong."""
    return share(points(answers), len(answers))


def points(answers: list[Answer]) -> int:
    """Number of correct answers without malformed calls."""
    return sum(answer.correct and answer.outcome in (Outcome.NO_CALL, Outcome.WELL_FORMED) for answer in answers)


def share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else ""


def markdown(head: list[str], rows: list[list[Any]]) -> str:
    """Table whose first column is text."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


SHARES = {"score": score, "score without malformed calls": strict_score, "share of well-formed": well_formed}
"""Compared shares by name."""
