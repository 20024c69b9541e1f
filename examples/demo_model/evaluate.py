"""Evaluate the demo model on held-out questions.

python evaluate.py build/chat --draft build/draft            # with transformers
python evaluate.py build/chat --backend penstock             # with Penstock's LLM
python evaluate.py --base-url http://localhost:8000/v1       # with any OpenAI-compatible server

Answers are greedy and graded by exact match, or as parsed JSON or function call. Perplexity and the acceptance rate of
the draft model need the model's probabilities and are measured with transformers only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any, Protocol

import corpus
import torch
from corpus import Check, Conversation, Message, Split
from dataset import render
from tqdm import tqdm

Figures = dict[str, Any]
"""Results of an evaluation, serializable as JSON."""

LONGEST = {Check.FREE: 300, Check.THINK: 200}
"""Maximum number of answer tokens by check."""
TOP_P, TOP_K = 0.95, 20
"""Sampling parameters of sampled answers, as in the model's ``generation_config.json``."""
LONGEST_GRADED = 64
"""Maximum number of tokens of other answers: expected ones have at most 50, and long passages leave little context."""


@dataclass(frozen=True)
class Answer:
    """Answer of the model: content, reasoning, and function calls as ``(name, arguments)``."""

    content: str
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    ended: bool = True

    @staticmethod
    def parse(text: str, ended: bool = True) -> Answer:
        """Parse the model's generated text."""
        reasoning, calls = "", []
        if match := re.match(r"<think>(.*?)</think>\s*", text, re.DOTALL):
            reasoning, text = match[1].strip(), text[match.end() :]
        for body in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
            try:
                value = json.loads(body)
                calls.append((value["name"], value["arguments"]))
            except (ValueError, KeyError, TypeError):
                calls.append(("", body))
        text = re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL)
        return Answer(text.strip(), reasoning, calls, ended)


def is_right(answer: Answer, conversation: Conversation) -> bool:
    """Grade an answer with the conversation's check. An answer that reached the token limit is wrong."""
    expected = conversation.messages[-1]
    if not answer.ended:
        return False
    match conversation.check:
        case Check.CALL:
            wanted = [(c["function"]["name"], c["function"]["arguments"]) for c in expected["tool_calls"]]
            return answer.calls == wanted and not answer.content
        case Check.JSON:
            try:
                return _canonical(answer.content) == _canonical(expected["content"])
            except ValueError:
                return False
        case Check.THINK:
            return bool(answer.reasoning) and answer.content == expected["content"]
        case _:
            return not answer.calls and not answer.reasoning and answer.content == expected["content"]


def _canonical(text: str) -> str:
    """JSON text with sorted keys; unlike parsed values it distinguishes 1 and true."""
    return json.dumps(json.loads(text), sort_keys=True)


def longest_answer(conversation: Conversation) -> int:
    """Maximum number of answer tokens of a conversation."""
    return LONGEST.get(conversation.check, LONGEST_GRADED)


def held_out(count: int, seed: int) -> dict[str, list[Conversation]]:
    """``count`` held-out conversations per skill, with distinct prompts."""
    drawn: dict[str, list[Conversation]] = {}
    for skill in corpus.SKILLS:
        rng, unique = Random(f"evaluate:{seed}:{skill}"), dict[str, Conversation]()
        for _ in range(count * 20):
            conversation = corpus.converse(rng, Split.HELD_OUT, skill)
            unique.setdefault(json.dumps(conversation.messages[:-1], ensure_ascii=False), conversation)
            if len(unique) == count:
                break
        drawn[skill] = list(unique.values())
    return drawn


class Backend(Protocol):
    def ask(self, conversations: list[Conversation], temperature: float = 0.0) -> list[Answer]: ...


