"""scripts/generate.py: where the prompt comes from, what is printed, and one line for each mistake."""

import io
import json
import os
import queue
import shlex
import sys
import threading
import time
import types
from concurrent.futures import Future

import numpy as np
import pytest

from drafters.base import Drafter, Outcome
from drafters.registry import make_drafter
from rljax.assembly.saved_policy import load_saved_policy
from rljax.config.decoding import RolloutConfig
from rljax.config.speculation import SpeculationConfig
from rljax.engine.executables import ExecutablePool
from rljax.errors import ConfigError
from rljax.models.huggingface import save_model
from rljax.models.tokenizer import Tokenizer
from rljax.rollout.decode_loop import DecodeLoop
from rljax.serving import policy as serving_policy
from rljax.serving.programs import compiling_lines
from rljax.serving.prompts import chat_ids, text_ids
from rljax.speculation import speculator as speculation
from tests.configs import table
from tests.models.checkpoints import write_tokenizer
from tests.scripts import load_script
from tests.serving.tiny_server import make_run
from tests.tiny_policy import CheapTimes

PROMPT = "47a5b8="
LAST_OCCURRENCE = """
class LastOccurrence:
    def propose(self, tokens, limit):
        tokens = tokens.tolist()
        for start in range(len(tokens) - 2, 0, -1):
            if tokens[start - 1 : start + 1] == tokens[-2:]:
                return tokens[start + 1 :][:limit]
        return []
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Its rollouts were verified by a rule under which tokens depend on drafts."""
    overrides = ("rollout.temperature=0.7", "engine.verification=rejection")
    return make_run(tmp_path_factory.mktemp("generated"), *overrides)


@pytest.fixture
def generate(capsys):
    def generate(*arguments):
        """(status, standard output, standard error)."""
        status = load_script("generate").main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return generate


def test_the_prompt_comes_as_an_argument_a_file_or_standard_input(generate, run, tmp_path, monkeypatch):
    status, text, said = generate(run, PROMPT, "--seed", 3)
    assert status == 0 and len(text) > 2
    assert "tokens/s" in said and "accept length 1.00" in said and "ended by" in said
    assert " s for compiling " in said and said.startswith(f"loading {run}\n")
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    tokens = [int(token) for token in generate(run, "--file", file, "--seed", 3, "--tokens")[1].split()]
    tokenizer = load_saved_policy(run).policy.tokenizer
    assert tokenizer.response_text(tokens) + "\n" == text
    assert max(tokens) < tokenizer.vocab_size < load_saved_policy(run).policy.config.vocab_size
    # After so many looks there is text that ends in no half of a character, which would be held back.
    ends = (tokenizer.response_text(tokens[:count])[-1:] for count in range(4, len(tokens), 4))
    looks = next(i for i, end in enumerate(ends, 1) if end not in ("", "\N{REPLACEMENT CHARACTER}"))
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    printed, seen, step = io.BytesIO(), [], DecodeLoop.step

    def look(loop):  # the next one waits until it is printed
        end = time.monotonic() + 20
        while len(seen) == looks and not printed.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(len(printed.getvalue()))
        step(loop)

    monkeypatch.setattr(DecodeLoop, "step", look)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="utf-8"))
    assert generate(run, "--seed", 3)[0] == 0
    assert 0 < seen[looks] < len(text.encode()), "text should be printed while it is sampled"
    assert printed.getvalue().decode() == text


def test_a_raw_prompt_is_what_the_tokenizer_makes_of_it(tmp_path):
    """With its BOS, which a chat template writes itself."""
    write_tokenizer(tmp_path, "llama3")
    tokenizer = Tokenizer.load(tmp_path)
    served = types.SimpleNamespace(tokenizer=tokenizer, vocab_size=320, max_prompt_tokens=99)
    bos, plain = tokenizer.bos_token_id, tokenizer.encode("The sum of 12")
    assert text_ids(served, "The sum of 12") == [bos, *plain]
    assert chat_ids(served, [{"role": "user", "content": "12"}]).count(bos) == 1


def test_nobody_reads_on(generate, run, monkeypatch):
    """As in `generate.py ... | head -n 1`: it ends without a traceback, and decodes no further."""
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr("sys.stdout", os.fdopen(writing, "w"))
    assert generate(run, PROMPT)[0] == 141
    sys.stdout.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


