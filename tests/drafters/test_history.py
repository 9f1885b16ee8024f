"""The memory of past rollouts against a plain dictionary: what is kept, what is evicted, what comes back."""

import collections
import os
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import Outcome
from drafters.history import RolloutHistory
from rljax.errors import UserError

A, B, C = (3, 4), (5,), (70_000, 1, 2)


def outcomes(prompt, *responses, rewards=None):
    rewards = [0.0] * len(responses) if rewards is None else rewards
    return [
        Outcome(prompt, np.asarray(response, np.int32), reward)
        for response, reward in zip(responses, rewards, strict=True)
    ]


def contents(rollouts):
    """Past rollouts as lists: [([response, ...], [reward, ...]), ...]."""
    plain = []
    for past in rollouts:
        ends = np.cumsum(past.lengths)
        assert past.lengths.dtype == np.int32 and past.rewards.dtype == np.float32
        assert len(past.tokens) == past.lengths.sum() and len(past.lengths) == len(past.rewards)
        responses = [past.tokens[end - n : end].tolist() for end, n in zip(ends, past.lengths, strict=True)]
        plain.append((responses, past.rewards.tolist()))
    return plain


@pytest.mark.parametrize("rollouts", [1, 2, 3])
def test_the_newest_rollouts_of_a_prompt_are_kept(rollouts):
    history = RolloutHistory(rollouts, max_tokens=100)
    for step in range(5):
        history.record(outcomes(A, [step] * (step + 1)))
    kept = list(range(5))[-rollouts:]
    assert contents(history.recall(A)) == [([[step] * (step + 1)], [0.0]) for step in kept]
    assert history.num_tokens == sum(step + 1 for step in kept)


def test_files_are_compressed(tmp_path):
    history = RolloutHistory(rollouts=1, max_tokens=100, spill_dir=str(tmp_path))
    history.record([*outcomes(C, [7] * 10_000), *outcomes(A, [1])])
    (file,) = tmp_path.glob("*/*.npz")
    assert file.stat().st_size < 4_000


# -- files -------------------------------------------------------------------------------------------------


def spilled(directory):
    """A history that holds B, with A in a file; and the file."""
    history = RolloutHistory(2, 4, str(directory))
    history.record(outcomes(A, [7, 8], [], rewards=[1.0, 0.5]))
    history.record(outcomes(A, [70_000], [9], rewards=[0.25, 0.0]))
    history.record(outcomes(B, [1]))
    assert history.prompts() == [B]
    (file,) = directory.glob("*/*.npz")
    return history, file


def test_another_history_has_no_part_in_the_files(tmp_path):
    history, _ = spilled(tmp_path)
    other = RolloutHistory(2, 4, str(tmp_path))
    assert other.recall(A) == []
    other.record(outcomes(A, [6, 6, 6]))
    other.record(outcomes(B, [2, 2]))  # A goes to a file of the other history
    assert contents(history.recall(A)) == [([[7, 8], []], [1.0, 0.5]), ([[70_000], [9]], [0.25, 0.0])]
    assert contents(other.recall(A)) == [([[6, 6, 6]], [0.0])]


def test_an_earlier_checkpoint_has_the_rollouts_of_its_time(tmp_path):
    """A run is rolled back: what later steps wrote to disk is not what it drafts from."""
    history, _ = spilled(tmp_path)
    saved = history.state()
    before = contents(history.recall(A)), contents(history.recall(B))
    for token in range(20, 25):  # later steps replace both rollouts of A and of B, on disk
        history.record(outcomes(A, [token]))
        history.record(outcomes(B, [token, token, token]))
        history.state()
    resumed = RolloutHistory(2, 4, str(tmp_path))
    resumed.load_state(saved)
    assert (contents(resumed.recall(A)), contents(resumed.recall(B))) == before


def test_files_that_no_checkpoint_needs_are_deleted(tmp_path):
    history, first = spilled(tmp_path)
    for token in range(100):
        history.record(outcomes(A, [token]))
        history.record(outcomes(B, [token, token, token]))
        history.state()
    assert not first.exists()
    assert len(list(tmp_path.glob("*/*.npz"))) < 40
    assert contents(history.recall(A)) == [([[98]], [0.0]), ([[99]], [0.0])]


def npz(**changes):
    """A file of the right keys, with some arrays changed."""

    def damage(file):
        with np.load(file) as arrays:
            state = dict(arrays)
        np.savez(file, **(state | changes))

    return damage


