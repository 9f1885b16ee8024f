"""What is expected of a response's length."""

from rljax.response_lengths import ResponseLengths


def test_a_known_prompt_is_answered_as_before_and_a_new_one_by_its_length():
    lengths = ResponseLengths()
    assert lengths.expected((1, 2, 3)) == 3.0
    lengths.learn((1, 2), 10)
    lengths.learn((1, 2), 30)
    lengths.learn((5,), 2)
    assert lengths.expected((1, 2)) == 20.0
    assert lengths.expected((5,)) == 2.0
    assert lengths.expected((7, 8, 9)) == 3 * 42 / 5


def test_what_is_known_is_restored():
    lengths, again = ResponseLengths(), ResponseLengths()
    assert again.load_state(lengths.state() | {"other": 1}) == {"other": 1}
    for prompt, length in (((1, 2), 10), ((5,), 3), ((1, 2), 20)):
        lengths.learn(prompt, length)
    again.load_state(lengths.state())
    for prompt in ((1, 2), (5,), (7, 8, 9)):
        assert again.expected(prompt) == lengths.expected(prompt)
    assert again.load_state({}) == {}
    assert again.expected((5,)) == 3.0


def test_the_prompts_learned_last_are_remembered(monkeypatch):
    monkeypatch.setattr("rljax.response_lengths._MOST_PROMPTS", 2)
    lengths = ResponseLengths()
    for prompt in ((1,), (2,), (1,), (3,)):
        lengths.learn(prompt, 10 * prompt[0])
    assert len(lengths.state()["lengths_sizes"]) == 2
    assert (lengths.expected((1,)), lengths.expected((3,))) == (10.0, 30.0)
    assert lengths.expected((2,)) == 70 / 4  # as of any new prompt