def test_seed_step_and_template_decide_what_is_said(generate, run):
    said = [
        generate(run, PROMPT, "--tokens", *arguments)[1]
        for arguments in ([], ["--seed", 1], ["--seed", -1], ["--step", 1], ["--raw"], ["--temperature", 1])
    ]
    assert len(set(said)) == len(said)
    assert generate(run, PROMPT, "--tokens")[1] == said[0]
    cut = generate(run, PROMPT, "--tokens", "--max-tokens", 5)[1]
    assert cut.split() == said[0].split()[:5]


def test_a_drafter_changes_no_token(generate, run, tmp_path, monkeypatch):
    """Greedy decoding needs no seed and repeats itself, so prompt lookup is often right; and so is a class
    with one method, by its import path, as `speculation.drafter` takes it in training (docs/drafters.md).
    """
    monkeypatch.setattr(speculation, "PassTimes", CheapTimes)
    (tmp_path / "served_drafter.py").write_text(LAST_OCCURRENCE)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--tokens", "--temperature", 0, "-n", 2]
    plain = generate(run, PROMPT, *arguments, "--seed", 1)
    assert "drafter none" in plain[2] and "accept length 1.00" in plain[2]
    for name in ("prompt_lookup", "served_drafter:LastOccurrence"):
        drafted = generate(run, PROMPT, *arguments, "--drafter", name)
        assert drafted[0] == 0 and drafted[1] == plain[1], drafted[2]
        assert f"drafter {name}" in drafted[2] and "accept length 1.00" not in drafted[2]
    status, _, said = generate(run, PROMPT, "--drafter", "served_drafter:LastOccurence")
    assert status == 2 and said.splitlines()[-1].startswith("error: --drafter: served_drafter:LastOccurence")
    decoded = serving_policy._config(load_saved_policy(run), serving_policy.Options(), 64, print).engine
    assert (decoded.verification, decoded.decode_steps_per_sync) == ("coupled", 64)


def test_the_runs_drafter_is_used_with_what_it_has_learned(run, tmp_path, monkeypatch, generate):
    monkeypatch.setattr(speculation, "PassTimes", CheapTimes)
    learned = []
    load_state = speculation.Speculator.load_state
    monkeypatch.setattr(
        speculation.Speculator,
        "load_state",
        lambda self, state: (learned.append(state), load_state(self, state)),
    )
    overrides = ["speculation.drafter=srt", "rollout.temperature=0.7"]
    state = {"history/" + name: array for name, array in make_drafter("srt").state().items()}
    drafted = make_run(tmp_path, *overrides, drafter=state)
    status, text, said = generate(drafted, PROMPT, "--tokens")
    assert status == 0 and text == generate(run, PROMPT, "--tokens")[1]
    assert "drafter srt" in said
    assert len(learned) == 1 and set(state) <= set(learned[0])
    assert "drafter none" in generate(drafted, PROMPT, "--drafter", "none")[2]


def test_a_hugging_face_directory(generate, run, tmp_path):
    """The policy of the run's checkpoint, with the config's defaults: temperature 1."""
    saved = load_saved_policy(run, 2)
    path = tmp_path / "model"
    source = saved.policy.tokenizer_directory
    save_model(path, saved.policy.config, saved.policy.params, "float32", source)
    lengths = ["--max-prompt-tokens", 64, "--max-tokens", 48]
    status, text, said = generate(path, PROMPT, "--tokens", *lengths)
    assert status == 0 and "temperature 1," in said
    assert text == generate(run, PROMPT, "--tokens", "--temperature", 1, *lengths)[1]
    generation_config = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    (path / "generation_config.json").write_text(json.dumps(generation_config))
    status, text, said = generate(path, PROMPT, "--tokens", *lengths)
    assert status == 0 and "temperature 0.7, top_p 0.9" in said and "repetition_penalty 1.1 is left" in said
    assert text == generate(run, PROMPT, "--tokens", "--top-p", 0.9, *lengths)[1]


MISTAKES = """
RUN '' -> empty
RUN HALF -> not Unicode
RUN 1+1 --file x -> leave one out
RUN --file nowhere.txt -> nowhere.txt
RUN 1+1 -n 0 -> -n
RUN 1+1 --step 7 -> 1, 2
RUN 1+1 --temperature -1 -> --temperature
RUN 1+1 --max-tokens 0 -> --max-tokens
RUN 1+1 --ray auto -> --ray: without --workers
RUN 1+1 --max-tokens 5000 -> positions
RUN 1+1 --drafter sart -> srt
RUN 1+1 --drafter nowhere:Nobody -> nowhere:Nobody: importing nowhere raised
RUN LONG -> more than the 64
"""


