"""How long a response will be: what is long should begin early.

Responses to the same prompt are alike in length, from one epoch to the next as well (RhymeRL, section 3), so
the best guess is what earlier ones took, and for a new prompt what its own length says.
"""


class ResponseLengths:
    """Learns from finished responses."""

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[int, ...], tuple[int, int]] = {}  # responses and their tokens
        self._prompt_tokens, self._response_tokens = 0, 0

    def learn(self, prompt_ids: tuple[int, ...], length: int) -> None:
        """A response to a prompt had so many tokens."""
        count, total = self._by_prompt.get(prompt_ids, (0, 0))
        self._by_prompt[prompt_ids] = (count + 1, total + length)
        self._prompt_tokens += len(prompt_ids)
        self._response_tokens += length

    def expected(self, prompt_ids: tuple[int, ...]) -> float:
        """Tokens of the next response to a prompt; before anything is known, the prompt's own."""
        if prompt_ids in self._by_prompt:
            count, total = self._by_prompt[prompt_ids]
            return total / count
        if not self._prompt_tokens:
            return float(len(prompt_ids))
        return len(prompt_ids) * self._response_tokens / self._prompt_tokens
