"""Agents as a user may write them, with OpenAI's client."""

import functools
import json
import time

import httpx
import openai


def client_of(base_url, api_key):
    settings = {"base_url": base_url, "api_key": api_key, "max_retries": 0, "timeout": 60}
    return openai.OpenAI(**settings, http_client=connections())


@functools.cache
def connections():
    """One for all: making it reads all certificates."""
    return httpx.Client()


def twice(base_url, model, api_key, problem, log=None, stream=False):
    """Asks, asks again behind the reply, and then once in a conversation of its own; rewards letters.

    Writes what it got to a file, a line a reply: the messages, the token ids, and the reply's text.
    """
    client = client_of(base_url, api_key)
    messages, right = list(problem["messages"]), 0
    for turn in range(3):
        if turn == 2:
            messages = [{"role": "user", "content": "b"}]
        reply, ids = said(client, model, messages, stream and turn == 1)
        if log is not None:
            with open(log, "a") as file:
                file.write(json.dumps([base_url.rsplit("/", 1)[1], messages, ids, reply]) + "\n")
        right += sum(letter.isdigit() for letter in reply)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "a"}]
    return right / 30


def said(client, model, messages, stream):
    arguments = {"model": model, "messages": messages, "max_tokens": 10}
    extra = {"extra_body": {"return_token_ids": True}}
    if not stream:
        (choice,) = client.chat.completions.create(**arguments, **extra).choices
        return choice.message.content, choice.model_extra["token_ids"]
    text, ids = "", []
    for chunk in client.chat.completions.create(**arguments, **extra, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ids += (choice.model_extra or {}).get("token_ids", [])
    return text, ids


def unreliable(base_url, model, api_key, problem):
    """Of the samples of a problem one raises, one hangs, one reports nothing, one is well."""
    sample = int(base_url.rsplit("/", 1)[1].split("-")[3])
    if sample == 0:
        raise RuntimeError("it broke")
    if sample == 1:
        time.sleep(60)
    said(client_of(base_url, api_key), model, problem["messages"], False)
    return None if sample == 2 else 1.0


def no_address(problem):
    return 0.0
