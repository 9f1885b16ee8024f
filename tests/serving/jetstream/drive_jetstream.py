"""Drives the engine by JetStream's orchestrator.

Usage: `python -m tests.serving.jetstream.drive_jetstream RUN PROMPT...`.

Prints a JSON object a line: for every prompt the token ids that came back, and their text. All prompts are
asked at once. RUN is a run directory or a Hugging Face directory; a prompt is a text as it stands. With
`--output` the answers are also written to a file, with what they came from.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.serving.jetstream.jetstream_package import make_importable

SLOTS = 4


async def _ask(orchestrator, prompt: str, max_tokens: int) -> dict[str, Any]:
    from jetstream.core.proto import jetstream_pb2

    request = jetstream_pb2.DecodeRequest(
        text_content=jetstream_pb2.DecodeRequest.TextContent(text=prompt), max_tokens=max_tokens
    )
    tokens, text = [], ""
    async for response in orchestrator.Decode(request):
        (sample,) = response.stream_content.samples
        tokens.extend(sample.token_ids)
        text += sample.text
    return {"prompt": prompt, "tokens": tokens, "text": text}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="drive_jetstream")
    parser.add_argument("run")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    make_importable()
    with contextlib.redirect_stdout(sys.stderr):  # importing it logs to standard output
        from jetstream.core import orchestrator as jetstream

        from rljax.provenance import write_figures
        from rljax.serving.jetstream.adapter import JetStreamEngine
        from rljax.serving.policy import Options, open_policy

        options = Options(drafter="none", slots=SLOTS)
        served = open_policy(arguments.run, options, print, compile_first=False)
        engine, params = served.worker.engine, served.worker.params
        adapter = JetStreamEngine(engine, served.tokenizer, SLOTS, served.max_prompt_tokens, seed=3)
        driver = jetstream.Driver(
            prefill_engines=[adapter],
            generate_engines=[adapter],
            prefill_params=[params],
            generate_params=[params],
        )
        orchestrator = jetstream.LLMOrchestrator(driver)

        async def ask_all():
            asked = (_ask(orchestrator, prompt, served.max_tokens) for prompt in arguments.prompts)
            answers = await asyncio.gather(*asked)
            await asyncio.sleep(1)  # its threads close their channels: an error there kills the process
            return answers

        answers = asyncio.run(asyncio.wait_for(ask_all(), 300))
        driver.stop()
    for answer in answers:
        print(json.dumps(answer))
    if arguments.output is not None:
        command = shlex.join(["python", "-m", "tests.serving.jetstream.drive_jetstream", *argv])
        write_figures(arguments.output, {"slots": SLOTS, "answers": answers}, command, ("google-jetstream",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
