"""Reward functions as a user might write them, good and bad, for tests."""

import asyncio
import os
import sys
import time
import zlib

CALLS, RUNNING, BARRIERS = [], set(), {}


def brevity(response, scale=10):
    print("a reward may print")
    return scale / max(len(response), 1)


def everything(response, answer, messages, data):
    return float(response == answer and messages[-1]["content"] == data["prompt"])


def anything(**arguments):
    return len(arguments)


def calls_so_far(response):
    CALLS.append(response)
    return len(CALLS)


def where(response):
    return os.getpid()


def moody(response):
    if "raise" in response:
        raise KeyError("a bug")
    if "hang" in response:
        time.sleep(3600)
    if "spin" in response:
        while True:
            pass
    if "die" in response:
        os._exit(1)
    if "exit" in response:
        sys.exit("enough")
    if "text" in response:
        return "1"
    if "nan" in response:
        return float("nan")
    if "nothing" in response:
        return None
    if "pair" in response:
        return (1, 2)
    if "parts" in response:
        return {"acc": 1}
    return 1


async def together(response, size):
    """Waits until `size` calls are in progress, unless the response says otherwise."""
    RUNNING.add(response)
    most = len(RUNNING)
    try:
        if response == "raise":
            raise KeyError("a bug")
        if response == "nothing":
            return None
        if response == "hang":
            await asyncio.sleep(3600)
        if response == "die":
            os._exit(1)
        if response != "alone":
            await BARRIERS.setdefault(size, asyncio.Barrier(size)).wait()
            most = len(RUNNING)
        return {"score": 0.5, "most": most, "acc": True, "pred": response}
    finally:
        await asyncio.sleep(0.01)
        RUNNING.discard(response)


def from_the_text(response, data):
    """A number that looks like luck, from the text: of four responses about one is declined."""
    luck = zlib.crc32(f"{response}/{data['extra_info']['index']}".encode()) % 4
    return None if luck == 3 else {"score": 0.1 + luck / 2, "acc": luck > 0, "style": luck / 4}


async def from_the_text_later(response, data):
    await asyncio.sleep(0)
    return from_the_text(response, data)


def no_response(answer):
    return 0.0


def too_many(response, answer, what):
    return 0.0


NOT_A_FUNCTION = 3
