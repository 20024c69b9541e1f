"""Program in the environment of ``bfcl-eval``: list questions, generate answers, or evaluate them.

python driver.py questions
python driver.py answer THREADS TEMPERATURE
python driver.py evaluate CATEGORY ...

Results and scores are in the folder ``BFCL_PROJECT_ROOT``; ``OPENAI_BASE_URL`` is the URL of the server.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from bfcl_eval._llm_response_generation import main as generate
from bfcl_eval.constants.category_mapping import NON_LIVE_CATEGORY
from bfcl_eval.constants.enums import ModelStyle
from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING, ModelConfig
from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI
from bfcl_eval.eval_checker.eval_runner import main as evaluate
from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler
from bfcl_eval.model_handler.utils import convert_to_tool
from bfcl_eval.utils import load_dataset_entry

NAME = "penstock"


class RecordingHandler(OpenAICompletionsHandler):
    """BFCL's handler of Chat Completions. Results also contain the choice with its token ids, and the response header
    about tools that are not constrained by their schema."""

    _response = threading.local()

    def generate_with_backoff(self, **fields: Any) -> tuple[Any, float]:
        begun = time.perf_counter()
        body = {"return_token_ids": True}
        raw = self.client.chat.completions.with_raw_response.create(**fields, extra_body=body)
        response = raw.parse()
        choice = response.choices[0].model_dump(exclude_none=True)
        self._response.details = {"choice": choice, "strictness": raw.headers.get("x-penstock-tool-strictness", "")}
        return response, time.perf_counter() - begun

    def inference(self, *arguments: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
        result, metadata = super().inference(*arguments, **options)
        return result, metadata | self._response.details


MODEL_CONFIG_MAPPING[NAME] = ModelConfig(
    model_name="default",
    display_name="Penstock",
    url="",
    org="",
    license="",
    model_handler=RecordingHandler,
    is_fc_model=True,
    underscore_to_dot=True,  # the handler's names of tools have "_" for "."
)


def main(command: str, *arguments: str) -> None:
    match command:
        case "questions":
            print(json.dumps([question for name in NON_LIVE_CATEGORY for question in questions(name)]))
        case "answer":
            threads, temperature = int(arguments[0]), float(arguments[1])
            options = {"model": NAME, "test_category": "all", "run_ids": True, "result_dir": None}
            options |= {"allow_overwrite": False, "include_input_log": False, "exclude_state_log": True}
            generate(SimpleNamespace(**options, num_threads=threads, temperature=temperature))
        case "evaluate":
            evaluate([NAME], [*arguments], None, None, partial_eval=True)


def questions(category: str) -> list[dict[str, Any]]:
    """Questions of a category, with the messages and tools that the handler sends."""
    return [
        {
            "id": entry["id"],
            "category": category,
            "messages": entry["question"][0],
            "tools": convert_to_tool(entry["function"], GORILLA_TO_OPENAPI, ModelStyle.OPENAI_COMPLETIONS),
        }
        for entry in load_dataset_entry(category)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
