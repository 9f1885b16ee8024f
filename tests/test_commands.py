"""The console command: its subcommands, and its one line for a name that is none of them."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.commands.console import COMMANDS, main
from rljax.provenance import command_line
from tests.scripts import SCRIPTS, load_script


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_own_name(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: rljax {name} ")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "doctor"])
def test_the_script_of_the_same_name_is_the_same_command(name):
    assert load_script(name).main is importlib.import_module(f"rljax.commands.{name}").main


def test_an_unknown_command_is_one_line(capsys):
    assert main(["trian"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("error: rljax trian: no such command; did you mean 'train'?")
        and said.count("\n") == 1
    )
    assert main([]) == 2
    assert all(f"  {name} " in capsys.readouterr().out for name in ["train"])


def test_help_and_errors_of_the_command_line_do_not_wait_for_jax():
    code = (
        "import sys; from rljax.commands.console import main;"
        " main(['train', '--config', 'nowhere.yaml']); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=SCRIPTS.parent, check=False).returncode == 0


def test_the_command_that_is_recorded_can_be_run_again():
    assert command_line(["/somewhere/bin/rljax", "train", "seed=1"]) == "rljax train seed=1"
    module = str(Path(importlib.import_module("rljax").__file__).with_name("__main__.py"))
    assert command_line([module, "train", "seed=1"]) == "python -m rljax train seed=1"
