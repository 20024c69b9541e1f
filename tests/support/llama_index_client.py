"""Send requests to a server with LlamaIndex, and print the responses as one JSON document.

``test_client_libraries.py`` runs this program in an environment with LlamaIndex:

    python llama_index_client.py ADDRESS
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from typing import Any

QUESTION, WEATHER = "What is the capital of Canada?", "What is the weather in Paris?"
CONTEXT = 2048


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return json.dumps({"temperature": 21})


async def ask(model: Any) -> dict[str, Any]:
    """Responses of a LlamaIndex model: a completion, a stream, a tool call, and an agent that uses a tool's result."""
    core, agents = (import_module(f"llama_index.core.{name}") for name in ("tools", "agent.workflow"))
    tool = core.FunctionTool.from_defaults(get_weather)
    streamed = [chunk.delta async for chunk in await model.astream_complete(QUESTION)]
    answer = await model.achat_with_tools([tool], user_msg=WEATHER)
    agent = agents.FunctionAgent(tools=[tool], llm=model)
    return {
        "answer": (await model.acomplete(QUESTION)).text,
        "streamed": "".join(streamed),
        "pieces": len([piece for piece in streamed if piece]),
        "calls": [[call.tool_name, call.tool_kwargs] for call in model.get_tool_calls_from_response(answer)],
        "agent": str(await agent.run(WEATHER)),
    }


def main(address: str) -> dict[str, Any]:
    openai, ollama = (import_module(f"llama_index.llms.{name}") for name in ("openai_like", "ollama"))
    embeddings = import_module("llama_index.embeddings.openai_like")
    core = import_module("llama_index.core")
    version_1 = {"api_base": f"{address}/v1", "api_key": "none"}
    chats = {"is_chat_model": True, "is_function_calling_model": True, "context_window": CONTEXT, "temperature": 0}
    model = openai.OpenAILike(model="default", **version_1, **chats)
    vectors = embeddings.OpenAILikeEmbedding(model_name="default", **version_1)
    texts = ["Ottawa is the capital of Canada.", "Bread is made of flour."]
    index = core.VectorStoreIndex.from_documents([core.Document(text=text) for text in texts], embed_model=vectors)
    engine = index.as_query_engine(llm=openai.OpenAILike(model="default", **version_1, **chats))
    return {
        "openai": asyncio.run(ask(model)),
        "ollama": asyncio.run(
            ask(ollama.Ollama(model="default", base_url=address, temperature=0, context_window=CONTEXT))
        ),
        "index": engine.query(QUESTION).response,
        "dimensions": [len(vector) for vector in vectors.get_text_embedding_batch(texts)],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
