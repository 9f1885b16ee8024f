"""The episodes of a rollout that are open: an agent gets one here, and reports its reward here."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rljax.agents.episode import AgentEpisode


class EpisodeBoard:
    """Episodes by id. The server's threads and the run's use it.

    Args:
      time_limit: seconds of an episode, from `begin` on.
    """

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._changed = threading.Condition()
        self._episodes: dict[str, AgentEpisode] = {}
        self._waiting: list[AgentEpisode] = []  # to be returned by `next`

    def open(self, episodes: Sequence[AgentEpisode], hand_out: bool) -> None:
        """Takes the episodes of a rollout; with `hand_out` for `next`, in their order."""
        with self._changed:
            self._episodes = {episode.id: episode for episode in episodes}
            self._waiting = list(episodes) if hand_out else []

    def close(self) -> None:
        """Forgets all episodes; what comes for them afterwards is refused."""
        with self._changed:
            for episode in self._episodes.values():
                episode.ended = True
            self._episodes, self._waiting = {}, []

    def get(self, name: str) -> AgentEpisode | None:
        """Returns an episode that takes requests; None where there is none of this name."""
        with self._changed:
            episode = self._episodes.get(name)
            return None if episode is None or episode.ended else episode

    def next(self) -> AgentEpisode | None:
        """Returns the next episode, which begins now; None where all have begun."""
        with self._changed:
            if not self._waiting:
                return None
            self.begin(self._waiting[0])
            return self._waiting.pop(0)

    def begin(self, episode: AgentEpisode) -> None:
        """The time of an episode begins."""
        episode.deadline = time.monotonic() + self._time_limit

    def report(self, episode: AgentEpisode, reward: float, info: Mapping[str, float]) -> None:
        """Takes the reward of an episode. The last one counts until the episode has ended."""
        with self._changed:
            episode.reward, episode.info = reward, dict(info)

    def end(self, episode: AgentEpisode, failure: str | None = None) -> None:
        """Ends an episode: its requests are refused from now on. The first end counts."""
        with self._changed:
            if not episode.ended:
                episode.ended, episode.failure = True, failure
                if episode.deadline is not None:
                    episode.seconds = time.monotonic() - episode.deadline + self._time_limit
                self._changed.notify_all()

    def wait(self, every: float, check: Callable[[int], None]) -> None:
        """Waits until all episodes have ended; one beyond its time ends as a timeout.

        Args:
          every: seconds between two calls of `check`.
          check: called with the number of episodes that have ended; an error that it raises ends the wait.
        """
        while True:
            now = time.monotonic()
            for episode in self._episodes.values():
                if not episode.ended and episode.deadline is not None and now > episode.deadline:
                    self.end(episode, "timeouts")
            ended = sum(episode.ended for episode in self._episodes.values())
            check(ended)
            if ended == len(self._episodes):
                return
            with self._changed:
                self._changed.wait(every)
