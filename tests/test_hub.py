"""Names of the hub in the place of a directory, against a stand-in of its HTTP interface."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from huggingface_hub import constants

from drafters.eagle.checkpoint import load_head, save_head
from drafters.eagle.model import HeadConfig, init_head
from rljax import hub
from rljax.assembly.commits import with_commits
from rljax.assembly.policy import make_policy
from rljax.assembly.saved_policy import load_saved_policy
from rljax.commands.console import main
from rljax.config import make_config
from rljax.errors import CheckpointError, ConfigError
from rljax.evaluation.records import default_output
from rljax.models.huggingface import load_model_config, load_params
from rljax.models.peft import CONFIG as ADAPTER
from rljax.run_directory import RunDirectory, check_holds_policy
from rljax.tasks.rows import read_hub
from tests.hub_stand_in import running
from tests.test_bad_input import write_policy

CONFIGS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
NEVER = ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "onnx/config.json", "consolidated.safetensors")


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """The stand-in, for a library that has read HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE=0."""
    monkeypatch.chdir(tmp_path)
    with running() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        new_process()
        yield server
    new_process()


def new_process():
    hub._snapshot.cache_clear()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A directory of a policy."""
    directory = tmp_path_factory.mktemp("policy") / "tiny"
    write_policy(directory)
    return directory


@pytest.fixture
def files(policy):
    """The policy's files, and such as nothing here reads."""
    contents = {file.name: file.read_bytes() for file in policy.iterdir()}
    return contents | dict.fromkeys(NEVER, b"never")


def config_of(path, **sections):
    task = {"name": "chain_arithmetic"}
    return make_config({"run_dir": "run", "task": task, "policy": {"path": path}, **sections}, [], "the test")


def error_of(function, *args):
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_exists_wins(stand_in, tmp_path):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    for path in ("org/tiny", str(tmp_path), "here", "a/b/c", "./a/b", "../a", "/a/b", "a/b@", "a b/c"):
        assert str(hub.local_directory(path)) == os.path.normpath(path)
        assert hub.pinned(path) == path
    assert stand_in.asked == []


