"""The config: what is accepted, what is refused and in which words, and the command line on top of it."""

import os
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import TypeAdapter

from rljax.config import (
    AlgorithmConfig,
    ExperimentConfig,
    MeshConfig,
    check_devices,
    describe_keys,
    load_config,
    to_yaml,
)
from rljax.config.keys import KEYS
from rljax.config.learning import CHUNK
from rljax.errors import ConfigError
from rljax.numerics.rows import KEY_CHUNK
from tests.configs import MINIMAL
from tests.scripts import SCRIPTS, load_script

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


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".0001", "+1e-4", "1.e-4"])
def test_every_spelling_of_a_float_is_one(config_file, text):
    assert load_config(config_file, [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == 1e-4
    config_file.write_text(MINIMAL + f"optimizer:\n  learning_rate: {text}\n")
    assert load_config(config_file).optimizer.learning_rate == 1e-4


def test_a_whole_number_will_do_for_a_float(config_file):
    temperature = load_config(config_file, ["rollout.temperature=1"]).rollout.temperature
    assert temperature == 1.0 and isinstance(temperature, float)


@pytest.mark.parametrize(
    ("text", "kernels"),
    [("xla", ("xla",)), ("[mosaic_gpu, xla]", ("mosaic_gpu", "xla")), ("[]", None), ("null", None)],
)
def test_backends_of_a_kernel(config_file, text, kernels):
    config = load_config(config_file, [f"kernels.tree_attention={text}"])
    assert config.kernels.tree_attention == kernels and config.kernels.compaction is None


def test_dates_are_text(config_file):
    assert load_config(config_file, ["run_dir=2026-01-01"]).run_dir == "2026-01-01"


def test_a_home_directory_is_expanded_in_every_path(config_file):
    """As no shell does in key=~/directory."""
    config = load_config(config_file, ["policy.path=~/x", "policy.shape=null", "run_dir=~/y"])
    assert (config.policy.path, config.run_dir) == (os.path.expanduser("~/x"), os.path.expanduser("~/y"))
    texts = [key for key in KEYS.values() if str in (key.field.annotation, *_bare(key.field.annotation))]
    others = {"tracking.name", "agents.agent"}  # whose descriptions mention directories
    paths = [key for key in texts if "irectory" in key.field.description and key.name not in others]
    assert {"policy.lora.path", "algorithm.teacher", "cluster.replay"} <= {key.name for key in paths}
    for key in paths:
        adapter = TypeAdapter(Annotated[key.field.annotation, key.field])
        assert adapter.validate_python("~/x") == os.path.expanduser("~/x"), key.name


def _bare(annotation):
    """The types in a union, without what validates them."""
    return [(typing.get_args(part) or (part,))[0] for part in typing.get_args(annotation)]


def test_overrides_reach_every_kind_of_key(config_file):
    config = load_config(
        config_file,
        [
            "seed=3",
            "training.steps=1_000",
            "training.steps=7",  # the last one wins
            "rollout.stop=['</s>', \"a=b\"]",
            "task.args.max_terms=5",
            "task.args.nested.deep=x",
            "warm_start={steps: 3, learning_rate: 1e-3}",
            "warm_start.tokens_per_step=64",
            "engine.batch_buckets=[8, 64]",
            "policy.shape.hidden_size=32",
            "engine.compilation_cache=null",
        ],
    )
    assert config.seed == 3
    assert config.training.steps == 7
    assert config.rollout.stop == ("</s>", "a=b")
    assert config.task.args == {"max_terms": 5, "nested": {"deep": "x"}}
    assert (config.warm_start.steps, config.warm_start.learning_rate) == (3, 1e-3)
    assert config.warm_start.tokens_per_step == 64
    assert config.engine.batch_buckets == (8, 64)
    assert config.policy.shape.hidden_size == 32
    assert config.engine.compilation_cache is None


def test_a_section_whose_keys_are_all_commented_out_means_its_defaults(config_file):
    config_file.write_text(MINIMAL + "optimizer:\n  # learning_rate: 1\n")
    assert load_config(config_file).optimizer == ExperimentConfig.model_fields["optimizer"].default
    config_file.write_text(
        MINIMAL.replace("{name: chain_arithmetic}", "\n  name: chain_arithmetic\n  args:\n    # a: 1")
    )
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
    config = load_config(
        config_file,
        [
            "algorithm.name=dapo",
            "optimizer.learning_rate=1e-7",
            "rollout.stop=['\\n', ünï, 'null', '1e-4', '2026-01-01', '1_0', '']".replace(", ''", ""),
            "run_dir='1e-4'",  # text that looks like a number to the loader, though not to plain YAML 1.1
            "task.args={a: [1, 2.5, 'x'], b: {c: null}, d: 1e9}",
            "warm_start={}",
        ],
    )
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_config(again) == config
    assert load_config(again).run_dir == "1e-4"
    assert to_yaml(load_config(again)) == to_yaml(config)


def test_sections_are_immutable(config_file):
    with pytest.raises(ValueError, match="frozen"):
        load_config(config_file).rollout.temperature = 2.0


# --- what is refused


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=three", 'seed: should be a whole number, got "three"'),
        ("training.steps=1.5", "training.steps: should be a whole number, got 1.5"),
        ("training.steps=1e3", "training.steps: should be a whole number, got 1000.0"),
        ("training.steps=true", "training.steps: should be a whole number, got true"),
        ("training.steps=0", "training.steps: should be greater than or equal to 1, got 0"),
        ("training.remat=1", "training.remat: should be true or false, got 1"),
        ("rollout.temperature='1'", 'rollout.temperature: should be a number, got "1"'),
        ("rollout.temperature=0", "rollout.temperature: should be greater than 0, got 0"),
        ("rollout.temperature=.inf", "rollout.temperature: should be a finite number, got Infinity"),
        ("rollout.top_p=1.1", "rollout.top_p: should be less than or equal to 1, got 1.1"),
        ("rollout.top_p=0", "rollout.top_p: should be greater than 0, got 0"),
        ("rollout.stop=abc", 'rollout.stop: should be a list, got "abc"'),
        ("rollout.stop=['']", 'rollout.stop.0: should be text that is not empty, got ""'),
        ("engine.batch_buckets=[1, x]", 'engine.batch_buckets.1: should be a whole number, got "x"'),
        ("algorithm.name=pppo", "algorithm.name: should be 'grpo', 'dr_grpo', 'dapo', "),
        ("kernels.compaction=pallas", "kernels.compaction.0: should be 'xla', 'mosaic_gpu', "),
        ("kernels.compaction=[xla, 1]", "kernels.compaction.1: should be 'xla', 'mosaic_gpu', "),
        ("kernels.compaction=3", "kernels.compaction: should be a list, got 3"),
        ("optimizer=3", "optimizer: should be a section of keys, got 3"),
        ("task.args=3", "task.args: should be a section of keys, got 3"),
        ("policy.shape.num_heads=null", "policy.shape.num_heads: should be a whole number, got nothing"),
        ("training.steps=", "training.steps: should be a whole number, got nothing"),
        ("policy.shape.head_dim=-2", "policy.shape.head_dim: should be greater than or equal to 1, got -2"),
    ],
)
def test_wrong_values_say_what_was_given_and_what_would_be_right(config_file, override, message):
    assert refusal(config_file, override).startswith(message)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("rollout.temprature", "rollout.temperature"),
        ("rollouts.temperature", "rollout.temperature"),
        ("optimiser", "optimizer"),
        ("training.learning_rate", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("policy.shape.heads", "policy.shape.num_heads"),
        ("training.step", "training.steps"),
        ("algorithm.clip_hihg", "algorithm.clip_high"),
        ("seed.value", "seed, which holds a value"),
    ],
)
def test_an_unknown_key_names_the_nearest(config_file, key, nearest):
    assert refusal(config_file, f"{key}=1") == f"{key}: unknown key; the nearest is {nearest}"