class Remote:
    """OpenAI-compatible server, with eight concurrent requests; ``OPENAI_API_KEY`` is the API key, if one is needed."""

    def __init__(self, base_url: str, model: str | None) -> None:
        import openai

        self.client = openai.OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
        self.model = model or self.client.models.list().data[0].id

    def ask(self, conversations: list[Conversation], temperature: float = 0.0) -> list[Answer]:
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(self._one, range(len(conversations)), conversations, repeat(temperature))
            return list(tqdm(answers, total=len(conversations), desc="asking", unit="answer"))

    def _one(self, seed: int, conversation: Conversation, temperature: float) -> Answer:
        options = {"tools": conversation.tools} if conversation.tools else {}
        template = {"enable_thinking": conversation.thinking}
        response = self.client.chat.completions.create(
            model=self.model,
            messages=to_openai(conversation.messages[:-1]),
            temperature=temperature,
            top_p=TOP_P,
            seed=seed,
            max_tokens=longest_answer(conversation),
            extra_body={"top_k": TOP_K, "chat_template_kwargs": template},
            **options,
        )
        choice = response.choices[0]
        parsed = Answer.parse(choice.message.content or "", choice.finish_reason != "length")
        calls = [(c.function.name, _loads(c.function.arguments)) for c in choice.message.tool_calls or []]
        names = ("reasoning_content", "reasoning")  # the field's older and newer name
        reasoning = next(filter(None, (getattr(choice.message, name, None) for name in names)), parsed.reasoning)
        return Answer(parsed.content, reasoning, calls or parsed.calls, parsed.ended)


def to_openai(messages: list[Message]) -> list[Message]:
    """Convert messages to OpenAI's schema: calls with ids and JSON arguments, and results with the id of the call."""
    sent: list[Message] = []
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = [
                {
                    "id": f"call_{i}",
                    "type": "function",
                    "function": call["function"]
                    | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)},
                }
                for call in message["tool_calls"]
            ]
            message = message | {"tool_calls": calls}
        elif message["role"] == "tool":
            message = message | {"tool_call_id": f"call_{i - 1}"}
        sent.append(message)
    return sent


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Penstock:
    """Penstock's ``LLM``, with all questions in one batch."""

    def __init__(self, folder: Path, dtype: str = "bfloat16", **options: Any) -> None:
        from penstock import LLM

        self.llm = LLM(folder, dtype=dtype, **options)

    def ask(self, conversations: list[Conversation], temperature: float = 0.0) -> list[Answer]:
        from penstock import SamplingParams

        prompts, params = [], []
        for seed, c in enumerate(conversations):
            options = {"tools": c.tools, "enable_thinking": c.thinking, "add_generation_prompt": True}
            prompts.append(self.llm.get_tokenizer().apply_chat_template(c.messages[:-1], tokenize=False, **options))
            params.append(
                SamplingParams(
                    temperature=temperature, top_p=TOP_P, top_k=TOP_K, seed=seed, max_tokens=longest_answer(c)
                )
            )
        outputs = [output.outputs[0] for output in self.llm.generate(prompts, params)]
        return [Answer.parse(output.text, output.finish_reason == "stop") for output in outputs]


