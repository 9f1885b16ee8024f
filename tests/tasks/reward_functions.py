"""Reward functions as a user might write them, good and bad, for tests."""

import os
import sys
import time

CALLS = []


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
    return 1


def no_response(answer):
    return 0.0


def too_many(response, answer, what):
    return 0.0


NOT_A_FUNCTION = 3