def test_a_mistyped_path_is_not_asked_of_the_hub(stand_in, files, tmp_path, capsys):
    for name in ("quickstart", "smollm2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    wanted = {"runs/quickstat": "runs/quickstart", "runs/q": "runs", "runs/smollm2-b": "runs/smollm2"}
    for path, near in wanted.items():
        for ask in (hub.local_directory, hub.pinned, check_holds_policy):
            assert error_of(ask, path) == (
                f"{path}: does not exist; the nearest path is {near} (for the hub's model of this name give a"
                f" revision: {path}@main)"
            )
    with pytest.raises(ConfigError, match=r"^task\.args\.hub: runs/sums: does not exist; the nearest path"):
        read_hub("runs/sums", None, "train", "task.args.hub")
    policy = ["--config", "quickstart", "policy.shape=null", "warm_start=null", "policy.path=runs/q"]
    for command in (["train", *policy], ["plan", *policy, "--topology", "v5e:2x4"]):
        assert main(command) == 2
        assert capsys.readouterr().err.startswith("error: runs/q: does not exist; the nearest path is runs (")
    assert stand_in.asked == []
    commit = stand_in.push("runs/quickstat", files)
    assert hub.local_directory("runs/quickstat@main").name == commit


def test_only_what_is_read_is_fetched_and_only_once(stand_in, files, policy):
    commit = stand_in.push("org/tiny", files, "v1")
    small = hub.local_directory("org/tiny", weights=False)
    assert stand_in.fetched() == CONFIGS and small.name == commit
    stand_in.asked.clear()
    whole = hub.local_directory("org/tiny@v1")
    assert stand_in.fetched() == ["model.safetensors"] and whole == small
    assert {file.name: file.read_bytes() for file in whole.iterdir()} == {
        name: content for name, content in files.items() if name not in NEVER
    }
    loaded = make_policy(config_of("org/tiny"), None, policy).params
    expected = make_policy(config_of(str(policy)), None, policy).params
    jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    stand_in.asked.clear()
    new_process()
    assert hub.local_directory(f"org/tiny@{commit}") == whole and stand_in.asked == []  # a commit stays
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    names += ["model.safetensors.index.json", ADAPTER, "adapter_model.safetensors"]  # are weights, too
    stand_in.push("org/parts", {name: name.encode() for name in names})
    hub.local_directory("org/parts")
    assert stand_in.fetched() == sorted(names)


def test_a_head_has_safetensors_and_no_tokenizer(stand_in, policy, tmp_path):
    model = load_model_config(policy)
    config = HeadConfig("eagle", model)
    params = init_head(config, load_params(policy, model), 0)
    save_head(tmp_path / "head", config, params, "float32")
    head = {file.name: file.read_bytes() for file in (tmp_path / "head").iterdir()}
    stand_in.push("org/head", head | {"pytorch_model.bin": b"never"})
    loaded, weights = load_head("org/head", model)
    assert loaded == config and stand_in.fetched() == ["config.json", "model.safetensors"]
    jax.tree.map(np.testing.assert_array_equal, weights, params)


def test_weights_of_another_format_are_refused(stand_in, files, policy):
    stand_in.push("org/old", {name: files[name] for name in ("config.json", "pytorch_model.bin")})
    wanted = "org/old: has no model.safetensors; weights of other formats are not read"
    assert error_of(load_head, "org/old", load_model_config(policy)) == wanted
    assert error_of(hub.local_directory, "org/old") == wanted
    assert stand_in.fetched() == ["config.json"]


def test_a_revision_and_a_process_that_sees_one_commit(stand_in, files):
    old = stand_in.push("org/tiny", files, "v1")
    assert hub.local_directory("org/tiny").name == old
    new = stand_in.push("org/tiny", files)
    assert hub.local_directory("org/tiny").name == old
    new_process()
    assert hub.local_directory("org/tiny").name == new
    at = f"org/tiny@{new}"  # a saved policy bears its name
    saved = load_saved_policy(at)
    assert str(saved.path) == at and saved.policy.tokenizer_directory == hub.local_directory(at)
    assert default_output(saved.path, None, "heldout").as_posix() == f"evaluations/{at.partition('/')[2]}"
    assert [hub.pinned(f"org/tiny{at}") for at in ("", "@v1", f"@{old}")] == [
        f"org/tiny@{commit}" for commit in (new, old, old)
    ]


def test_offline_takes_what_is_cached(stand_in, files, monkeypatch):
    commit = stand_in.push("org/tiny", files, "v1")
    hub.local_directory("org/tiny", weights=False)
    hub.local_directory("org/tiny@v1", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    new_process()
    stand_in.asked.clear()
    for path in ("org/tiny", "org/tiny@v1", f"org/tiny@{commit}"):
        assert hub.local_directory(path, weights=False).name == commit
    wanted = "{}: there is no such directory here, nor model in the cache, and HF_HUB_OFFLINE is set"
    for path in ("org/tiny", "org/none"):  # the weights of the former were not needed
        assert error_of(hub.local_directory, path) == wanted.format(path)
    assert stand_in.asked == []


def test_what_cannot_be_had_is_one_line(stand_in, files, monkeypatch):
    stand_in.push("org/tiny", files)
    stand_in.push("org/gated", files)
    stand_in.gated.add("org/gated")
    url = stand_in.url
    wanted = {
        "org/none": f"there is no such directory here, and no such model at {url}, or it is private"
        " (hf auth login)",
        "org/tiny@v9": f"there is no such revision at {url}",
        f"org/tiny@{'0' * 40}": f"there is no such revision at {url}",
        "org/gated": f"it is gated; accept its terms at {url}, and log in (hf auth login)",
    }
    for path, text in wanted.items():
        for ask in (hub.local_directory, hub.pinned, check_holds_policy):
            assert error_of(ask, path) == f"{path}: {text}"
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: "hf_of_the_test")
    assert hub.local_directory("org/gated").is_dir()


def test_without_a_hub_or_the_library(stand_in, monkeypatch):
    assert hub.state().startswith(f"{stand_in.url} answers")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert error_of(hub.local_directory, "org/none") == (
        "org/none: there is no such directory here, nor model in the cache, and http://127.0.0.1:1 cannot be"
        " reached"
    )
    assert hub.state().startswith("http://127.0.0.1:1 does not answer ([Errno 111] Connection refused):")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.state().startswith("not asked: HF_HUB_OFFLINE is set")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert error_of(hub.local_directory, "org/tiny") == (
        "org/tiny: there is no such directory; a model of the hub needs pip install huggingface_hub"
    )


def test_a_run_keeps_its_commit(stand_in, files):
    old = stand_in.push("org/tiny", files, "v1")
    config = config_of("org/tiny", algorithm={"teacher": "org/tiny@v1", "kl_coefficient": 0.1})
    run = RunDirectory("run")
    started = with_commits(config)
    assert started.policy.path == started.algorithm.teacher == f"org/tiny@{old}"
    run.begin(started)
    run.append_metrics({"step": 0})
    recorded = run.recorded_config()
    assert recorded == started

    new = stand_in.push("org/tiny", files)
    new_process()
    resumed = with_commits(config, recorded)
    assert resumed == started and run.begin(resumed) == []
    at_main = with_commits(config_of("org/tiny@main", algorithm=config.algorithm.model_dump()), recorded)
    assert error_of(run.begin, at_main).startswith(
        f"policy.path: is 'org/tiny@{new}', but the run in run has 'org/tiny@{old}'; choose another run_dir"
    )
    other = stand_in.push("org/other", files)  # another model is asked for its newest commit
    assert with_commits(config_of("org/other"), recorded).policy.path == f"org/other@{other}"
    assert with_commits(config_of("run"), recorded) == config_of("run")


def test_adapters_and_drafters_have_commits_too(stand_in, files):
    at = f"org/tiny@{stand_in.push('org/tiny', files)}"
    others = {"head": {"kind": "eagle", "path": "org/tiny"}, "mine": {"kind": "a.py:B", "path": "org/tiny"}}
    speculation = {"drafter": "small_model", "args": {"path": "org/tiny"}, "others": others}
    policy = {"path": "org/tiny", "lora": {"path": "org/tiny"}}
    config = with_commits(config_of("org/tiny", policy=policy, speculation=speculation))
    assert (config.policy.path, config.policy.lora.path, config.speculation.args["path"]) == (at, at, at)
    assert config.speculation.others["head"]["path"] == at
    assert config.speculation.others["mine"]["path"] == "org/tiny"  # means what its class says


def test_a_command_reads_the_environment(stand_in, files, tmp_path):
    """The variables of the library itself, before JAX is imported."""
    stand_in.push("org/tiny", {name: content for name, content in files.items() if name != "config.json"})
    settings = {"HF_ENDPOINT": stand_in.url, "HF_HUB_CACHE": str(tmp_path / "other"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "rljax", "generate", "org/tiny", "hello"]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 2 and "is neither a run (no config.yaml) nor" in done.stderr.splitlines()[-1]
    assert "GET /api/models/org/tiny/revision/main" in stand_in.asked


_READ = """
import sys
from rljax.errors import ConfigError
from rljax.tasks.rows import read_hub
for name in sys.argv[1:]:
    try:
        print(*read_hub(name, None, "train", "task.args.hub"))
    except ConfigError as error:
        print(error)
"""


def test_datasets_have_revisions_too(stand_in, tmp_path):
    """Offline, those that are cached, of the revision that is asked for."""
    pytest.importorskip("datasets")
    home = {"HF_ENDPOINT": stand_in.url, "HF_HOME": str(tmp_path / "home")}

    def read(offline, *names):
        command = [sys.executable, "-c", _READ, *names]
        settings = os.environ | home | {"HF_HUB_OFFLINE": offline}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    def assert_refused(errors, reasons):
        for error, (name, reason) in zip(errors, reasons.items(), strict=True):
            assert error.startswith(f"task.args.hub: cannot load {name!r}, split 'train': "), error
            assert reason in error

    push = lambda name, sum, *refs: stand_in.push(  # noqa: E731
        name, {"train.jsonl": b'{"question": "%s"}\n' % sum}, *refs
    )
    old = push("org/sums", b"1+1=", "v1")
    push("org/sums", b"2+2=", "v2")
    push("org/gated", b"3+3=")
    stand_in.gated.add("org/gated")
    of_hub = {
        "org/sums@v9": "Revision 'v9' doesn't exist for dataset 'org/sums' on the Hub.",
        "org/none": "Dataset 'org/none' doesn't exist on the Hub or cannot be accessed.",
        "org/gated": "Dataset 'org/gated' is a gated dataset on the Hub.",
    }
    newest, *found = read("0", "org/sums", "org/sums@v1", "org/sums@v2", *of_hub)
    assert newest == "('sums/train:0', {'question': '2+2='})"
    assert found[0] == "('sums@v1/train:0', {'question': '1+1='})"
    assert_refused(found[2:], of_hub)
    other = push("org/sums", b"4+4=", "v3")
    stand_in.asked.clear()
    unknown = dict.fromkeys((f"org/sums@{other}", "org/sums@v3"), "Cache directory for sums doesn't exist")
    unknown["org/none@v1"] = "Couldn't reach 'org/none'"
    one, two, three, *errors = read("1", "org/sums@v1", "org/sums@v2", f"org/sums@{old}", *unknown)
    assert [one, two] == found[:2] and three == f"('sums@{old}/train:0', {{'question': '1+1='}})"
    assert_refused(errors, unknown)
    assert stand_in.asked == []