class Local:
    """transformers, with questions of similar length in a batch."""

    def __init__(self, folder: Path, dtype: str = "bfloat16") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def ask(self, conversations: list[Conversation], temperature: float = 0.0) -> list[Answer]:
        answers = {i: self._answer(ids) for i, ids in self.generate(conversations, temperature)}
        return [answers[i] for i in range(len(conversations))]

    def _answer(self, ids: list[int]) -> Answer:
        ended = bool(ids) and ids[-1] == self.tokenizer.eos_token_id
        return Answer.parse(self.tokenizer.decode(ids, skip_special_tokens=True), ended)

    @torch.inference_mode()
    def generate(self, conversations: list[Conversation], temperature: float) -> Iterator[tuple[int, list[int]]]:
        """Yield ``(index, token ids of the answer including the EOS token)`` in any order."""
        torch.manual_seed(0)
        prompts = [render(self.tokenizer, c, prompt_only=True) for c in conversations]
        order = sorted(range(len(prompts)), key=lambda i: (longest_answer(conversations[i]), len(prompts[i])))
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": TOP_K, "top_p": TOP_P}
        for start in tqdm(range(0, len(order), 32), desc="asking", unit="batch"):
            chosen = order[start : start + 32]
            longest = max(longest_answer(conversations[i]) for i in chosen)
            inputs = self.tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True)
            outputs = self.model.generate(**inputs, max_new_tokens=longest, **sampling)
            for i, ids in zip(chosen, outputs[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
                end = self.tokenizer.eos_token_id
                yield i, ids[: ids.index(end) + 1] if end in ids else ids

    @torch.inference_mode()
    def negative_log_likelihood(self, prompt: str, answer: list[int]) -> float:
        """Negative log likelihood of ``answer`` given ``prompt``, summed over tokens, in nats."""
        ids = self.tokenizer.encode(prompt) + answer
        scores = self.model(torch.tensor([ids])).logits[0, -len(answer) - 1 : -1].float().log_softmax(-1)
        return -float(scores.gather(1, torch.tensor(answer)[:, None]).sum())

    def perplexity(self, conversations: list[Conversation], answers: list[list[int]] | None = None) -> float:
        """Perplexity per token of the given answers, or else of the expected ones."""
        total, tokens = 0.0, 0
        for i, conversation in enumerate(tqdm(conversations, desc="perplexity", unit="answer")):
            prompt = render(self.tokenizer, conversation, prompt_only=True)
            whole = render(self.tokenizer, conversation).removesuffix("\n")
            answer = answers[i] if answers else self.tokenizer.encode(whole.removeprefix(prompt))
            total += self.negative_log_likelihood(prompt, answer)
            tokens += len(answer)
        return math.exp(total / tokens)


@dataclass
class Acceptance:
    """Numbers of draft tokens: proposed by the draft model, and accepted by the target model."""

    drafted: int = 0
    accepted: int = 0

    def add(self, agrees: list[bool], depth: int = 4) -> None:
        """Simulate greedy speculative decoding of one answer.

        ``agrees[i]`` is True if the draft model, given the answer up to ``i``, proposes the target's token ``i``. This
        is sufficient, since tokens drafted after a mismatch are discarded: a round drafts ``depth`` tokens, accepts
        those before the first mismatch, and adds one token of the target. Tokens drafted beyond the end of the answer
        are counted, as in an engine.
        """
        at = 0
        while at < len(agrees):
            window = agrees[at : at + depth]
            kept = window.index(False) if False in window else len(window)
            self.drafted += depth
            self.accepted += kept
            at += kept + 1

    @property
    def share(self) -> float:
        return self.accepted / max(self.drafted, 1)


@torch.inference_mode()
def acceptance(target: Local, draft: Local, conversations: list[Conversation]) -> Acceptance:
    """Acceptance of greedy speculative decoding, four tokens per round, of the target's greedy answers."""
    result = Acceptance()
    for i, answer in target.generate(conversations, temperature=0.0):
        ids = target.tokenizer.encode(render(target.tokenizer, conversations[i], prompt_only=True)) + answer
        proposed = draft.model(torch.tensor([ids])).logits[0, -len(answer) - 1 : -1].argmax(-1).tolist()
        result.add([drafted == expected for drafted, expected in zip(proposed, answer, strict=True)])
    return result


def story_requests(count: int, seed: int) -> list[Conversation]:
    """Requests without a subject ("Tell me a story."), so that stories differ only due to sampling."""
    rng, requests = Random(f"stories:{seed}"), list[Conversation]()
    while len(requests) < count:
        conversation = corpus.converse(rng, Split.HELD_OUT, "story")
        if conversation.key == conversation.messages[-1]["content"]:
            requests.append(conversation)
    return requests


def evaluate_stories(backend: Backend, count: int, seed: int) -> Figures:
    """Sample stories at temperature 1: number of distinct and finished ones, and their perplexity."""
    requests = story_requests(count, seed)
    if not isinstance(backend, Local):
        stories = backend.ask(requests, temperature=1.0)
        return {
            "stories": len(stories),
            "distinct": len({s.content for s in stories}),
            "ended": sum(s.ended for s in stories),
        }
    sampled = dict(backend.generate(requests, temperature=1.0))
    answers = [sampled[i] for i in range(len(requests))]
    held = backend.perplexity(requests)
    own = backend.perplexity(requests, answers)
    return {
        "stories": len(answers),
        "distinct": len(set(map(tuple, answers))),
        "ended": sum(ids[-1] == backend.tokenizer.eos_token_id for ids in answers),
        "perplexity_sampled": round(own, 3),
        "perplexity_held_out": round(held, 3),
        "ratio": round(own / held, 3),
    }


def evaluate(
    backend: Backend,
    draft: Local | None,
    count: int,
    seed: int,
    stories: int = 100,
    show_wrong: int = 0,
    save_answers: Path | None = None,
) -> Figures:
    """Evaluate ``count`` held-out questions per skill and ``stories`` stories.

    Args:
        draft: draft model whose acceptance is measured, if ``backend`` is local.
        show_wrong: number of wrong answers to print per skill.
        save_answers: file for all greedy answers, to compare two backends.
    """
    questions = held_out(count, seed)
    graded = [c for cs in questions.values() for c in cs if c.check is not Check.FREE]
    answers = backend.ask(graded)
    if save_answers:
        save_answers.write_text(json.dumps([asdict(a) for a in answers], ensure_ascii=False, indent=1) + "\n")
    skills = {name: {"asked": 0, "right": 0} for name in questions if questions[name][0].check is not Check.FREE}
    shown = dict.fromkeys(skills, 0)
    for conversation, answer in zip(graded, answers, strict=True):
        row, right = skills[conversation.skill], is_right(answer, conversation)
        row["asked"] += 1
        row["right"] += right
        if not right and shown[conversation.skill] < show_wrong:
            shown[conversation.skill] += 1
            asked, wanted = conversation.messages[-2]["content"], conversation.messages[-1]
            print(f"[{conversation.skill}] …{asked[-160:]!r}\n  expected {wanted}\n  got      {answer}")
    result: Figures = {
        "skills": skills,
        "asked": len(graded),
        "right": sum(row["right"] for row in skills.values()),
        "stories": evaluate_stories(backend, stories, seed),
    }
    if isinstance(backend, Local):
        every = [c for cs in questions.values() for c in cs[: max(count // 4, 1)]]
        result["perplexity_held_out"] = round(backend.perplexity(every), 4)
        if draft:
            drafted = acceptance(backend, draft, every)
            result["draft"] = {
                "drafted": drafted.drafted,
                "accepted": drafted.accepted,
                "share": round(drafted.share, 4),
            }
    return result


def weights_digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's weights, which identifies the evaluated model."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def table(result: Figures) -> str:
    """Results as Markdown."""
    lines = ["| skill | asked | right | share |", "|---|---:|---:|---:|"]
    for name, row in result["skills"].items():
        lines.append(f"| {name} | {row['asked']} | {row['right']} | {row['right'] / row['asked']:.1%} |")
    lines.append(f"| **all** | {result['asked']} | {result['right']} | {result['right'] / result['asked']:.1%} |")
    stories = result["stories"]
    lines += [
        "",
        f"- {stories['stories']} stories at temperature 1 (top-p {TOP_P}, top-k {TOP_K}), from requests without a "
        f"subject: {stories['distinct']} distinct, {stories['ended']} finished within {LONGEST[Check.FREE]} tokens",
    ]
    if "ratio" in stories:
        lines.append(
            f"- their perplexity {stories['perplexity_sampled']}, of held-out stories "
            f"{stories['perplexity_held_out']} (ratio {stories['ratio']})"
        )
    if "perplexity_held_out" in result:
        lines.append(f"- held-out perplexity over all skills: {result['perplexity_held_out']}")
    if "draft" in result:
        d = result["draft"]
        lines.append(f"- draft, 4 tokens per round: {d['accepted']} of {d['drafted']} accepted ({d['share']:.1%})")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="folder of the checkpoint")
    parser.add_argument("--draft", type=Path, help="folder of the draft model's checkpoint")
    parser.add_argument("--base-url", help="OpenAI-compatible server to evaluate, e.g. http://localhost:8000/v1")
    parser.add_argument("--model-name", help="name of the served model (default: the first one)")
    about = "library that runs the model (default: transformers)"
    parser.add_argument("--backend", choices=["transformers", "penstock"], default="transformers", help=about)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="dtype of the computation")
    parser.add_argument("--count", type=int, default=48, help="questions per skill (default: 48)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions (default: 0)")
    parser.add_argument("--wrong", type=int, default=0, help="number of wrong answers to print per skill (default: 0)")
    parser.add_argument("--json", type=Path, help="write results to this JSON file")
    parser.add_argument("--answers", type=Path, help="write the greedy answers to this JSON file")
    parser.add_argument("--card", type=Path, help="replace the results in this model card")
    args = parser.parse_args()
    if (args.model is None) == (args.base_url is None):
        parser.error("give either a checkpoint's folder or --base-url")
    if args.base_url and args.draft:
        parser.error("--draft needs --backend transformers: give the folder of a checkpoint instead of --base-url")
    backend: Backend
    if args.base_url:
        backend = Remote(args.base_url, args.model_name)
    else:
        backend = (Local if args.backend == "transformers" else Penstock)(args.model, args.dtype)
    draft = Local(args.draft) if args.draft else None
    result = evaluate(backend, draft, args.count, args.seed, show_wrong=args.wrong, save_answers=args.answers)
    if isinstance(backend, Local):
        result["weights"] = [weights_digest(folder) for folder in (args.model, args.draft) if folder]
    figures = table(result)
    print(figures)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.card:
        card = args.card.read_text(encoding="utf-8")
        before, rest = card.split("<!-- figures -->\n")
        after = rest.split("<!-- /figures -->\n")[1]
        card = f"{before}<!-- figures -->\n{figures}<!-- /figures -->\n{after}"
        args.card.write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