def flip(file):
    """Flips a bit of the last array's compressed bytes."""
    with zipfile.ZipFile(file) as archive:
        last = archive.infolist()[-1]
        end = archive.start_dir
    data = bytearray(file.read_bytes())
    data[end - last.compress_size // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "a directory": lambda file: (file.unlink(), file.mkdir()),
    "empty": lambda file: file.write_bytes(b""),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "a flipped byte": flip,
    "text": lambda file: file.write_text("hello"),
    "pickled": lambda file: np.savez(file, tokens=np.asarray([{}], object)),
    "other arrays": lambda file: np.savez(file, weights=np.arange(3)),
    "another prompt": npz(prompt_tokens=np.asarray([3, 5], np.int32)),
    "no prompt": npz(
        **dict.fromkeys(("prompt_tokens", "prompt_lengths", "prompt_rollouts"), np.zeros(0, np.int32))
    ),
    "too few tokens": npz(tokens=np.asarray([7], np.int32)),
    "too few rewards": npz(rewards=np.zeros(1, np.float32)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_file_is_no_history(tmp_path, damage):
    history, file = spilled(tmp_path)
    damage(file)
    with pytest.warns(UserWarning, match=r"npz: this part of the drafter's history is lost: "):
        assert history.recall(A) == []
    assert history.prompts() == [B] and history.num_tokens == 1
    assert history.metrics()["history_damaged"] == 1
    history.record(outcomes(A, [5]))
    assert contents(history.recall(A)) == [([[5]], [0.0])]


@pytest.mark.parametrize("what", ["a file", "read-only"])
def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path, what):
    directory = tmp_path / "spill"
    if what == "a file":
        directory.write_text("")
    elif os.geteuid() == 0:
        pytest.skip("nothing is read-only to root")
    else:
        directory.mkdir(mode=0o500)
    history = RolloutHistory(1, 1, str(directory))
    history.record(outcomes(A, [1, 2]))
    with pytest.raises(UserError, match=r"^speculation\.args\.spill_dir: cannot write .*spill") as error:
        history.record(outcomes(B, [1]))
    assert "\n" not in str(error.value)


def test_a_state_larger_than_there_is_room_for_loses_the_oldest():
    history = RolloutHistory(2, 100)
    for prompt in (A, B, C):
        history.record(outcomes(prompt, [1, 2, 3]))
    smaller = RolloutHistory(2, 6)
    smaller.load_state(history.state())
    assert smaller.prompts() == [B, C] and smaller.num_tokens == 6


# -- anything, in any order --------------------------------------------------------------------------------


class Model:
    """A history of lists."""

    def __init__(self, rollouts, max_tokens, spills):
        self.rollouts, self.max_tokens, self.spills = rollouts, max_tokens, spills
        self.memory, self.disk = collections.OrderedDict(), {}

    def tokens(self):
        return sum(len(r) for own in self.memory.values() for responses, _ in own for r in responses)

    def nbytes(self):
        total = sum(4 * len(prompt) for prompt in self.memory)
        for own in self.memory.values():
            for responses, rewards in own:
                ids = [token for response in responses for token in response]
                total += len(ids) * (2 if max(ids, default=0) < 65_536 else 4) + 8 * len(rewards)
        return total

    def evict(self):
        while self.tokens() > self.max_tokens and len(self.memory) > 1:
            prompt, own = self.memory.popitem(last=False)
            if self.spills:
                self.disk[prompt] = own

    def recall(self, prompt):
        if prompt not in self.memory and prompt in self.disk:
            self.memory[prompt] = self.disk[prompt]
            self.evict()
        if prompt in self.memory:
            self.memory.move_to_end(prompt)
        return self.memory.get(prompt, [])

    def record(self, given):
        grouped = {}
        for outcome in given:
            responses, rewards = grouped.setdefault(outcome.prompt_ids, ([], []))
            responses.append(outcome.response_ids.tolist())
            rewards.append(outcome.reward)
        for prompt, rollout in grouped.items():
            self.memory[prompt] = [*self.recall(prompt), rollout][-self.rollouts :]
            self.memory.move_to_end(prompt)
            self.evict()


prompts = st.sampled_from([A, B, C, (3,), (4, 3)])
responses = st.lists(st.sampled_from([0, 1, 7, 65_535, 65_536, 2**31 - 1]), max_size=5)
operations = st.lists(
    st.one_of(
        st.lists(st.tuples(prompts, responses, st.sampled_from([-1.0, 0.0, 0.5])), max_size=6),
        prompts,
        st.just("reload"),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(operations, st.integers(1, 3), st.integers(0, 20), st.booleans())
def test_it_behaves_as_a_plain_dictionary(tmp_path_factory, steps, rollouts, max_tokens, spills):
    directory = str(tmp_path_factory.mktemp("spill")) if spills else None
    history, model = RolloutHistory(rollouts, max_tokens, directory), Model(rollouts, max_tokens, spills)
    for step in steps:
        if step == "reload":
            state = history.state()
            for array in state.values():
                assert isinstance(array, np.ndarray) and array.dtype != object
                array.setflags(write=False)
            history = RolloutHistory(rollouts, max_tokens, directory)
            history.record(outcomes((9, 9), [1, 2, 3]))  # is replaced
            history.load_state(state)
        elif isinstance(step, tuple):
            assert contents(history.recall(step)) == [tuple(past) for past in model.recall(step)]
        else:
            given_outcomes = [Outcome(p, np.asarray(r, np.int32), reward) for p, r, reward in step]
            history.record(given_outcomes)
            model.record(given_outcomes)
        assert history.prompts() == list(model.memory) and len(history) == len(model.memory)
        assert history.num_tokens == model.tokens()
        assert history.nbytes == model.nbytes()
    for prompt in list(model.memory) + list(model.disk):
        assert contents(history.recall(prompt)) == [tuple(past) for past in model.recall(prompt)]
