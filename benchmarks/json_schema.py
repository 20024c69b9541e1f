"""How much of JSON Schema guided decoding keeps to, over the official test suite.

python benchmarks/json_schema.py FOLDER

FOLDER holds the suite's files of one draft (`tests/draft2020-12` of JSON-Schema-Test-Suite). For every schema the model
writes several documents, sampled; those that come to an end are validated with jsonschema. A schema is kept to where
every document is valid, and one at least has ended; else it must have been refused, and by name. Unjudged is what
jsonschema itself does not understand.
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
    parser.add_argument("--model", default="", help="checkpoint (default: the model in the box)")
    parser.add_argument("--documents", type=int, default=8, help="to be written for each schema (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=200, help="of a document (default: 200)")
    parser.add_argument("--json", type=Path, help="write what became of each schema here")
    args = parser.parse_args()
    llm = LLM(args.model, num_gpu_blocks_override=2000)
    found: dict[str, tuple[str, str]] = {}
    for name, schema in tqdm(schemas(args.folder), desc="schemas", unit="schema"):
        found[name] = judge(llm, schema, args.documents, args.max_tokens)
    counts = Counter(verdict for verdict, _ in found.values())
    print(f"\n{len(found)} schemas")
    for verdict, count in counts.most_common():
        print(f"{verdict:<12}{count:>5}  {count / len(found):6.1%}")
    refusals = Counter(reason for verdict, reason in found.values() if verdict == "refused")
    print("\nrefused for")
    for reason, count in refusals.most_common():
        print(f"{count:>5}  {reason}")
    for name, (verdict, reason) in found.items():
        if verdict not in ("kept to", "refused"):
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
    """What became of a schema, and why."""
    try:
        form = GuidedDecodingParams(json=schema)
        params = SamplingParams(n=documents, temperature=1.0, seed=1, max_tokens=max_tokens, guided_decoding=form)
        output = llm.generate("JSON:", params, use_tqdm=False)[0]
    except PenstockError as error:
        return "refused", re.sub(r"'[^']*'|\"[^\"]{20,}\"", "…", str(error))
    ended = [made.text for made in output.outputs if made.finish_reason == "stop"]
    failed = [made.failure.message for made in output.outputs if made.failure]
    if failed:
        return "failed", failed[0]
    validator = Draft202012Validator(schema)
    for text in ended:
        try:
            if not validator.is_valid(json.loads(text)):
                return "broken", text
        except json.JSONDecodeError:
            return "broken", text
        except re.error as error:  # not of Python's patterns
            return "unjudged", str(error)
    return ("kept to", "") if ended else ("unfinished", output.outputs[0].text)


if __name__ == "__main__":
    main()
