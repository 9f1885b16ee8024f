"""A local fabric that loses, doubles and delays messages, and workers of which two crash or hang."""

import random

from hypothesis import strategies as st

from rljax.cluster.fabric import LocalFabric

SEEDS = st.integers(0, 2**32 - 1)
LOST, DOUBLED = st.sampled_from([0.0, 0.15]), st.sampled_from([0.0, 0.2])  # shares of messages
LATEST = st.sampled_from([0, 8])  # turns


def troubled_fabric(kind, seed, lost, doubled, latest):
    """Returns a fabric of workers of a kind, all of whose troubles the seed decides."""
    rng = random.Random(seed)

    def network(message):
        if rng.random() < lost:
            return ()
        copies = 2 if rng.random() < doubled else 1
        return [rng.randint(0, latest) for _ in range(copies)]

    fabric = LocalFabric(kind, network)
    trouble = {rng.randint(10, 60): rng.choice([fabric.kill, fabric.silence]) for _ in range(2)}

    def before_turn(fabric):
        if fabric.turns in trouble and fabric.workers:
            trouble[fabric.turns](rng.choice(list(fabric.workers)))

    fabric.before_turn = before_turn
    return fabric
