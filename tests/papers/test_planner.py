"""SpecActor's models and Algorithms 1 and 2, with coupled and plain decoding among the choices."""

import pytest

from rljax.papers.specactor.planner import Profile, largest_window, plan, reconfigure
from rljax.speculation.window_costs import Affine

# Our constants for Qwen2.5-32B over four Hopper GPUs: a row's arithmetic and a request's cache at about 2,000
# tokens, and what every pass takes; and for a drafter of 0.5B on one of them.
ROW, CACHE, PASS = 25e-6, 50e-6, 6e-3
HOPPER = Profile({1: Affine(20e-6, 1.5e-3)}, {4: lambda window: Affine((window + 1) * ROW + CACHE, PASS)})


def test_the_largest_window_is_where_drafting_takes_longer():
    drafter, verifier = Affine(2.0, 10.0), lambda window: Affine(7.0, 41.0)
    assert largest_window(drafter, verifier) == 5  # max(ceil(7 / 2), ceil(41 / 10))
    assert largest_window(Affine(0.0, 0.0), verifier) == 1


@pytest.mark.parametrize(("acceptance", "coupled", "decoupled"), [(0.75, 1.19, 0.96), (0.9, 1.43, 1.47)])
def test_decoupling_pays_last_and_only_with_a_good_drafter(acceptance, coupled, decoupled):
    """8,192 requests on 256 GPUs: what the printed formulas give with Hopper-like constants."""
    speed = {
        mode: plan(8192, 256, HOPPER, acceptance, modes=(mode,)).speed
        for mode in ("plain", "coupled", "decoupled")
    }
    assert speed["coupled"] / speed["plain"] == pytest.approx(coupled, rel=0.035)
    assert speed["decoupled"] / speed["plain"] == pytest.approx(decoupled, rel=0.035)
    best = plan(8192, 256, HOPPER, acceptance)
    assert best.mode == max(speed, key=speed.get)


def test_plain_decoding_is_chosen_where_nothing_pays():
    """Bound by arithmetic, and drafts that are never right."""
    assert plan(100_000, 4, HOPPER, 0.0).mode == "plain"
    with pytest.raises(ValueError, match="nothing of decoupled fits 4 devices with verifiers of 4"):
        plan(100_000, 4, HOPPER, 0.05, modes=("decoupled",))


def test_sizes_by_hand():
    """A verifier of one device is twice as slow. With 8 requests on 4 devices they have 2 and 4 requests."""
    profile = Profile({}, {1: lambda w: Affine(0.0, 2.0), 2: lambda w: Affine(0.0, 1.0)})
    choice = plan(8, 4, profile, 0.5)
    assert (choice.verifier_devices, choice.batch, choice.speed) == (2, 4, 1.0)
    with pytest.raises(ValueError, match="nothing of plain, coupled, decoupled fits 0 devices"):
        plan(8, 0, profile, 0.5)


def test_a_decoupled_batch_is_larger_by_the_drafters_share():
    choice = plan(8192, 256, HOPPER, 0.9, modes=("decoupled",))
    assert (choice.drafter_devices, choice.verifier_devices, choice.batch) == (1, 4, 160)


def test_badly_accepted_requests_are_reconfigured():
    planned = plan(8192, 256, HOPPER, 0.9, modes=("decoupled",))
    chosen = reconfigure({1: 0.95, 2: 0.0, 3: 0.3, 4: 0.6, 5: 0.9, 6: 0.99}, planned, HOPPER)
    assert sorted(chosen) == [2, 3, 4]  # below the mean of 0.62
    assert [(chosen[i].mode, chosen[i].window) for i in (2, 3, 4)] == [
        ("plain", 0),
        ("coupled", 1),
        ("decoupled", 4),
    ]
    assert reconfigure({}, planned, HOPPER) == {}
    # Where drafter and verifier take the same devices already, decoupling is no choice.
    assert (
        reconfigure({1: 0.99, 2: 0.98}, plan(8, 4, HOPPER, 0.9, modes=("coupled",)), HOPPER)[2].mode
        == "coupled"
    )
