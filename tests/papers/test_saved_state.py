"""What a checkpoint keeps of the papers' mechanisms."""

import pytest

from tests.papers.test_roofline_manager import toggled
from tests.speculation.test_saved_state import check_checkpoint
from tests.tiny_policy import strategy_choice

KEPT = {
    "bandit": (
        strategy_choice("bandit", epsilon=0.5, window=8),
        ("srt", "quantized"),
        {"bandit_rates", "bandit_draws", "calibration_of_srt"},
    ),
    "ladder": (
        strategy_choice("ladder"),
        ("srt", "quantized"),
        {"acceptance_of_quantized", "chains_of_quantized"},
    ),
    "run-ahead": (strategy_choice("expected", run_ahead_below=1), ("srt",), {"ahead_keys", "ahead_tokens"}),
    "roofline": (toggled(), ("quantized",), {"patience_ladder", "toggle_step"}),
}


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_lost_on_the_way_through_a_checkpoint(params, requests, name):
    check_checkpoint(params, requests, *KEPT[name])
