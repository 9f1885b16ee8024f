"""An agent that asks once, with OpenAI's client; runs import it by its path."""

import functools
from collections.abc import Mapping
from typing import Any


@functools.cache
def _client(api_key: str):
    import openai

    return openai.OpenAI(base_url="http://unused", api_key=api_key, max_retries=0)


def solve(base_url: str, model: str, api_key: str, problem: Mapping[str, Any]) -> float:
    """The agent: one request, and 1 for the right answer."""
    completions = _client(api_key).with_options(base_url=base_url).chat.completions
    reply = completions.create(model=model, messages=problem["messages"]).choices[0].message.content or ""
    return float(reply.rpartition("#")[2].strip() == problem["answer"])
