"""``fill_template.py``: fill the placeholders of a ``config.pbtxt`` template of TensorRT-LLM."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from string import Template

from penstock.core import PenstockError
from penstock.core.errors import invalid
from penstock.core.spelling import did_you_mean


def main(arguments: list[str]) -> int:
    """Print the filled template, or write it to the file (``--in_place``); returns the exit status."""
    try:
        _fill(arguments)
    except (OSError, PenstockError) as error:
        print(f"fill_template.py: {error}", file=sys.stderr)
        return 2
    return 0


def _fill(arguments: list[str]) -> None:
    """Run the command. Raises ``PenstockError`` (``invalid``) for a name without value."""
    parser = argparse.ArgumentParser(prog="fill_template.py", description="Fill the placeholders of a template.")
    parser.add_argument("-i", "--in_place", action="store_true", help="edit the file in place (default: print it)")
    parser.add_argument("file", type=Path, help="config.pbtxt with placeholders ${name}")
    parser.add_argument("values", help=r"values as name:value,name:value; write a comma in a value as \,")
    given = parser.parse_args(arguments)
    text = given.file.read_text(encoding="utf-8")
    known = re.findall(r"\$\{(\w+)\}", text)
    values = {}
    for pair in re.split(r"(?<!\\),", given.values):
        name, colon, value = pair.strip().partition(":")
        if not colon:
            raise invalid(name, "has no value: write name:value")
        if name not in known:
            message = f"{given.file} has no such placeholder{did_you_mean(name, known)}"
            print(f"fill_template.py: {name}: {message}", file=sys.stderr)
        values[name] = value.replace("\\,", ",")
    filled = Template(text).safe_substitute(values)
    if given.in_place:
        given.file.write_text(filled, encoding="utf-8")
    else:
        print(filled, end="")


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))  # argv[1] is the command's name
