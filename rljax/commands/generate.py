"""Ask a trained policy: `rljax generate runs/quickstart "47a5b8c9="`."""

import argparse
import contextlib
import queue
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.names import check_name
from rljax.accelerators import skip_absent
from rljax.errors import ConfigError, exit_status
from rljax.hub import pinned
from rljax.run_directory import check_holds_policy

if TYPE_CHECKING:
    from rljax.serving.policy import ServedPolicy

_MOST_SLOTS = 64  # samples of `-n` decoded at a time


def _parser(prog: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Stream a policy's response to a prompt. The same seed gives the same tokens, whatever"
        " the drafter, and from `rljax serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("policy", help="a run directory, a Hugging Face directory, or org/name[@revision]")
    parser.add_argument("prompt", nargs="?", help="the prompt; without it and --file, standard input")
    parser.add_argument("--file", metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--raw", action="store_true", help="the prompt is no chat: apply no template")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="responses to sample [1]")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling noise [0]")
    parser.add_argument(
        "--episode",
        type=int,
        metavar="N",
        help="play the held-out problem N of the run's environment, in the place of a prompt",
    )
    parser.add_argument("--tokens", action="store_true", help="print token ids in the place of text")
    add_policy_options(parser)
    return parser


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `rljax.serving.policy.Options`."""
    parser.add_argument("--step", type=int, help="of a run, which checkpoint [the newest]")
    parser.add_argument("--temperature", type=float, help="0 is greedy [the run's]")
    parser.add_argument("--top-p", type=float, help="[the run's]")
    parser.add_argument("--max-tokens", type=int, help="longest response [the run's]")
    parser.add_argument("--max-prompt-tokens", type=int, help="longest prompt [the run's]")
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="keeps compiled programs for the next start; none keeps none [the run's"
        " engine.compilation_cache, else cache/compilation]",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="number type, as policy.compute_dtype [the run's, else auto]",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="decode in N worker processes under Ray, with the run's other keys of cluster [in this process]",
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="of the workers' Ray cluster [the run's, or one here]"
    )
    parser.add_argument(
        "--drafter",
        help="what proposes tokens: a name, or a class of yours as module:Class, with the run's arguments"
        " where the run uses it; none decodes without drafts [the run's]",
    )


def say(line: str) -> None:
    """Shows a line next to what is generated."""
    print(line, file=sys.stderr, flush=True)


def open_served(
    arguments: argparse.Namespace, slots: int, compile: str | None = None, **how: Any
) -> "ServedPolicy":
    """Checks the options of a policy, and opens it. Arguments as of `Options` and `open_policy`."""
    check_policy_options(arguments)
    say(f"loading {arguments.policy}")
    skip_absent()
    # JAX takes seconds to import, so the command line is checked first.
    from rljax.serving.policy import Options, open_policy

    options = Options(
        arguments.step,
        arguments.temperature,
        arguments.top_p,
        slots,
        arguments.max_prompt_tokens,
        arguments.max_tokens,
        arguments.drafter,
        arguments.workers,
        arguments.ray,
        compile,
        arguments.cache,
        arguments.dtype,
    )
    return open_policy(arguments.policy, options, say, **how)


def check_policy_options(arguments: argparse.Namespace) -> None:
    """Checks what can be checked before JAX is imported, and puts the commit into a name of the hub.

    Raises:
      UserError: an option that is impossible, or a path that holds no policy.
    """
    if arguments.ray is not None and arguments.workers is None:
        raise ConfigError("--ray: without --workers this process decodes; set how many there shall be")
    for name in ("slots", "max_prompt_tokens", "max_tokens", "workers"):
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {value}, expected at least 1")
    if arguments.drafter is not None:
        check_name("--drafter", arguments.drafter, "none")
    arguments.policy = pinned(arguments.policy)
    check_holds_policy(arguments.policy)


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None and arguments.file is not None:
        raise ConfigError("--file: the prompt is given already; leave one out")
    try:
        if arguments.file is not None:
            prompt = Path(arguments.file).read_text(encoding="utf-8")
        else:
            prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt
    except OSError as error:
        raise ConfigError(f"--file: cannot read {arguments.file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 text: {error}") from error
    if not prompt:
        raise ConfigError("the prompt is empty")
    return prompt


@exit_status()
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Runs the command line."""
    arguments = _parser(prog).parse_args(argv)
    plays = arguments.episode is not None
    if plays and (arguments.prompt is not None or arguments.file is not None or arguments.raw):
        raise ConfigError("--episode: the problem is the prompt; leave the prompt, --file and --raw out")
    if plays and arguments.episode < 0:
        raise ConfigError(f"--episode: {arguments.episode}, expected 0 or more")
    prompt = "" if plays else _prompt(arguments)
    if arguments.n < 1:
        raise ConfigError(f"-n: {arguments.n}, expected at least 1")
    served = open_served(
        arguments, min(arguments.n, _MOST_SLOTS), max_waiting=arguments.n, compile_first=False, plays=plays
    )
    from rljax.requests import Episode
    from rljax.serving.jobs import Job
    from rljax.serving.programs import compiling_lines
    from rljax.serving.prompts import chat_ids, text_ids
    from rljax.serving.text import TextStream

    problem = None if served.task is None else served.task.problem("heldout", arguments.episode)
    if problem is not None:
        prompt_ids = chat_ids(served, problem.messages)
        say(" ".join(message["content"] for message in problem.messages))
    elif arguments.raw:
        prompt_ids = text_ids(served, prompt)
    else:
        prompt_ids = chat_ids(served, [{"role": "user", "content": prompt}])
    strings = served.stop_strings()
    pieces: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(arguments.n)]
    jobs = [
        Job(
            served.request(prompt_ids, arguments.seed, sample, served.max_tokens, problem=problem),
            pieces[sample].put,
            served.stop(strings),
        )
        for sample in range(arguments.n)
    ]
    pool = served.worker.engine.pool
    start, compiled, before = time.perf_counter(), len(pool), pool.seconds
    served.worker.start()
    compiling = contextlib.ExitStack()
    try:
        compiling.enter_context(compiling_lines(pool, say))
        served.worker.submit(jobs)
        endings = []
        for sample, sample_pieces in enumerate(pieces):
            if arguments.n > 1:
                print(f"--- {sample + 1} of {arguments.n}", flush=True)
            # The turns of an episode are told apart by their markers.
            decode, read = served.tokenizer.decode, served.tokenizer.response_text
            stream, ending = TextStream(decode) if plays else TextStream(decode, strings, read), None
            while ending is None:
                piece = sample_pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                ending = piece.ending
                if arguments.tokens:
                    print(*piece.tokens, end=" ", flush=True)
                else:
                    print(stream.push(piece.tokens), end="", flush=True)
            print("" if arguments.tokens else stream.finish(), flush=True)
            endings.append(ending)
            if plays:
                episode = jobs[sample].response.episode or Episode()
                turns = ", ".join(f"{reward:g}" for reward in episode.rewards)
                say(f"reward {episode.reward:g}, of each turn {turns}")
    finally:  # the interpreter must not end while the thread is inside the device's code
        compiling.close()
        served.worker.close(drain=False)
    seconds = time.perf_counter() - start
    statistics = served.worker.statistics
    speed = _speed(statistics.tokens, seconds, len(pool) - compiled, pool.seconds - before)
    say(f"{speed}, accept length {statistics.accept_length:.2f}, ended by {', '.join(endings)}")


def _speed(tokens: int, seconds: float, programs: int, compiling: float) -> str:
    """Returns the tokens per second of the time in which nothing was compiled, in words: `seconds` include
    those of compiling so many programs.
    """
    decoding = max(seconds - compiling, 1e-9)
    beside = f" beside {compiling:.2f} s for compiling {programs} programs" if programs else ""
    return f"{tokens} tokens in {decoding:.2f} s{beside}, {tokens / decoding:.1f} tokens/s"
