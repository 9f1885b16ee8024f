"""How many tokens a pass brings, by hand."""

import pytest

from rljax.speculation.draft_length import expected_tokens, expected_tokens_decoupled


@pytest.mark.parametrize(
    ("acceptance", "window", "coupled", "decoupled"),
    [
        # p = 1/2, w = 2: nothing accepted 1/2, one 1/4, two 1/4
        (0.5, 2, 0.5 * 1 + 0.25 * 2 + 0.25 * 3, 0.5 * 1 / 2 + 0.25 * 2 / 2 + 0.25 * 2),
        (0.5, 1, 1.5, 0.75),
        (0.5, 0, 1.0, 0.0),
        (1.0, 3, 4.0, 3.0),
        (0.0, 3, 1.0, 0.5),
    ],
)
def test_tokens_of_a_pass_by_hand(acceptance, window, coupled, decoupled):
    assert expected_tokens(acceptance, window) == coupled
    assert expected_tokens_decoupled(acceptance, window) == decoupled
