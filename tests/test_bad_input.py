"""Bad input, from configs to checkpoints: one line that names it, exit status 2, and nothing lost.

Every case goes through scripts/train.py as a user's command does, before anything is compiled.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from rljax.config import load_config
from rljax.models.config import ModelConfig
from rljax.models.huggingface import save_model
from rljax.models.transformer import param_shapes
from rljax.progress import Progress
from rljax.run_directory import RunDirectory
from rljax.training import loop, saving, session
from tests.configs import table
from tests.models.checkpoints import write_tokenizer
from tests.scripts import load_script
from tests.training.tiny_run import write_config

ROOT = Path(__file__).parents[1]
POLICY = ModelConfig("qwen3", 384, 64, 1, 2, 1, 64, 64, tie_embeddings=True, qk_norm=True, max_positions=256)
OVERRIDES = ("warm_start=null", "training.steps=9", "speculation.args={}")


def write_policy(directory):
    """Writes a Hugging Face directory of random weights."""
    write_tokenizer(directory.with_name("tokenizer"))
    rng = np.random.default_rng(0)
    fill = lambda shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    params = jax.tree.map(fill, param_shapes(POLICY), is_leaf=lambda node: isinstance(node, tuple))
    save_model(directory, POLICY, params, "float32", tokenizer_source=directory.with_name("tokenizer"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A Hugging Face directory, and a run with checkpoints of its first two steps."""
    directory = tmp_path_factory.mktemp("world")
    config = load_config(write_config(directory), [*OVERRIDES, "speculation.drafter=srt"])
    write_policy(directory / "policy")
    files = RunDirectory(config.run_dir)
    files.write_config(config)
    checkpoints = session.open_checkpoints(files, config.checkpoint)
    run = session.make_run(config, files, checkpoints, Progress(), 0.0)
    files.record_session(0)
    files.append_metrics({"step": 0})
    for step in (1, 2):
        run.state.step = step
        files.append_metrics({"step": step})
        files.append_decisions(step, [{"drafter": "plain", "tokens": 1}])
        saving.save(run, None)
    checkpoints.close()
    return directory


def contents(directory):
    files = (file for file in directory.rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


@pytest.fixture
def refusal(tmp_path, monkeypatch, capsys):
    """What training with the tiny config says; no file that was there may be gone or another one."""
    monkeypatch.setattr(loop, "compile_programs", lambda _: pytest.fail("compiled"))
    config = write_config(tmp_path)

    def refusal(*arguments) -> str:
        before = contents(tmp_path)
        overrides = [each.replace("POLICY", str(tmp_path / "policy")) for each in (*OVERRIDES, *arguments)]
        status = load_script("train").main(["--config", str(config), *overrides])
        errors = capsys.readouterr().err
        assert status == 2 and errors.startswith("error: ") and errors.count("\n") == 1, errors
        after = contents(tmp_path)
        assert {name: after.get(name) for name in before} == before
        assert not any("checkpoints" in name or "metrics" in name for name in after.keys() - before.keys())
        return errors.removeprefix("error: ").rstrip("\n")

    return refusal


@pytest.fixture
def policy(world, tmp_path):
    """A copy of the Hugging Face directory, POLICY in a command."""
    return shutil.copytree(world / "policy", tmp_path / "policy")


# -- the config, problems and rewards ---------------------------------------------------------------------


KEYS = """
mesh.data=4096 -> mesh: data 4096 * fsdp 1 * tensor 1 = 4096 devices, but there
task.name=chain_arithmatic -> did you mean 'chain_arithmetic'?
run_dir=config.yaml -> run_dir: cannot create
run_dir=/proc/self -> cannot be written
speculation.drafter=eagle & speculation.args={path: nowhere} -> nowhere
speculation.drafter=small_model & speculation.args={path: nowhere} -> nowhere
speculation.drafter=small_model & speculation.args={path: POLICY} -> vocab
rollout.max_prompt_length=8 & rollout.long_prompts=stop
    -> rollout.max_prompt_length: 8, but the prompt of problem train/0
task={name: dataset, args: {path: cut.jsonl}, rewards: [{name: exact}]} -> cut.jsonl:21: is not valid JSON:
task={name: dataset, args: {path: rows.jsonl}, rewards: [{name: numerc}]}
    -> task.rewards.0.name: unknown reward 'numerc'; did you mean
"""
ROWS = "".join(f'{{"prompt": "{n}?", "answer": "{n}"}}\n' for n in range(20))


@pytest.mark.parametrize(("arguments", "says"), table(KEYS))
def test_a_key(policy, refusal, tmp_path, monkeypatch, arguments, says):
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "cut.jsonl").write_text(ROWS + '{"prompt": \n')
    monkeypatch.chdir(tmp_path)
    assert says in refusal(*arguments.split(" & "))


