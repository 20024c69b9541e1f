"""Conformance of guided decoding to JSON Schema, with the official test suite.

python benchmarks/json_schema.py FOLDER

FOLDER contains the suite's files of one draft (`tests/draft2020-12` of JSON-Schema-Test-Suite). The model samples
several documents for every schema; jsonschema validates the complete documents. A schema is followed if at least one
document is complete, and all complete documents are valid; otherwise it should have been rejected, with the name of the
unsupported keyword. Schemas that jsonschema does not support are counted as unjudged.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from tqdm import tqdm

from penstock import LLM, GuidedDecodingParams, PenstockError, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="", help="checkpoint (default: the built-in model)")
    parser.add_argument("--documents", type=int, default=8, help="documents per schema (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=200, help="tokens per document (default: 200)")
    parser.add_argument("--json", type=Path, help="write the verdict of each schema to this file")
    args = parser.parse_args()
    llm = LLM(args.model, num_gpu_blocks_override=2000)
    found: dict[str, tuple[str, str]] = {}
    for name, schema in tqdm(schemas(args.folder), desc="schemas", unit="schema"):
        found[name] = judge(llm, schema, args.documents, args.max_tokens)
    counts = Counter(verdict for verdict, _ in found.values())
    print(f"\n{len(found)} schemas")
    for verdict, count in counts.most_common():
        print(f"{verdict:<12}{count:>5}  {count / len(found):6.1%}")
    rejections = Counter(reason for verdict, reason in found.values() if verdict == "rejected")
    print("\nreasons of rejections")
    for reason, count in rejections.most_common():
        print(f"{count:>5}  {reason}")
    for name, (verdict, reason) in found.items():
        if verdict not in ("followed", "rejected"):
            print(f"{verdict}: {name}: {reason}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False))


def schemas(folder: Path) -> list[tuple[str, Any]]:
    return [
        (f"{path.stem}: {case['description']}", case["schema"])
        for path in sorted(folder.glob("*.json"))
        for case in json.loads(path.read_text(encoding="utf-8"))
    ]


def judge(llm: LLM, schema: Any, documents: int, max_tokens: int) -> tuple[str, str]:
    """Verdict of a schema, and its reason."""
    try:
        form = GuidedDecodingParams(json=schema)
        params = SamplingParams(n=documents, temperature=1.0, seed=1, max_tokens=max_tokens, guided_decoding=form)
        output = llm.generate("JSON:", params, use_tqdm=False)[0]
    except PenstockError as error:
        return "rejected", re.sub(r"'[^']*'|\"[^\"]{20,}\"", "…", str(error))
    complete = [each.text for each in output.outputs if each.finish_reason == "stop"]
    failed = [each.failure.message for each in output.outputs if each.failure]
    if failed:
        return "failed", failed[0]
    validator = Draft202012Validator(schema)
    for text in complete:
        try:
            if not validator.is_valid(json.loads(text)):
                return "violated", text
        except json.JSONDecodeError:
            return "violated", text
        except re.error as error:  # a pattern that Python's re does not support
            return "unjudged", str(error)
    return ("followed", "") if complete else ("unfinished", output.outputs[0].text)


if __name__ == "__main__":
    main()
