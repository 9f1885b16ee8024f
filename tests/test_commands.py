"""The console command: its subcommands, and its one line for a name that is none of them."""

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.commands.console import COMMANDS, main
from rljax.provenance import command_line
from tests.configs import table
from tests.scripts import SCRIPTS, load_script

ROOT = SCRIPTS.parent


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_own_name_and_is_the_script_of_this_name(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: rljax {name} ")
    if name not in ("doctor", "import"):
        assert load_script(name).main is importlib.import_module(f"rljax.commands.{name}").main


def test_an_unknown_command_is_one_line(capsys):
    assert main(["trian"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: rljax trian: no such command; did you mean 'train'?")
    assert main([]) == 2
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)


HEAVY = ("jax", "flax", "orbax", "numba", "numpy", "matplotlib", "transformers", "torch")
REFUSED = """
train --config quickstart polcy.path=x -> polcy.path: unknown key
train --config quickstart task.args.max_term=3 -> task.args.max_term:
train --config quickstart 'task={name: mixture, mixture: [{name: x}]}' -> task.mixture.0.name:
train --config quickstart speculation.drafter=srrt -> speculation.drafter: unknown drafter
train --config quickstart 'speculation={drafter: eagle, args: {dephts: [2]}}'
    -> speculation.args.dephts: eagle has no such argument; did you mean 'depths'?
train --config quickstart 'speculation={drafter: srt, others: {quantized: {bit: 8}}}'
    -> speculation.others.quantized.bit:
train --config quickstart speculation.args.rollouts=3 -> speculation.args.rollouts:
plan --config quickstart --topology v5e:2x4 polcy.path=x -> polcy.path
plan --config quickstart --topology v5e:2x4 speculation.drafter=srrt -> speculation.drafter:
evaluate runs/mien task.name=chain_arithmetic -> runs/mien: does not exist; the nearest path is runs/mine (
generate nowhere 1+1 -> nowhere does not exist
generate runs/mien 1+1 -> runs/mien: does not exist; the nearest path is runs/mine (
generate nowhere 1+1 --max-tokens 0 -> --max-tokens: 0
generate nowhere 1+1 --drafter srrt -> --drafter: unknown drafter 'srrt'; did you mean
serve runs/mien --port 0 -> runs/mien: does not exist; the nearest path is runs/mine (
export runs/mien exported -> runs/mien: does not exist; the nearest path is runs/mine (
"""


def test_what_is_misspelt_is_refused_before_anything_heavy_is_imported(tmp_path):
    """In one process: none of these commands may have imported it for the others."""
    code = (
        "import json, sys; from rljax.commands.console import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    print(main(arguments), flush=True)\n"
        "print(sorted(set(json.loads(sys.argv[2])) & set(sys.modules)))"
    )
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    refused = table(REFUSED)
    arguments = [json.dumps([shlex.split(words) for words, _ in refused]), json.dumps(HEAVY)]
    command, environment = [sys.executable, "-c", code, *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [*["2"] * len(refused), "[]"]
    for line, (_, named) in zip(ended.stderr.splitlines(), refused, strict=True):
        assert line.startswith(f"error: {named}"), line


def test_a_run_says_where_it_is_before_jax_is_imported(tmp_path):
    code = (
        "import builtins, sys; from rljax.commands.console import main\n"
        "def said(*words, print=print, **more):\n"
        "    print(*words, 'jax' in sys.modules); raise SystemExit\n"
        "builtins.print = said\n"
        "main(['train', '--config', 'quickstart', 'run_dir=here'])"
    )
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.stdout == "run: here False\n", ended.stderr


def test_the_command_that_is_recorded_can_be_run_again():
    assert command_line(["/somewhere/bin/rljax", "train", "seed=1"]) == "rljax train seed=1"
    module = str(Path(importlib.import_module("rljax").__file__).with_name("__main__.py"))
    assert command_line([module, "train", "seed=1"]) == "python -m rljax train seed=1"
    script = [str(SCRIPTS / "bench_engine.py"), "--output", "a file.json"]
    assert command_line(script) == "python scripts/bench_engine.py --output 'a file.json'"