def test_an_unknown_key_in_the_file_is_found_too(config_file):
    config_file.write_text(MINIMAL + "rollout: {temprature: 1.0}\n")
    assert refusal(config_file) == "rollout.temprature: unknown key; the nearest is rollout.temperature"
    config_file.write_text(
        MINIMAL.replace("run_dir", "run_dri")
    )  # unknown and missing: the first is what helps
    assert refusal(config_file) == "run_dri: unknown key; the nearest is run_dir"


def test_an_unknown_key_that_resembles_none_lists_the_section(config_file):
    message = refusal(config_file, "optimizer.lr=1")
    assert message.startswith("optimizer.lr: unknown key; optimizer has name, learning_rate, schedule")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["policy.shape=null"], "policy: neither policy.path"),
        (["policy.path=somewhere"], "policy: both policy.path and policy.shape"),
        (["policy.shape.num_kv_heads=3"], "policy.shape.num_heads: 4 is not a multiple of num_kv_heads 3"),
        (["policy.shape.head_dim=15"], "policy.shape.head_dim: 15 is odd"),
        (["policy.shape.attention_bias=true"], "policy.shape.attention_bias: cannot be true"),
        (
            ["policy.shape.max_positions=1535"],
            "policy.shape.max_positions: 1535 is less than rollout.max_prompt",
        ),
        (["rollout.top_k=1"], "rollout.top_k: 1 makes all samples"),
        (["rollout.samples_per_prompt=1"], "rollout.samples_per_prompt: 1 makes every advantage 0"),
        (
            ["rollout.samples_per_prompt=1", "algorithm.advantage_normalization=none"],
            "rollout.samples_per_prompt: 1 makes every advantage 0",
        ),
        (
            ["rollout.samples_per_prompt=1", "algorithm.dynamic_sampling=true"],
            "algorithm.dynamic_sampling: needs rollout.samples_per_prompt of at least 2",
        ),
        (["training.pack_length=1535"], "training.pack_length: 1535 is less than rollout.max_prompt_length"),
        (["algorithm.overlong_buffer=1024"], "algorithm.overlong_buffer: 1024 must be less than"),
        (["training.minibatches_per_step=257"], "training.minibatches_per_step: 257 is more than the 256"),
        (["engine.batch_buckets=[8, 4, 64]"], "engine.batch_buckets: [8, 4, 64] must ascend"),
        (["engine.batch_buckets=[64, 64]"], "engine.batch_buckets: [64, 64] must ascend"),
        (["engine.batch_buckets=[]"], "engine.batch_buckets: is empty"),
        (["speculation.verify_buckets=[16, 8]"], "speculation.verify_buckets: [16, 8] must ascend, without"),
        (["speculation.verify_buckets=[8, 8]"], "speculation.verify_buckets: [8, 8] must ascend, without"),
        (["speculation.verify_buckets=[]"], "speculation.verify_buckets: is empty; list at least one size"),
        (["speculation.verify_buckets=[3]"], "speculation.verify_buckets: the largest, 3, is less than"),
        (
            ["speculation.verify_buckets=[0, 8]"],
            "speculation.verify_buckets.0: should be greater than or equal to 1",
        ),
        (
            ["speculation.verify_buckets=[x]"],
            'speculation.verify_buckets.0: should be a whole number, got "x"',
        ),
        (
            ["speculation.drafter=quantized", "engine.verification=target_only"],
            "speculation.drafter: quantized needs engine.verification: coupled, got target_only",
        ),
        (["speculation.max_drafts=64"], "speculation.max_drafts: 64 is more than 63"),
        (
            ["speculation.args.rollouts=3"],
            "speculation.args.rollouts: there is no drafter that would read it; set speculation.drafter, or"
            " speculation.args={}",
        ),
        (
            ["speculation.others={srt: {}}"],
            "speculation.others: needs a first drafter; set speculation.drafter",
        ),
        (
            ["speculation.drafter=srt", "speculation.others={srt: {}}"],
            "speculation.others: srt is speculation.drafter already",
        ),
        (
            ["speculation.drafter=srt", "speculation.mix=true"],
            "speculation.mix: needs speculation.others, and speculation.choice: expected",
        ),
        (
            [
                "speculation.drafter=srt",
                "speculation.strategies=[{drafter: srt, depth: 3, top_k: 1, nodes: 3}]",
            ],
            "speculation.strategies: only speculation.choice: ",
        ),
        (
            ["speculation.drafter=srt", "speculation.choice=fixed"],
            "speculation.choice: fixed needs one strategy in speculation.strategies, got 0",
        ),
        (
            ["engine.weights=fsdp", "mesh.data=2"],
            "engine.weights: fsdp splits the weights over mesh.fsdp, which is 1",
        ),
        (["speculation.max_batch=0"], "speculation.max_batch: should be greater than or equal to 1"),
        (["engine.verification=copied"], "engine.verification: "),
        (
            ["engine.batch_buckets=[8, 32]"],
            "engine.batch_buckets: the largest, 32, is less than engine.max_slots",
        ),
        (
            ["engine.cache_buckets=[512]"],
            "engine.cache_buckets: the largest, 512, is less than rollout.max_prompt",
        ),
    ],
)
def test_impossible_combinations_are_one_line(config_file, overrides, named):
    assert refusal(config_file, *overrides).startswith(named)


