"""Report unclear language that a program can find: openings of docstrings, and names of variables and tests.

python scripts/check_language.py [FILE ...]

Without arguments, all Python files that git tracks are checked. The exit status is 1 if a problem is reported. The
script checks only a small part of CONTRIBUTING.md's rules on language.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OPENINGS = re.compile(r"(Of|As of|What|That|Likewise|Whether what)\b")
"""First words of a docstring that does not begin with the described thing."""
NAMES = {"words": ("message", (ast.Constant, ast.JoinedStr)), "facts": ("fields", (ast.Dict, ast.BinOp))}
"""Forbidden variable names: the name to use instead, and the types of values for which the rule applies."""
TEST_NAME = re.compile(r"test_(?:.*_)?(who|what|those|whose|whom)(?:_|$)")
"""Test names that do not state subject, condition and result."""


def problems(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line number and description of each problem of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if found := OPENINGS.match(text):
                yield node.lineno, f"docstring begins with {found[1]!r}: begin with the thing it describes"
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in NAMES and isinstance(
                value, NAMES[name][1]
            ):
                yield node.lineno, f"variable {name}: call it {NAMES[name][0]}"
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if found := TEST_NAME.match(name):
                yield node.lineno, f"{name} contains {found[1]!r}: state subject, condition and result"


def main(names: list[str]) -> int:
    """Check the files; return the exit status."""
    names = names or subprocess.check_output(["git", "ls-files", "*.py"], text=True).split()
    count = 0
    for name in names:
        for line, text in problems(ast.parse(Path(name).read_bytes(), name)):
            print(f"{name}:{line}: {text}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
