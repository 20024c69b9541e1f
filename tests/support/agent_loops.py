"""Run an agent loop of a library against a server, and print the final answer: one tool call, then the answer.

``test_client_libraries.py`` runs this program in an environment with the library:

    python agent_loops.py LIBRARY ADDRESS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

QUESTION = "What is the weather in Paris?"
CITIES: list[str] = []
"""Arguments of the calls of ``get_weather``."""


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: name of the city.
    """
    CITIES.append(city)
    return "21 degrees"


def pydantic_ai(address: str) -> str:
    models, providers = (import_module(f"pydantic_ai.{name}.openai") for name in ("models", "providers"))
    provider = providers.OpenAIProvider(base_url=address, api_key="none")
    model = models.OpenAIChatModel("default", provider=provider)
    agent: Any = import_module("pydantic_ai").Agent(model, tools=[get_weather])
    return str(agent.run_sync(QUESTION).output)


def openai_agents(address: str, model_class: str = "OpenAIChatCompletionsModel") -> str:
    agents: Any = import_module("agents")
    agents.set_tracing_disabled(True)
    client = import_module("openai").AsyncOpenAI(base_url=address, api_key="none")
    model = getattr(agents, model_class)(model="default", openai_client=client)
    agent = agents.Agent(name="weather", model=model, tools=[agents.function_tool(get_weather)])
    return str(agents.Runner.run_sync(agent, QUESTION).final_output)


def openai_agents_responses(address: str) -> str:
    return openai_agents(address, "OpenAIResponsesModel")


def smolagents(address: str) -> str:
    library: Any = import_module("smolagents")
    model = library.OpenAIServerModel(model_id="default", api_base=address, api_key="none")
    agent = library.ToolCallingAgent(tools=[library.tool(get_weather)], model=model, verbosity_level=0)
    return str(agent.run(QUESTION))


LOOPS: dict[str, Callable[[str], str]] = {
    "pydantic_ai": pydantic_ai,
    "openai_agents": openai_agents,
    "openai_agents_responses": openai_agents_responses,
    "smolagents": smolagents,
}

if __name__ == "__main__":
    answer = LOOPS[sys.argv[1]](f"{sys.argv[2]}/v1")
    assert CITIES == ["Paris"], CITIES
    print(answer)
