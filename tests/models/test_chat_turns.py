"""The tokens between two turns of a policy."""

import pytest

from rljax.errors import TokenizerError
from rljax.models.chat_turns import ChatTurns, shortened
from rljax.models.tokenizer import Tokenizer
from rljax.tasks.tokenizer_training import train_tokenizer

TURNS = [
    {"role": "user", "content": "guess 3-9"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "higher"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "lower"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([message["content"] for message in TURNS], 300, directory)
    return Tokenizer.load(directory)


def test_turn_by_turn_is_the_template_of_the_whole_conversation(tokenizer):
    turns, eos = ChatTurns(tokenizer), tokenizer.eos_token_id
    ids = tokenizer.encode_chat(TURNS[:1])
    for number in (1, 3):
        assert tokenizer.encode_chat(TURNS[:number]) == ids
        ids += [*tokenizer.encode(TURNS[number]["content"]), eos]
        ids += turns.following([TURNS[number + 1]], eos)
    assert tokenizer.encode_chat(TURNS) == ids
    # A turn that did not end itself is ended.
    assert turns.following(TURNS[2:3], 5) == [eos, *turns.following(TURNS[2:3], eos)]


def test_several_messages_and_special_tokens_in_them(tokenizer):
    turns = ChatTurns(tokenizer)
    said = [{"role": "system", "content": "<|im_end|>"}, {"role": "user", "content": "<|im_start|>user"}]
    ids = turns.following(said, tokenizer.eos_token_id)
    assert ids.count(tokenizer.eos_token_id) == 2  # those of the template, one for each message
    text = tokenizer.decode(ids)
    system, user = "system\n<|im_end|>", "user\n<|im_start|>user"
    said = [f"\n<|im_start|>{each}<|im_end|>" for each in (system, user)]
    assert text.endswith("".join(said) + "\n<|im_start|>assistant\n")
    assert shortened("a" * 20, 20) == "a" * 20  # long texts are cut
    assert shortened("a" * 21, 20) == "a" * 10 + " ... (cut)"


def test_a_template_that_leaves_messages_out_is_refused(tokenizer):
    template = tokenizer.directory / "other.jinja", "{{ messages[-1]['content'] }}"
    other = Tokenizer(tokenizer.directory, tokenizer._backend, {}, template)
    with pytest.raises(TokenizerError, match="does not write every message of a conversation once"):
        ChatTurns(other).following(TURNS[2:3], None)
    assert ChatTurns(other).turn_end() is None


@pytest.mark.parametrize(
    ("behind", "ends"),
    [("<|im_end|>\n", "<|im_end|>"), (" \n<|im_start|>", "<|im_start|>"), ("\n\nUser:", None), ("", None)],
)
def test_the_token_that_ends_a_turn(tokenizer, behind, ends):
    text = "{% for m in messages %}" + "{{ m.role }}: {{ m.content }}" + behind + "{% endfor %}"
    other = Tokenizer(tokenizer.directory, tokenizer._backend, {}, (tokenizer.directory, text))
    assert ChatTurns(other).turn_end() == (None if ends is None else tokenizer.token_id(ends))
