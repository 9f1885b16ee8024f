"""A small model that drafts ahead of the target: what it drafts behind drafts that are not answered yet."""

import jax
import numpy as np
from jax.sharding import Mesh

from rljax.papers.specactor.decoupled_companion import DecoupledCompanion
from tests.engine.test_companion import ASKED, Pair, world_of
from tests.engines import lively_params


def ahead(world, window):
    """The policy as a companion that drafts ahead, here on the policy's device."""
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    config = world.engine.config
    return DecoupledCompanion(
        world.engine, config, lively_params(config), world.engine.numerics, mesh, window
    )


def test_ahead_after_plain_steps_behind_unanswered_drafts():
    """The entry of the last draft was not written: it is computed when more tokens than drafts have come."""
    world, window = world_of(), 3
    companion = ahead(world, window)
    pair = Pair(world, companion)
    slots = np.asarray(list(pair.slots), np.int32)
    keys, limits = ([getattr(ASKED[pair.slots[slot]], name) for slot in slots] for name in ("key", "limit"))
    companion.add_requests(slots, keys, limits)
    for steps in (window + 1, 1, window + 2, window, 2):  # what is left of a chain goes on with it
        companion.fill(slots)
        tokens, _ = companion.take_drafts(slots, 512, window)
        for slot, drafted in zip(slots.tolist(), tokens.tolist(), strict=True):
            done = len(pair.emitted[pair.slots[slot]])
            left = sum(token >= 0 for token in drafted)
            assert left and drafted[:left] == world.plain[pair.slots[slot]][0][done : done + left]
        pair.plain(steps)