@pytest.mark.parametrize(
    "overrides",
    [
        ["policy.shape.max_positions=1536", "training.pack_length=1536"],
        ["algorithm.overlong_buffer=1023"],
        ["training.minibatches_per_step=256"],
        ["engine.batch_buckets=[64]", "engine.cache_buckets=[1536]"],
        ["policy={path: somewhere}", "warm_start={}"],
        ["rollout.top_p=1.0", "rollout.top_k=2", "rollout.samples_per_prompt=2"],
    ],
)
def test_what_is_just_possible_is_accepted(config_file, overrides):
    load_config(config_file, overrides)


def test_mesh_against_the_devices_there_are():
    check_devices(MeshConfig(data=2, fsdp=2, tensor=2), 8)
    check_devices(MeshConfig(), 8)
    with pytest.raises(
        ConfigError, match=r"^mesh: data 2 \* fsdp 2 \* tensor 2 = 8 devices, but there are 7$"
    ):
        check_devices(MeshConfig(data=2, fsdp=2, tensor=2), 7)


def test_overrides_that_are_none(config_file):
    assert refusal(config_file, "training.steps") == "training.steps: not an override; write it as key=value"
    assert refusal(config_file, "seed=[1").startswith("seed: not valid YAML: ")
    message = refusal(config_file, "warm_start.steps=5")
    assert message.startswith("warm_start.steps: ") and "no warm_start section" in message
    assert "warm_start={steps: 5" in message


