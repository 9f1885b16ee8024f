"""Verifiable instructions: a short sentence that must keep to rules which a program can check.

    prompt    Write one short sentence about the sea, of 5 to 17 words. Do not use any commas.
    response  The waves sing to whoever walks home at night.

After IFEval (Zhou et al., 2023, arXiv 2311.07911), whose instructions are drawn for each prompt; Tülu 3
(Lambert et al., 2024, arXiv 2411.15124, section 6) trains on such prompts with verifiable rewards. It is a
task for the smallest pretrained models: SmolLM2-135M-Instruct, at temperature 0.8, is right once in ten
times, where it works out a plain sum once in twenty times, and its responses have some twenty tokens. So
GRPO has something to go by from the first step on, and a step takes seconds.

The reward says whether a sentence keeps to the rules, not whether it is a good one. Two ways around the task
do not pass: one word over and over, and sentences about words and sentences, which such a policy comes to
write in 40 steps of GRPO ("A sentence must contain at least 4 to 15 words").
"""

import collections
import re
from collections.abc import Callable, Sequence
from random import Random

from rljax.errors import ConfigError, known_names
from rljax.tasks.arguments import checked
from rljax.tasks.base import Problem, Rewards, Split, is_heldout, problem_random

TOPICS = (
    "the sea", "a bicycle", "winter", "bread", "a lighthouse", "honey", "a train", "the moon", "football",
    "rain", "a library", "tea", "a garden", "music", "a dog", "the desert", "chess", "a bridge", "apples",
    "sleep", "a river", "the sun", "a market", "snow", "a mountain", "coffee", "a clock", "birds", "a school",
    "friendship", "a kitchen", "the wind", "a castle", "trees", "a letter", "cats", "a painter", "the stars",
    "a farm", "cheese", "a ship", "dancing", "a forest", "summer", "a doctor", "horses", "a city", "soup",
    "an island", "books", "a volcano", "bees", "a museum", "spring", "a guitar", "fire", "a village", "salt",
    "a robot", "ice",
)  # fmt: skip
WORDS = (
    "bright", "quiet", "people", "golden", "simple", "never", "water", "world", "little", "strong", "morning",
    "together", "green", "early", "journey", "silver", "gentle", "story", "always", "window",
)  # fmt: skip

_STEM = 4
"""Letters that a word and its plural and adjectives have in common, mostly."""
_OF_THE_TASK = {"word", "words", "sentence", "sentences"}
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")

Check = Callable[[str, Sequence[str], str], bool]
"""Whether a text, given with its words in lowercase, keeps to a rule about a word."""

RULES: dict[str, tuple[str, Check]] = {
    "begin": ('Begin with the word "{word}".', lambda text, words, word: words[0] == word),
    "capitals": ("Write everything in capital letters.", lambda text, words, word: text == text.upper()),
    "end": ('The last word must be "{word}".', lambda text, words, word: words[-1] == word),
    "exclamation": ("End with an exclamation mark.", lambda text, words, word: text[-1] == "!"),
    "include": ('Include the word "{word}".', lambda text, words, word: word in words),
    "lowercase": ("Use only lowercase letters.", lambda text, words, word: text == text.lower()),
    "no_commas": ("Do not use any commas.", lambda text, words, word: "," not in text),
    "question": ("End with a question mark.", lambda text, words, word: text[-1] == "?"),
    "without_the": ('Do not use the word "the".', lambda text, words, word: "the" not in words),
}
"""By name: the wording of a rule, and its check."""

_EXCLUSIVE = ({"capitals", "lowercase"}, {"exclamation", "question"})


class Instructions:
    """The task. Its arguments are those of `task.args` in a config.

    Args:
      rules: names of `RULES`, from which each prompt draws. What a policy never keeps to it cannot learn.
      max_rules: a prompt has 1 to this many of them, besides the number of words: the `difficulty` of a
        problem. At most 3, and no more than there are rules, of which some exclude each other.
    """

    def __init__(
        self,
        seed: int,
        rules: Sequence[str] = ("begin", "end", "include", "no_commas", "without_the"),
        max_rules: int = 1,
    ) -> None:
        if isinstance(rules, str) or not rules:
            raise ConfigError(f"task.args.rules: should be a list of names, not {rules!r}")
        for name in rules:
            if name not in RULES:
                raise ConfigError(f"task.args.rules: unknown rule {name!r}; {known_names(str(name), RULES)}")
        self.seed, self.rules = seed, tuple(dict.fromkeys(rules))
        compatible = len(self.rules) - sum(group <= set(self.rules) for group in _EXCLUSIVE)
        self.max_rules = checked("max_rules", max_rules, int, 1, min(3, compatible))

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split; see `Task.problem`. There is no worked solution."""
        source = problem_random(self.seed, split, index)
        count = 1 + int(source.random() * self.max_rules)
        while True:
            topic, low = _one(TOPICS, source), 4 + int(source.random() * 4)
            high = low + 10 + int(source.random() * 9)
            rules = [(name, _one(WORDS, source)) for name in self._drawn(source, count)]
            wanted = " ".join(RULES[name][0].format(word=word) for name, word in rules)
            prompt = f"Write one short sentence about {topic}, of {low} to {high} words. {wanted}"
            if is_heldout(prompt) == (split == "heldout"):
                break
        return Problem(
            id=f"{split}/{index}",
            messages=({"role": "user", "content": prompt},),
            answer="",
            difficulty=count,
            data={"topic": topic.split()[-1].removesuffix("s")[:_STEM], "words": (low, high), "rules": rules},
        )

    def _drawn(self, source: Random, count: int) -> list[str]:
        names: list[str] = []
        while len(names) < count:
            name = _one(self.rules, source)
            if name not in names and not any({name, other} in _EXCLUSIVE for other in names):
                names.append(name)
        return names

    def reward(self, problem: Problem, response_text: str) -> Rewards:
        """Scores a response.

        Returns:
          "length": 1 if the number of words is within the limits, else 0; "varied": 1 if no word of four
          letters or more stands three times, else 0; "about": 1 if it names the topic, and neither words nor
          sentences, else 0; "rules": the share of the rules that it keeps to; "reward": 1 if all are 1,
          else 0.
        """
        text = response_text.strip()
        words = [word.lower() for word in _WORD.findall(text)]
        low, high = problem.data["words"]
        length = low <= len(words) <= high
        counts = collections.Counter(word for word in words if len(word) > 3)
        varied = max(counts.values(), default=0) < 3
        named = any(word.startswith(problem.data["topic"]) for word in words)
        about = named and not _OF_THE_TASK & set(words)
        kept = [bool(words) and RULES[name][1](text, words, word) for name, word in problem.data["rules"]]
        return {
            "reward": float(length and varied and about and all(kept)),
            "length": float(length),
            "varied": float(varied),
            "about": float(about),
            "rules": sum(kept) / len(kept),
        }


def _one(items: Sequence[str], source: Random) -> str:
    return items[int(source.random() * len(items))]
