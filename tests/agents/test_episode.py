"""Requests of an agent as tokens: what it sends back stands for what was sampled, token for token."""

import numpy as np
import pytest

from rljax.agents.episode import AgentEpisode, Turn
from rljax.models.chat_turns import ChatTurns
from rljax.models.tokenizer import Tokenizer
from rljax.tasks.base import Problem
from rljax.tasks.tokenizer_training import train_tokenizer

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
MORE = [{"role": "user", "content": "again"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["hello"] * 50 + ["again"] * 50, 300, directory)
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def chat(tokenizer):
    return ChatTurns(tokenizer)


def reply(episode, tokenizer, chat, messages, text="hello", end=True):
    """Samples the text letter by letter, as no tokenizer would write it."""
    ids = [token for letter in text for token in tokenizer.encode(letter)]
    assert ids != tokenizer.encode(text)
    ids += [tokenizer.eos_token_id] * end
    prompt = episode.prompt(messages, chat)
    logprobs = tuple(-float(place) - 1 for place in range(len(ids)))
    turn = Turn(messages, text, prompt, tuple(ids), logprobs, "eos" if end else "length", ((0, 5),))
    episode.turns.append(turn)
    return turn


@pytest.fixture
def episode():
    return AgentEpisode("a", Problem("a", (), "", 0), (0, 5, 1, 2))


def said(text):
    return {"role": "assistant", "content": text}


def test_turns_that_continue_each_other_are_one_sequence(episode, tokenizer, chat):
    first = reply(episode, tokenizer, chat, ASKED)
    assert first.prompt_ids == tuple(tokenizer.encode_chat(ASKED))
    second = reply(episode, tokenizer, chat, [*ASKED, said("hello"), *MORE])
    third = reply(episode, tokenizer, chat, [*ASKED, said("hello"), *MORE, said("hello"), *MORE])
    assert second.prompt_ids[: len(first.token_ids)] == first.token_ids
    assert second.prompt_ids != tuple(tokenizer.encode_chat(second.messages))  # nor the same tokens again
    (sequence,) = episode.completions()
    assert sequence.prompt_ids + tuple(sequence.response_ids.tolist()) == third.token_ids
    sampled = [*first.response_ids, *second.response_ids, *third.response_ids]
    assert sequence.response_ids[sequence.sampled_mask].tolist() == sampled
    np.testing.assert_array_equal(sequence.logprobs[sequence.sampled_mask], [*first.logprobs] * 3)
    assert (sequence.logprobs[~sequence.sampled_mask] == 0).all()
    begins = np.flatnonzero(np.diff(sequence.sampled_mask.astype(int)) == 1) + 1
    assert [place for place, _ in sequence.versions] == [0, *begins.tolist()]


def test_a_reply_without_an_end_is_ended_by_the_template(episode, tokenizer, chat):
    first = reply(episode, tokenizer, chat, ASKED, end=False)
    second = reply(episode, tokenizer, chat, [*ASKED, said("hello"), *MORE])
    assert second.prompt_ids[len(first.token_ids)] == tokenizer.eos_token_id
    assert len(episode.completions()) == 1


def test_a_shortened_history_is_a_sequence_of_its_own_with_the_tokens_that_were_sampled(
    episode, tokenizer, chat
):
    first = reply(episode, tokenizer, chat, ASKED)
    second = reply(episode, tokenizer, chat, [ASKED[1], said("hello"), *MORE])
    sequences = episode.completions()
    assert [sequence.prompt_ids for sequence in sequences] == [first.prompt_ids, second.prompt_ids]
    text = tokenizer.decode(second.prompt_ids)
    assert text == tokenizer.apply_chat_template(second.messages)
    joined, sampled = ",".join(map(str, second.prompt_ids)), ",".join(map(str, first.response_ids))
    assert f",{sampled}," in joined


def test_a_reply_that_was_changed_is_text(episode, tokenizer, chat):
    reply(episode, tokenizer, chat, ASKED)
    second = reply(episode, tokenizer, chat, [*ASKED, said("hello!"), *MORE])
    assert second.prompt_ids == tuple(tokenizer.encode_chat(second.messages))
    assert len(episode.completions()) == 2


def test_one_of_several_choices_is_continued(episode, tokenizer, chat):
    first = reply(episode, tokenizer, chat, ASKED, "hello")
    other = reply(episode, tokenizer, chat, ASKED, "again")
    second = reply(episode, tokenizer, chat, [*ASKED, said("again"), *MORE])
    assert second.prompt_ids[: len(other.token_ids)] == other.token_ids
    lengths = sorted(int(sequence.sampled_mask.sum()) for sequence in episode.completions())
    assert lengths == [len(first.response_ids), len(other.response_ids) + len(second.response_ids)]


def test_a_second_role_does_not_continue_the_first(episode, tokenizer, chat):
    reply(episode, tokenizer, chat, ASKED)
    reply(episode, tokenizer, chat, [{"role": "system", "content": "judge"}, ASKED[1]])
    assert [int(each.sampled_mask.sum()) for each in episode.completions()] == [6, 6]


def test_room_counts_from_the_first_reply_of_a_sequence(episode, tokenizer, chat):
    prompt = episode.prompt(ASKED, chat)
    assert episode.room(prompt, len(prompt), 40) == 40
    assert episode.room(prompt, len(prompt) - 1, 40) == 0
    first = reply(episode, tokenizer, chat, ASKED)
    longer = episode.prompt([*ASKED, said("hello"), *MORE], chat)
    read = len(longer) - len(first.token_ids)
    assert episode.room(longer, len(prompt), 40) == 40 - len(first.response_ids) - read
    assert episode.room(longer, len(prompt), len(longer) - len(prompt)) == 0