def test_files_that_are_none(tmp_path):
    path = tmp_path / "bad.yaml"
    assert refusal(path).startswith(f"{path}: no such config file; Packaged, for --config from any")
    assert refusal(tmp_path).startswith(f"{tmp_path}: cannot read the config: ")
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(path) == f"{path}: cannot read the config: it is not UTF-8 text"
    path.write_text("seed: 1\nrollout: {temperature: 1\ntask: x\n")
    assert refusal(path).startswith(f"{path}:3: not valid YAML: ")
    path.write_text("seed: 1\nrollout:\n\ttemperature: 1\n")
    assert refusal(path).startswith(f"{path}:3: not valid YAML: ")
    path.write_text("seed: 1\nrun_dir: x\nseed: 2\n")
    assert refusal(path) == f"{path}:3: not valid YAML: 'seed' is given twice"
    path.write_text("- 1\n")
    assert refusal(path) == f"{path}: a config is a mapping of keys to values, got [1]"
    path.write_text("seed: \x00\n")
    assert refusal(path).startswith(f"{path}: not valid YAML: ")
    path.write_text("# nothing\n")
    assert refusal(path).startswith("run_dir: must be set. Directory of config, metrics")
    path.write_text(MINIMAL + "1: x\n")
    assert refusal(path).startswith("1: ")


