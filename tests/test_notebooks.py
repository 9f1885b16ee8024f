"""The notebooks under colab/: their cells run from top to bottom, and nothing of a run is stored in them."""

import json
import sys

import jax
import pytest

from tests.scripts import SCRIPTS

NOTEBOOKS = sorted((SCRIPTS.parent / "colab").glob("*.ipynb"))


def cells_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_a_run_is_stored(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="measures all of an accelerator's shapes")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run(path, monkeypatch, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    matplotlib.use("Agg")
    names = {}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # as for a user
        for index, cell in enumerate(cells_of(path)):
            if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", ()):
                exec(compile("".join(cell["source"]), f"{path.name}[{index}]", "exec"), names)
    shown = capsys.readouterr().out
    if path.stem == "kernels":
        assert names["rows"] and "% of the matrix rate" in shown
