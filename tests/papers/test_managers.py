"""What holds of the papers' managers: the tokens of plain decoding, a whole log, and whole checkpoints."""

import pytest

from rljax.speculation.strategies import Strategy
from tests.papers.test_roofline_manager import toggled
from tests.speculation.speculators import check_log, check_plainly, check_tokens
from tests.speculation.test_saved_state import check_checkpoint
from tests.tiny_policy import strategy_choice

BANDIT, LADDER = strategy_choice("bandit", epsilon=0.3, window=8), strategy_choice("ladder")
BOTH = pytest.mark.parametrize("choice", [BANDIT, LADDER], ids=["bandit", "ladder"])


@BOTH
def test_the_tokens_are_those_of_plain_decoding(params, requests, expected, choice):
    check_tokens(params, requests, expected, choice)


@pytest.mark.parametrize("name", ["bandit", "ladder"])
def test_a_batch_that_no_pass_verifies_decodes_plainly(params, requests, expected, name):
    explores = strategy_choice("bandit", Strategy(1, 1, 1, "srt"), epsilon=1.0)  # whatever the clock says
    check_plainly(params, requests, expected, explores if name == "bandit" else LADDER)


@BOTH
def test_every_token_and_second_is_in_the_log(params, requests, choice):
    check_log(params, requests, choice, overlap=choice is BANDIT)


KEPT = {
    "bandit": (
        strategy_choice("bandit", epsilon=0.5, window=8),
        ("srt", "quantized"),
        {"bandit_rates", "bandit_draws", "calibration_of_srt"},
    ),
    "ladder": (LADDER, ("srt", "quantized"), {"acceptance_of_quantized", "chains_of_quantized"}),
    "run-ahead": (strategy_choice("expected", run_ahead_below=1), ("srt",), {"ahead_keys", "ahead_tokens"}),
    "roofline": (toggled(), ("quantized",), {"patience_ladder", "toggle_step"}),
}


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_lost_on_the_way_through_a_checkpoint(params, requests, name):
    check_checkpoint(params, requests, *KEPT[name])