# --- help, and the command line


def test_help_lists_every_key_with_its_reason():
    text = describe_keys(width=80)
    assert max(map(len, text.splitlines())) <= 80

    def check(section, prefix):
        for name, field in section.model_fields.items():
            dotted = f"{prefix}{name}"
            inner = [
                t
                for t in (field.annotation, *getattr(field.annotation, "__args__", ()))
                if t is not type(None)
            ]
            sections = [t for t in inner if isinstance(t, type) and hasattr(t, "model_fields")]
            if sections:
                assert f"\n{dotted}: " in text
                check(sections[0], f"{dotted}.")
            else:
                assert f"\n  {dotted} " in f"\n{text}"
                assert field.description and " ".join(field.description.split()) in " ".join(text.split())

    check(ExperimentConfig, "")
    assert "[0.2, dapo: 0.28, gspo:" in text
    assert "[required]" in text


def test_config_does_not_import_jax():
    code = "import sys, rljax.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_that_come_with_the_code_are_valid(path):
    load_config(path)


def test_a_packaged_config_is_found_by_its_name_from_any_directory(tmp_path, monkeypatch):
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


@pytest.fixture
def train_script():
    return load_script("train")


def test_command_line_from_another_directory(config_file, tmp_path):
    def train(*arguments):
        return subprocess.run(
            [sys.executable, str(SCRIPTS / "train.py"), *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )

    shown = train("seed=4", "--config", "x.yaml", "--print-config", "training.steps=3")
    assert shown.returncode == 0, shown.stderr
    (tmp_path / "shown.yaml").write_text(shown.stdout)
    shown_config = load_config(tmp_path / "shown.yaml")
    assert shown_config == load_config(config_file, ["seed=4", "training.steps=3"])

    bad = train("--config", "x.yaml", "rollout.temprature=1")
    assert bad.returncode == 2
    assert bad.stderr == "error: rollout.temprature: unknown key; the nearest is rollout.temperature\n"
    assert bad.stdout == ""


def test_help_of_the_command_line(train_script, capsys):
    with pytest.raises(SystemExit) as leaving:
        train_script.main(["--help"])
    assert leaving.value.code == 0
    assert describe_keys() in capsys.readouterr().out


def fake_loop(monkeypatch, run):
    module = types.ModuleType("rljax.training.session")
    module.run = run
    monkeypatch.setitem(sys.modules, "rljax.training.session", module)


def test_command_line_runs_the_loop(train_script, config_file, monkeypatch):
    configs = []
    fake_loop(monkeypatch, configs.append)
    assert train_script.main(["--config", str(config_file), "seed=5"]) == 0
    assert configs == [load_config(config_file, ["seed=5"])]


def test_command_line_reports_user_errors_and_interrupts(train_script, config_file, monkeypatch, capsys):
    def refuse(config):
        raise ConfigError("mesh: too many")

    fake_loop(monkeypatch, refuse)
    assert train_script.main(["--config", str(config_file)]) == 2
    assert capsys.readouterr().err == "error: mesh: too many\n"

    def interrupt(config):
        raise KeyboardInterrupt

    fake_loop(monkeypatch, interrupt)
    assert train_script.main(["--config", str(config_file)]) == 130
    assert capsys.readouterr().err.startswith("interrupted; the same command resumes runs/x")