@pytest.mark.parametrize(("arguments", "said"), table(MISTAKES))
def test_mistakes_are_one_line(generate, run, arguments, said):
    words = {"RUN": run, "HALF": "\udcff", "LONG": "7a" * 100}
    status, text, error = generate(*[words.get(word, word) for word in shlex.split(arguments)])
    assert (status, text) == (2, "")
    last = error.splitlines()[-1]
    assert last.startswith("error: ") and said in last


def test_a_length_that_is_not_set_fits_beside_one_that_is():
    def lengths(prompt, response, **options):
        rollout = RolloutConfig(max_prompt_length=prompt, max_response_length=response)
        fitting = serving_policy._fitting(rollout, serving_policy.Options(**options), 256, said.append)
        return fitting.max_prompt_length, fitting.max_response_length

    said = []
    assert lengths(200, 56) == (200, 56) and said == []
    assert lengths(256, 16, max_tokens=16) == (240, 16) and "responses of up to 16" in said[0]
    assert lengths(200, 512, max_prompt_tokens=200) == (200, 56) and lengths(200, 512) == (128, 128)
    with pytest.raises(ConfigError, match="more than the 256 positions"):
        lengths(200, 512, max_tokens=512)


def test_compiling_is_said_while_it_goes_on():
    said, pool = queue.SimpleQueue(), ExecutablePool()
    pool._programs["before"] = len
    with compiling_lines(pool, said.put, seconds=0.001):
        pool._programs["first"] = len
        pool._in_flight["second"] = Future()
        assert said.get(timeout=20).startswith("compiling: 1 program in ")
        del pool._in_flight["second"]
    quiet = queue.SimpleQueue()
    with compiling_lines(pool, quiet.put, seconds=0.001):
        time.sleep(0.02)
    assert quiet.empty()


def test_drafters_have_the_runs_arguments_but_not_its_files():
    """Those of the run, one of them by its name, another one, or none."""
    others = {"srt": {"min_match": 3, "spill_dir": "spilled"}, "histospec": {"spill_dir": "x"}}
    others["q4"] = {"kind": "quantized", "bits": 4}
    always = {"choice": "fixed", "strategies": [{"drafter": "eagle", "depth": 2, "top_k": 1, "nodes": 2}]}
    eagle = {"drafter": "eagle", "args": {"depths": [2], "save_dir": "heads"}}
    config = SpeculationConfig(**eagle, others=others, overlap=True, **always)
    own, srt, q4, other, none = (
        serving_policy._speculation(config, name) for name in (None, "srt", "q4", "prompt_lookup", "none")
    )
    assert (own.drafter, own.args, own.choice, own.overlap) == ("eagle", {"depths": [2]}, "fixed", False)
    assert own.kinds == config.kinds and own.arguments["q4"] == {"bits": 4}
    assert (own.arguments["srt"], own.arguments["histospec"]) == ({"min_match": 3}, {})
    assert (srt.args, srt.others, srt.choice) == ({"min_match": 3}, {}, "expected")
    assert (q4.drafter, q4.args, q4.others) == ("quantized", {"bits": 4}, {})
    assert (other.drafter, other.args, none.drafters) == ("prompt_lookup", {}, [])


def test_prompts_that_a_run_has_learned():
    drafter, prompts = make_drafter("srt"), [(1, 2, 3), (4,)]
    drafter.learn([Outcome(prompt, np.arange(5, dtype=np.int32), 0.0) for prompt in prompts * 2])
    state = {"history/" + name: array for name, array in drafter.state().items()}
    assert serving_policy._prompts(state) == prompts
    assert serving_policy._prompts({}) == []


def test_a_head_that_nobody_has_trained_is_told():
    heads = {str(trained): Drafter() for trained in (False, True)}
    for trained in (False, True):
        heads[str(trained)].training = types.SimpleNamespace(trained=trained)
    said = []
    serving_policy._report_untrained({"srt": make_drafter("srt"), **heads}, said.append)
    assert len(said) == 1 and said[0].startswith("drafter False: ")
