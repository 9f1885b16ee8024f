"""The config: what is accepted, what is refused and in which words, and the command line on top of it."""

import os
import sys
import types
import typing
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter

from rljax.config import AlgorithmConfig, ExperimentConfig, describe_keys, load_config, to_yaml
from rljax.config.keys import KEYS
from rljax.config.learning import CHUNK
from rljax.errors import ConfigError
from rljax.numerics.rows import KEY_CHUNK
from tests.configs import MINIMAL, table
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent


def refusal(path, *overrides) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what is accepted


def test_defaults_fill_what_the_file_leaves_out(config_file):
    config = load_config(config_file, [])
    assert config.rollout.samples_per_prompt == 8
    assert config.engine.row_invariant == config.policy.compute_dtype == "auto"
    assert config.warm_start is None


@pytest.mark.parametrize(
    ("overrides", "pack_length", "rows"),
    [
        ((), 1536, 1),
        (("rollout.max_prompt_length=80", "rollout.max_response_length=48"), 256, 8),
        (("rollout.max_prompt_length=80", "rollout.max_response_length=48", "mesh.fsdp=4"), 256, 32),
        (("training.pack_length=2048",), 2048, 1),
        (("training.pack_length=8192", "mesh.fsdp=4"), 8192, 4),
        (("training.rows_per_microbatch=3",), 1536, 3),
    ],
)
def test_rows_of_an_update_follow_from_the_lengths(config_file, overrides, pack_length, rows):
    training = load_config(config_file, overrides).training
    assert (training.pack_length, training.rows_per_microbatch) == (pack_length, rows)
    assert CHUNK == KEY_CHUNK  # the config does not import JAX, and so not the other


def test_every_spelling_of_a_float_is_one(config_file):
    for text in ("1e-4", "1E-4", "1.0e-4", "0.0001", ".0001", "+1e-4", "1.e-4"):
        config_file.write_text(MINIMAL + f"optimizer:\n  learning_rate: {text}\n")
        optimizer = load_config(config_file, [f"optimizer.weight_decay={text}"]).optimizer
        assert optimizer.learning_rate == optimizer.weight_decay == 1e-4
    temperature = load_config(config_file, ["rollout.temperature=1"]).rollout.temperature
    assert temperature == 1.0 and isinstance(temperature, float)  # a whole number will do


def test_backends_of_a_kernel(config_file):
    several = ("[mosaic_gpu, xla]", ("mosaic_gpu", "xla"))
    for text, backends in (("xla", ("xla",)), several, ("[]", None), ("null", None)):
        kernels = load_config(config_file, [f"kernels.tree_attention={text}"]).kernels
        assert kernels.tree_attention == backends and kernels.compaction is None


def test_a_home_directory_is_expanded_in_every_path(config_file):
    """As no shell does in key=~/directory."""
    config = load_config(config_file, ["policy.path=~/x", "policy.shape=null", "run_dir=~/y"])
    assert (config.policy.path, config.run_dir) == (os.path.expanduser("~/x"), os.path.expanduser("~/y"))
    bare = lambda kind: [(typing.get_args(part) or (part,))[0] for part in typing.get_args(kind)]  # noqa: E731
    texts = [key for key in KEYS.values() if str in (key.field.annotation, *bare(key.field.annotation))]
    others = {"tracking.name", "agents.agent"}  # whose descriptions mention directories
    paths = [key for key in texts if "irectory" in key.field.description and key.name not in others]
    assert {"policy.lora.path", "algorithm.teacher", "cluster.replay"} <= {key.name for key in paths}
    for key in paths:
        adapter = TypeAdapter(Annotated[key.field.annotation, key.field])
        assert adapter.validate_python("~/x") == os.path.expanduser("~/x"), key.name


def test_overrides_reach_every_kind_of_key(config_file):
    overrides = """
seed=3
run_dir=2026-01-01
training.steps=1_000
training.steps=7
rollout.stop=['</s>', "a=b"]
task.args.max_terms=5
task.args.nested.deep=x
warm_start={steps: 3, learning_rate: 1e-3}
warm_start.tokens_per_step=64
engine.batch_buckets=[8, 64]
policy.shape.hidden_size=32
engine.compilation_cache=null
"""
    config = load_config(config_file, overrides.strip().splitlines())
    assert (config.seed, config.run_dir) == (3, "2026-01-01")  # a date is text
    assert config.training.steps == 7  # the last one wins
    assert config.rollout.stop == ("</s>", "a=b")
    assert config.task.args == {"max_terms": 5, "nested": {"deep": "x"}}
    warm_start = config.warm_start
    assert (warm_start.steps, warm_start.learning_rate, warm_start.tokens_per_step) == (3, 1e-3, 64)
    assert config.engine.batch_buckets == (8, 64)
    assert config.policy.shape.hidden_size == 32
    assert config.engine.compilation_cache is None


def test_a_section_whose_keys_are_all_commented_out_means_its_defaults(config_file):
    config_file.write_text(MINIMAL + "optimizer:\n  # learning_rate: 1\n")
    assert load_config(config_file).optimizer == ExperimentConfig.model_fields["optimizer"].default
    task = "\n  name: chain_arithmetic\n  args:\n    # a: 1"
    config_file.write_text(MINIMAL.replace("{name: chain_arithmetic}", task))
    assert load_config(config_file).task.args == {}