# -- the policy and its tokenizer --------------------------------------------------------------------------


def edit_json(name, *inside, **changes):
    """Changes keys of a JSON file, or of what is inside it under these keys."""

    def edit(directory):
        content = json.loads((directory / name).read_text())
        functools.reduce(dict.get, inside, content).update(changes)
        (directory / name).write_text(json.dumps(content))

    return edit


def with_norm(norm):
    """Replaces the last norm, or takes it away."""

    def edit(policy):
        tensors = safetensors.numpy.load_file(policy / WEIGHTS) | {NORM: norm}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        safetensors.numpy.save_file(kept, policy / WEIGHTS)

    return edit


def cut(name):
    return lambda of: os.truncate(of / name, (of / name).stat().st_size // 2)


def gone(name):
    return lambda of: (of / name).unlink()


NORM = "model.norm.weight"
WEIGHTS, TOKENIZER, CHAT = "model.safetensors", "tokenizer.json", "tokenizer_config.json"
POLICIES = {
    "missing directory": (shutil.rmtree, "does not exist"),
    "no config": (gone("config.json"), "config.json does not exist"),
    "cut config": (cut("config.json"), "config.json"),
    "another architecture": (edit_json("config.json", model_type="gpt2"), "gpt2"),
    "no weights": (gone(WEIGHTS), WEIGHTS),
    "cut weights": (cut(WEIGHTS), WEIGHTS),
    "a missing tensor": (with_norm(None), f"missing tensor {NORM} [64]"),
    "a misshapen tensor": (with_norm(np.zeros(63, np.float32)), f"{NORM} has shape [63], but config.json"),
    "another vocabulary": (edit_json("config.json", vocab_size=448), "embed_tokens"),
    "short positions": (edit_json("config.json", max_position_embeddings=64), "made for sequences of 64 tok"),
    "cut tokenizer": (cut(TOKENIZER), "tokenizer.json cannot be read"),
    "a broken template": (edit_json(CHAT, chat_template="{% for %}"), "template, line 1: not valid jinja"),
    "a tokenizer larger than the embedding": (
        edit_json(TOKENIZER, "model", "vocab", far=999),
        "has id 999, but the policy's vocab_size",
    ),
}


@pytest.mark.parametrize("case", POLICIES)
def test_a_policy(policy, refusal, case):
    damage, says = POLICIES[case]
    damage(policy)
    assert says in refusal("policy={path: POLICY}")


def test_a_policy_that_was_mistyped_does_not_bind_the_run(policy, refusal, tmp_path, monkeypatch):
    mistyped = f"policy={{path: {tmp_path}/polizy}}"
    assert "polizy" in refusal(mistyped)
    assert not (tmp_path / "run" / "config.yaml").exists()
    shutil.copytree(policy, tmp_path / "polizy")
    (tmp_path / "polizy" / WEIGHTS).unlink()
    assert "polizy" in refusal(mistyped)
    assert (tmp_path / "run" / "config.yaml").exists()
    monkeypatch.setattr(loop, "compile_programs", lambda _: None)
    monkeypatch.setattr(session, "train", lambda *_: None)
    overrides = [*OVERRIDES, f"policy={{path: {policy}}}"]
    assert load_script("train").main(["--config", str(tmp_path / "config.yaml"), *overrides]) == 0


# -- a run that is resumed ---------------------------------------------------------------------------------


def flip_a_bit(run):
    files = [file for file in (run / "checkpoints" / "2" / "arrays").rglob("*") if file.is_file()]
    path = max(files, key=lambda file: file.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def garbage_line(name):
    return lambda run: (run / name).write_bytes(b"garbage\n" + (run / name).read_bytes())


SEAL = "checkpoints/2/checkpoint.json"
NO_METRICS = "metrics.jsonl:1: not a metrics line"
SEVERAL = (
    "has 1.0 (and optimizer.learning_rate: 0.001 -> 1e-05); choose another run_dir, set it back to resume"
    " that run, or go on with --allow-changes"
)
OF_ANOTHER = "in this run; give the run the policy and optimizer it was saved with, or another run_dir"
UNREADABLE = "holds a run with an unreadable config (nonsense: unknown key"
RUNS = {  # what is done to the run, what is said, and arguments of the resuming command
    "several keys": (lambda _: None, SEVERAL, "rollout.temperature=0.5", "optimizer.learning_rate=1e-5"),
    "another, allowed": (lambda _: None, OF_ANOTHER, "policy.shape.tie_embeddings=false", "--allow-changes"),
    "an unreadable config": (lambda run: (run / "config.yaml").write_text("nonsense: 1\n"), UNREADABLE),
    "a flipped bit": (flip_a_bit, "differs from what was saved (CRC-32)"),
    "a missing host file": (gone("checkpoints/2/host_arrays.npz"), "cannot be read (No such file or direct"),
    "a cut seal": (cut(SEAL), "checkpoint.json: damaged; delete "),
    "no data position": (edit_json(SEAL, host_state={}), "data_position"),
    "garbage metrics": (garbage_line("metrics.jsonl"), NO_METRICS),
    "garbage sessions": (garbage_line("sessions.jsonl"), "sessions.jsonl:1: not a line of JSON"),
    "a cut tokenizer": (cut("tokenizer/tokenizer.json"), "tokenizer.json cannot be read"),
}


@pytest.fixture
def run(world, tmp_path):
    """A copy of the run."""
    shutil.copytree(world / "run", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(world), str(tmp_path)))
    return tmp_path / "run"


@pytest.mark.parametrize("case", RUNS)
def test_a_run(run, refusal, case):
    damage, says, *arguments = RUNS[case]
    damage(run)
    assert says in refusal("speculation.drafter=srt", *arguments)


def test_a_run_that_another_process_works_on(run, refusal):
    code = (
        "import sys; from rljax.run_directory import RunDirectory\n"
        "with RunDirectory(sys.argv[1]).locked(): print('locked', flush=True); sys.stdin.read()"
    )
    command, environment = [sys.executable, "-c", code, str(run)], os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as other:
        assert other.stdout.readline() == b"locked\n"
        says = refusal("speculation.drafter=srt")
        assert says.startswith(f"run_dir: another process works on the run in {run}; let it end")


def test_the_run_is_good_until_it_is_damaged(run, tmp_path, monkeypatch):
    """What the cases above begin with does resume, with a drafter or without."""
    config, reached = write_config(tmp_path), []
    monkeypatch.setattr(loop, "compile_programs", lambda run: reached.append(run.state.step))
    monkeypatch.setattr(loop, "advance", lambda run: setattr(run.state, "step", 9))
    for drafter in ("srt", "null"):
        arguments = [*OVERRIDES, f"speculation.drafter={drafter}"]
        assert load_script("train").main(["--config", str(config), *arguments]) == 0
    assert reached == [2, 2]
