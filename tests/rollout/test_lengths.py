"""What is expected of a response's length."""

from rljax.rollout.lengths import ResponseLengths


def test_a_known_prompt_is_answered_as_before_and_a_new_one_by_its_length():
    lengths = ResponseLengths()
    assert lengths.expected((1, 2, 3)) == 3.0
    lengths.learn((1, 2), 10)
    lengths.learn((1, 2), 30)
    lengths.learn((5,), 2)
    assert lengths.expected((1, 2)) == 20.0
    assert lengths.expected((5,)) == 2.0
    assert lengths.expected((7, 8, 9)) == 3 * 42 / 5