def test_presets_only_set_defaults(config_file):
    grpo = load_config(config_file).algorithm
    assert (grpo.clip_high, grpo.aggregation, grpo.dynamic_sampling) == (0.2, "sequence_mean", False)
    assert (grpo.kl_coefficient, grpo.overlong_buffer) == (0.04, 0)
    dapo = load_config(config_file, ["algorithm.name=dapo", "rollout.max_response_length=500"]).algorithm
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, "token_mean")
    assert (dapo.dynamic_sampling, dapo.kl_coefficient, dapo.overlong_buffer) == (True, 0.0, 100)
    overrides = ["algorithm.name=dapo", "algorithm.clip_high=0.3", "algorithm.overlong_buffer=0"]
    explicit = load_config(config_file, overrides).algorithm
    assert (explicit.clip_high, explicit.overlong_buffer) == (0.3, 0)
    assert explicit.aggregation == "token_mean"
    assert AlgorithmConfig() == grpo


def test_yaml_round_trip(config_file, tmp_path):
    overrides = [
        "algorithm.name=dapo",
        "optimizer.learning_rate=1e-7",
        "rollout.stop=['\\n', ünï, 'null', '1e-4', '2026-01-01', '1_0']",
        "run_dir='1e-4'",  # text that looks like a number to the loader, though not to plain YAML 1.1
        "task.args={a: [1, 2.5, 'x'], b: {c: null}, d: 1e9}",
        "warm_start={}",
    ]
    config = load_config(config_file, overrides)
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config
    assert load_config(again).run_dir == "1e-4"
    assert to_yaml(load_config(again)) == to_yaml(config)


# --- what is refused

WRONG_VALUES = """
seed=three -> seed: should be a whole number, got "three"
training.steps=1.5 -> training.steps: should be a whole number, got 1.5
training.steps=0 -> training.steps: should be greater than or equal to 1, got 0
training.steps= -> training.steps: should be a whole number, got nothing
training.remat=1 -> training.remat: should be true or false, got 1
rollout.temperature=0 -> rollout.temperature: should be greater than 0, got 0
rollout.temperature=.inf -> rollout.temperature: should be a finite number, got Infinity
rollout.top_p=1.1 -> rollout.top_p: should be less than or equal to 1, got 1.1
rollout.stop=abc -> rollout.stop: should be a list, got "abc"
rollout.stop=[''] -> rollout.stop.0: should be text that is not empty, got ""
engine.batch_buckets=[1, x] -> engine.batch_buckets.1: should be a whole number, got "x"
algorithm.name=pppo -> algorithm.name: should be 'grpo', 'dr_grpo', 'dapo',
kernels.compaction=pallas -> kernels.compaction.0: should be 'xla', 'mosaic_gpu',
kernels.compaction=3 -> kernels.compaction: should be a list, got 3
optimizer=3 -> optimizer: should be a section of keys, got 3
policy.shape.num_heads=null -> policy.shape.num_heads: should be a whole number, got nothing
engine.verification=copied -> engine.verification: should be 'coupled',
speculation.verify_buckets=[0, 8] -> speculation.verify_buckets.0: should be greater than or equal to 1
optimizer.lr=1 -> optimizer.lr: unknown key; optimizer has name, learning_rate, schedule
"""
UNKNOWN_KEYS = """
rollout.temprature=1 -> rollout.temprature: unknown key; the nearest is rollout.temperature
rollouts.temperature=1 -> rollouts.temperature: unknown key; the nearest is rollout.temperature
optimiser=1 -> optimiser: unknown key; the nearest is optimizer
training.learning_rate=1 -> training.learning_rate: unknown key; the nearest is optimizer.learning_rate
learning_rate=1 -> learning_rate: unknown key; the nearest is optimizer.learning_rate
policy.shape.heads=1 -> policy.shape.heads: unknown key; the nearest is policy.shape.num_heads
training.step=1 -> training.step: unknown key; the nearest is training.steps
algorithm.clip_hihg=1 -> algorithm.clip_hihg: unknown key; the nearest is algorithm.clip_high
seed.value=1 -> seed.value: unknown key; the nearest is seed, which holds a value
"""


@pytest.mark.parametrize(("override", "message"), table(WRONG_VALUES))
def test_wrong_values_say_what_was_given_and_what_would_be_right(config_file, override, message):
    assert refusal(config_file, override).startswith(message)


@pytest.mark.parametrize(("override", "message"), table(UNKNOWN_KEYS))
def test_an_unknown_key_names_the_nearest(config_file, override, message):
    assert refusal(config_file, override) == message


