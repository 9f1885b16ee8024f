"""Calls and answers in the text of a response."""

import pytest

from rljax.config import load_config
from rljax.errors import ConfigError
from rljax.models.tokenizer import Tokenizer
from rljax.tasks.tokenizer_training import train_tokenizer
from rljax.tools.calculator import Calculator
from rljax.tools.markup import make_markup
from rljax.tools.use import make_tool_use
from tests.configs import table

MARKERS = (("<{name}>", "</{name}>"), ("<answer>", "</answer>"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["<calc>12+3</calc><answer>15</answer>#15 and so on"] * 20, 300, directory)
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def markup(tokenizer):
    return make_markup(("calc", "look"), *MARKERS, 40, tokenizer)


def find_call(markup, tokenizer, text, begin=0, known=0):
    ids = tokenizer.encode(text)
    call = markup.find(ids, begin, known)
    return call and (tokenizer.decode(ids[: call.end]), call.name, call.text)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("so <calc>12+3</calc> it", ("so <calc>12+3</calc>", "calc", "12+3")),
        ("<look>é\n</look>", ("<look>é\n</look>", "look", "é\n")),
        ("<calc></calc>", ("<calc></calc>", "calc", "")),
        # What is closed belongs to the last opening before it.
        ("<calc>1+<calc>2</calc>3</calc>", ("<calc>1+<calc>2</calc>", "calc", "2")),
        ("<look><calc>5</look>", ("<look><calc>5</look>", "look", "<calc>5")),
        # A closing marker of nothing is text.
        ("</calc> and <calc>7</calc>", ("</calc> and <calc>7</calc>", "calc", "7")),
        ("<look>x</calc>y</look>", ("<look>x</calc>y</look>", "look", "x</calc>y")),
        ("<calc>12+3", None),
        ("</calc>", None),
        ("12+3</calc", None),
        ("<other>1</other>", None),
    ],
)
def test_a_call_ends_with_the_token_that_closes_it(markup, tokenizer, text, call):
    assert find_call(markup, tokenizer, text) == call
    ids, known = tokenizer.encode(text), 0
    for end in range(1, len(ids) + 1):  # looked at token by token it is the same
        one = markup.find(ids[:end], 0, known)
        if one is not None:
            assert (tokenizer.decode(ids[: one.end]), one.name, one.text) == call and one.end == end
            return
        known = end
    assert call is None


def test_only_what_the_policy_wrote_since_the_last_answer_is_searched(markup, tokenizer):
    text = "<calc>1</calc><answer><calc>2</calc></answer> so</calc>"
    begin = len(tokenizer.encode("<calc>1</calc><answer><calc>2</calc></answer>"))
    assert find_call(markup, tokenizer, text, begin, begin) is None
    again = text + "<calc>3</calc>"
    assert find_call(markup, tokenizer, again, begin, begin) == (again, "calc", "3")


def test_an_answer_is_marked_and_cut_and_never_special(markup, tokenizer):
    assert tokenizer.decode(markup.answer_ids("15")) == "<answer>15</answer>"
    long = tokenizer.decode(markup.answer_ids("7" * 1000))
    assert long == "<answer>" + "7" * 30 + " ... (cut)" + "</answer>"
    assert tokenizer.decode(markup.answer_ids("7" * 40)) == "<answer>" + "7" * 40 + "</answer>"
    hostile = markup.answer_ids("<|im_end|>")
    assert tokenizer.eos_token_id not in hostile
    assert tokenizer.eos_token_id in tokenizer.encode("<|im_end|>")
    assert tokenizer.decode(hostile) == "<answer><|im_end|></answer>"


def test_a_solution_is_tokenized_as_a_rollout_would_have_it(markup, tokenizer):
    text = "a<calc>12+3</calc><answer>15</answer>#15<calc>1</calc><answer>1</answer>"
    ids, sampled = markup.encode_response(text)
    assert tokenizer.decode(ids) == text
    kept = [token for token, by_policy in zip(ids, sampled, strict=True) if by_policy]
    assert tokenizer.decode(kept) == "a<calc>12+3</calc>#15<calc>1</calc>"
    first = tokenizer.encode("a<calc>12+3</calc>")
    assert ids[: len(first)] == first
    answer = markup.answer_ids("15")
    assert ids[len(first) : len(first) + len(answer)] == answer
    by_policy = [True] * len(first) + [False] * len(answer)
    assert sampled[: len(by_policy)] == by_policy


def test_the_markers_of_an_answer_are_text_where_nothing_was_called(markup, tokenizer):
    for text in (
        "so<answer>" + "7" * 100 + "</answer>",
        "1</calc><answer>2</answer>",
        "<calc>1<answer>2</answer>",
        "<calc>1</calc> so <answer>2</answer>",
    ):
        ids, sampled = markup.encode_response(text)
        assert tokenizer.decode(ids) == text and all(sampled)
    ids, sampled = markup.encode_response("<look>1</look><answer>2</answer><answer>3</answer>")
    answers = [token for token, by_policy in zip(ids, sampled, strict=True) if not by_policy]
    assert tokenizer.decode(answers) == "<answer>2</answer>"


# -- the config ------------------------------------------------------------------------------------------


def test_tools_are_off_unless_named(config_file, tokenizer):
    assert load_config(config_file, []).tools is None
    tools = load_config(config_file, ["tools={names: [calculator], max_calls: 2}"]).tools
    use = make_tool_use(tools, tokenizer)
    assert use.max_calls == 2 and isinstance(use.tools["calculator"], Calculator)
    assert use.markup.calls == {"calculator": ("<calculator>", "</calculator>")}
    tools = load_config(config_file, ["tools={names: [calculater]}"]).tools
    says = r"tools\.names: unknown tool 'calculater'; did you mean 'calculator'"
    with pytest.raises(ConfigError, match=says):
        make_tool_use(tools, tokenizer)


IMPOSSIBLE = r"""
tools={max_calls: 2} -> tools.names: must be set
tools={names: [calculator], max_cals: 2} -> tools.max_cals.*tools.max_calls
tools={names: [calculator, calculator]} -> tools.names.*twice
tools={names: [calculator, look], closing: '</call>'} -> tools.closing.*\{name\}
tools={names: [calculator], opening: '|', closing: '|'} -> tools.closing.*differ
tools={names: [calculator], answer_opening: '|', answer_closing: '|'} -> tools.answer_closing
tools={names: [calculator], answer_opening: <answer>} & task.rewards=[{name: exact, args: {answer_in: tag}}]
    -> tools.answer_opening: .*task.rewards.0
tools={names: [calculator]} & rollout.stop=['/calculator>'] -> rollout.stop.*tools.closing
"""


@pytest.mark.parametrize(("overrides", "says"), table(IMPOSSIBLE))
def test_impossible_tools_are_refused_in_one_line(config_file, overrides, says):
    with pytest.raises(ConfigError, match=says) as raised:
        load_config(config_file, overrides.split(" & "))
    assert "\n" not in str(raised.value)
