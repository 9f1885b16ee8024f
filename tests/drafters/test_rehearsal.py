"""After a rehearsal, a rollout compiles nothing more on the host."""

import numpy as np
import pytest
from numba.core import event

from drafters.base import DraftRequest, Outcome, Queries, Sampled
from drafters.registry import HOST_DRAFTERS, make_drafter, rehearse_drafters
from rljax.config.speculation import SpeculationConfig


@pytest.mark.parametrize("name", sorted(HOST_DRAFTERS))
def test_nothing_is_compiled_afterwards(name, tmp_path):
    spill = {"spill_dir": str(tmp_path / "spilled")} if name in ("srt", "histospec") else {}
    rehearse_drafters(SpeculationConfig(drafter=name, args=spill, max_drafts=7))
    assert not any(tmp_path.iterdir())
    drafter, rng = make_drafter(name), np.random.default_rng(0)
    some = lambda *shape: rng.integers(0, 9, shape).astype(np.int32)  # noqa: E731
    with event.install_recorder("numba:compile") as recorder:
        for _ in range(2):
            prompts = [tuple(some(20).tolist()) for _ in range(3)]
            drafter.begin([DraftRequest(prompt, some(2).astype(np.uint32)) for prompt in prompts])
            for known in range(0, 12, 3):
                asked = np.asarray([2, 0], np.int32)
                queries = Queries(asked, np.full(2, 20 + known, np.int32), np.asarray([7, 3], np.int32), 7)
                counts = drafter.propose(queries).counts
                tokens, sampled = some(2, 16)[:, ::2], np.full(2, 3, np.int32)
                tokens.flags.writeable = False
                drafter.observe(Sampled(asked, tokens, sampled, counts, counts, np.zeros(2, bool)))
            drafter.learn([Outcome(prompt, some(12), 1.0) for prompt in prompts])
    assert not recorder.buffer