def test_overrides_that_are_none(config_file):
    assert refusal(config_file, "training.steps") == "training.steps: not an override; write it as key=value"
    assert refusal(config_file, "seed=[1").startswith("seed: not valid YAML: ")
    message = refusal(config_file, "warm_start.steps=5")
    assert message.startswith("warm_start.steps: ") and "no warm_start section" in message
    assert "warm_start={steps: 5" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "PATH: no such config file; Packaged, for --config from any"),
        (b"\xff\xfe\x00", "PATH: cannot read the config: it is not UTF-8 text"),
        (b"seed: 1\nrollout: {temperature: 1\ntask: x\n", "PATH:3: not valid YAML: "),
        (b"seed: 1\nrollout:\n\ttemperature: 1\n", "PATH:3: not valid YAML: "),
        (b"seed: 1\nrun_dir: x\nseed: 2\n", "PATH:3: not valid YAML: 'seed' is given twice"),
        (b"- 1\n", "PATH: a config is a mapping of keys to values, got [1]"),
        (b"seed: \x00\n", "PATH: not valid YAML: "),
        (b"# nothing\n", "run_dir: must be set. Directory of config, metrics"),
        (MINIMAL.encode() + b"1: x\n", "1: "),
        (MINIMAL.encode() + b"mesh: {dta: 1}\n", "mesh.dta: unknown key; the nearest is mesh.data"),
        (MINIMAL.replace("run_dir", "run_dri").encode(), "run_dri: unknown key; the nearest is run_dir"),
    ],
)
def test_files_that_are_none(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_bytes(content)
    assert refusal(path).startswith(message.replace("PATH", str(path)))
    assert refusal(tmp_path).startswith(f"{tmp_path}: cannot read the config: ")


# --- help, and the command line


def test_help_lists_every_key_with_its_reason():
    text = describe_keys(width=80)
    assert max(map(len, text.splitlines())) <= 80

    def check(section, prefix):
        for name, field in section.model_fields.items():
            dotted = f"{prefix}{name}"
            kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
            sections = [kind for kind in kinds if isinstance(kind, type) and hasattr(kind, "model_fields")]
            if sections:
                assert f"\n{dotted}: " in text
                check(sections[0], f"{dotted}.")
            else:
                assert f"\n  {dotted} " in f"\n{text}"
                assert field.description and " ".join(field.description.split()) in " ".join(text.split())

    check(ExperimentConfig, "")
    assert "[0.2, dapo: 0.28, gspo:" in text
    assert "[required]" in text


def test_packaged_configs_are_valid_and_found_by_their_names_from_any_directory(tmp_path, monkeypatch):
    for path in (ROOT / "configs").glob("*.yaml"):
        load_config(path)
    monkeypatch.chdir(tmp_path)
    packaged = load_config(ROOT / "configs" / "quickstart.yaml")
    assert load_config("quickstart") == load_config("quickstart.yaml") == packaged
    (tmp_path / "quickstart").mkdir()  # a folder, such as a run's, is no config
    assert load_config("quickstart") == packaged
    path = load_config("qwen3-8b").policy.path
    assert Path(path) == ROOT / "configs" / "models" / "qwen3-8b"
    (tmp_path / "configs" / "models" / "qwen3-8b").mkdir(parents=True)
    assert load_config("qwen3-8b").policy.path == "configs/models/qwen3-8b"  # one's own goes first
    (tmp_path / "quickstart.yaml").write_text((ROOT / "configs" / "tools.yaml").read_text())
    assert load_config("quickstart.yaml") == load_config(ROOT / "configs" / "tools.yaml")


@pytest.mark.parametrize("name", ["quikstart", "configs/quickstart.yaml", "elsewhere/quikstart.yaml"])
def test_a_missing_config_names_the_nearest_packaged_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refusal(name)
    assert said.startswith(f"{name}: no such config file; did you mean quickstart? Packaged")
    assert "qwen2.5-0.5b" in said and "\n" not in said


def test_a_config_that_is_printed_can_be_read_again(config_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train = load_script("train").main
    assert train(["seed=4", "--config", "x.yaml", "--print-config", "training.steps=3"]) == 0
    (tmp_path / "shown.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "shown.yaml") == load_config(config_file, ["seed=4", "training.steps=3"])
    assert train(["--config", "x.yaml", "rollout.temprature=1"]) == 2
    said = "error: rollout.temprature: unknown key; the nearest is rollout.temperature\n"
    assert capsys.readouterr() == ("", said)


def test_the_command_line_runs_the_loop_and_reports_how_it_ends(config_file, monkeypatch, capsys):
    train = load_script("train").main
    with pytest.raises(SystemExit) as leaving:
        train(["--help"])
    assert leaving.value.code == 0 and describe_keys() in capsys.readouterr().out
    configs, ends = [], [None, ConfigError("mesh: too many"), KeyboardInterrupt()]

    def run(config):
        configs.append(config)
        if end := ends.pop(0):
            raise end

    monkeypatch.setitem(sys.modules, "rljax.training.session", types.SimpleNamespace(run=run))
    assert [train(["--config", str(config_file), "seed=5"]) for _ in range(3)] == [0, 2, 130]
    assert configs == [load_config(config_file, ["seed=5"])] * 3
    failed, interrupted = capsys.readouterr().err.splitlines()[-2:]
    assert failed == "error: mesh: too many"
    assert interrupted.startswith("interrupted; the same command resumes runs/x")
