"""Drives the engine by JetStream's own orchestrator: `python -m tests.engine.drive_jetstream RUN PROMPT...`.

Prints a JSON object a line: for every prompt the token ids that came back, and their text. All prompts are
asked at once. RUN is a run directory or a Hugging Face directory; a prompt is a text as it stands.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence

from tests.engine.jetstream_package import make_importable

SLOTS = 4


async def _ask(orchestrator, prompt: str, max_tokens: int) -> dict[str, object]:
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
    path, *prompts = sys.argv[1:] if argv is None else argv
    make_importable()
    with contextlib.redirect_stdout(sys.stderr):  # importing it logs to standard output
        from jetstream.core import orchestrator as jetstream

        from rljax.engine.jetstream import JetStreamEngine
        from rljax.serving.policy import Options, open_policy

        served = open_policy(path, Options(drafter="none", slots=SLOTS), print, compile_first=False)
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
            return await asyncio.gather(
                *(_ask(orchestrator, prompt, served.max_tokens) for prompt in prompts)
            )

        answers = asyncio.run(asyncio.wait_for(ask_all(), 300))
        driver.stop()
    for answer in answers:
        print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
