"""Ask the demo model one question, or talk with it when none is given; answers stream through transformers."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from penstock import demo


def asked() -> Iterator[str]:
    """What the user types, line by line, until the end of input or an empty line."""
    with contextlib.suppress(EOFError):
        while question := input("> "):
            yield question


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", help="the question (default: read questions until end of input)")
    parser.add_argument("--model", default=demo.CHAT, help="folder of the checkpoint (default: the one in the package)")
    parser.add_argument("--system", help="a system prompt")
    parser.add_argument("--think", action="store_true", help="let the model think first")
    parser.add_argument("--temperature", type=float, default=0.4, help="0 is greedy (default: 0.4)")
    args = parser.parse_args()
    if not (Path(args.model) / "model.safetensors").exists():
        parser.error(f"{args.model} has no weights: run `make train`, or name a checkpoint with --model")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    sampling = {"do_sample": bool(args.temperature), "temperature": args.temperature or None}
    messages = [{"role": "system", "content": args.system}] if args.system else []
    for question in [args.question] if args.question else asked():
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=args.think, return_tensors="pt", return_dict=True
        )
        room = model.config.max_position_embeddings - prompt["input_ids"].shape[1]
        if room < 1:
            raise SystemExit("The conversation has filled the model's context of 2,048 tokens. Start a new one.")
        ids = model.generate(**prompt, max_new_tokens=room, streamer=streamer, **sampling)
        answer = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
