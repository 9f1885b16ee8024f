"""What a run compiles before its first rollout."""

import threading
from types import SimpleNamespace

import pytest

from rljax.assembly import decoding
from rljax.config import load_config
from tests.training.tiny_run import write_config


class _Reached(Exception):
    pass


def test_loops_on_the_host_are_compiled_while_programs_are(tmp_path, monkeypatch):
    programs, loops = threading.Event(), threading.Event()

    def rehearse(config):
        loops.set()
        assert programs.wait(10)

    def compile_programs(*_):
        programs.set()
        assert loops.wait(10)
        raise _Reached

    monkeypatch.setattr(decoding, "rehearse_drafters", rehearse)
    monkeypatch.setattr(decoding, "PlainPrograms", compile_programs)
    engine = SimpleNamespace(buckets=None, close=lambda: None)
    speculator = SimpleNamespace(idle=SimpleNamespace(late_inserts=False))
    scheduler = SimpleNamespace(engine=engine, max_slots=4, speculator=speculator, tools=None)
    with pytest.raises(_Reached):
        decoding.warm_up(scheduler, {}, load_config(write_config(tmp_path)))
