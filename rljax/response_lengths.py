"""Expected lengths of responses: long ones should begin early.

Responses to the same prompt are alike in length, from one epoch to the next as well (RhymeRL, section 3), so
the best guess is what earlier ones took, and for a new prompt what its own length says.
"""

import numpy as np

_MOST_PROMPTS = 100_000  # those learned last are remembered


class ResponseLengths:
    """Learns from finished responses."""

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[int, ...], tuple[int, int]] = {}  # responses and their tokens
        self._prompt_tokens, self._response_tokens = 0, 0

    def learn(self, prompt_ids: tuple[int, ...], length: int) -> None:
        """A response to a prompt had so many tokens."""
        count, total = self._by_prompt.pop(prompt_ids, (0, 0))
        self._by_prompt[prompt_ids] = (count + 1, total + length)
        self._prompt_tokens += len(prompt_ids)
        self._response_tokens += length
        if len(self._by_prompt) > _MOST_PROMPTS:
            del self._by_prompt[next(iter(self._by_prompt))]

    def expected(self, prompt_ids: tuple[int, ...]) -> float:
        """Tokens of the next response to a prompt; before anything is known, the prompt's own."""
        if prompt_ids in self._by_prompt:
            count, total = self._by_prompt[prompt_ids]
            return total / count
        if not self._prompt_tokens:
            return float(len(prompt_ids))
        return len(prompt_ids) * self._response_tokens / self._prompt_tokens

    def state(self) -> dict[str, np.ndarray]:
        """Returns the arrays that a checkpoint keeps."""
        prompts = list(self._by_prompt)
        return {
            "lengths_prompts": np.asarray([token for prompt in prompts for token in prompt], np.int32),
            "lengths_sizes": np.asarray([len(prompt) for prompt in prompts], np.int32),
            "lengths_counts": np.asarray(list(self._by_prompt.values()), np.int64).reshape(-1, 2),
            "lengths_tokens": np.asarray([self._prompt_tokens, self._response_tokens], np.int64),
        }

    def load_state(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Takes up its own part of what `state` returned, and returns the rest."""
        rest = dict(state)
        parts = [rest.pop(f"lengths_{name}", None) for name in ("prompts", "sizes", "counts", "tokens")]
        if all(part is not None for part in parts):
            tokens, sizes, counts, totals = parts
            prompts = np.split(tokens, np.cumsum(sizes)[:-1]) if len(sizes) else []
            self._by_prompt = {
                tuple(prompt.tolist()): (int(count), int(total))
                for prompt, (count, total) in zip(prompts, counts, strict=True)
            }
            self._prompt_tokens, self._response_tokens = map(int, totals)
        return rest
