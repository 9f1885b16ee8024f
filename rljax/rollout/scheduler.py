"""Decodes a list of requests to its end: the decode loop of training and evaluation."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from rljax.engine.engine import DecodeEngine
from rljax.environments.use import EnvironmentUse
from rljax.models.transformer import Params
from rljax.requests import Completion, DecodeStatistics, PartialResponse, Request
from rljax.rollout.decode_loop import DecodeLoop, LoopPolicy, OnSync, check_request
from rljax.rollout.live_response import LiveResponse
from rljax.rollout.open_loop import open_loop, open_slots
from rljax.rollout.sources.idle import IDLE, IdleSlots
from rljax.rollout.sources.sampling_ahead import SamplingAhead
from rljax.rollout.stop_strings import StopStrings
from rljax.speculation.no_drafts import NoDrafts
from rljax.speculation.speculator import Speculator
from rljax.tools.use import ToolUse

OnProgress = Callable[[int, int], None]
"""Called at every host sync with (tokens sampled, requests finished)."""

OnFinished = Callable[[int, Completion], None]
"""Called with the index of a request and its response, as soon as the response has ended."""

_NOTHING = PartialResponse()


@dataclasses.dataclass(frozen=True)
class BegunRequests:
    """Requests that are decoded once somebody waits for them: `Scheduler.finish`."""

    params: Params
    requests: Sequence[Request]
    version: int


class Scheduler:
    """Decodes a list of requests to its end.

    Args:
      stop_strings: see `StopStrings`; None for none.
      speculator: speculator, to decode with drafts; None for plain decoding.
      overlap: whether to draft for one half of the slots while the device verifies the other; in plain
        decoding, whether to read results while the device goes on.
      tools: tools that responses may call, or the environment whose episodes they are; None for neither.
    """

    def __init__(
        self,
        engine: DecodeEngine,
        max_slots: int,
        stop_strings: StopStrings | None = None,
        speculator: Speculator | NoDrafts | None = None,
        overlap: bool = False,
        tools: ToolUse | EnvironmentUse | None = None,
    ) -> None:
        self.engine = engine
        self.max_slots = max_slots
        self.stop_strings = stop_strings
        self.speculator = NoDrafts() if speculator is None else speculator
        self.overlap = overlap
        self.tools = tools
        self.lengths = self.speculator.lengths

    def run(
        self,
        params: Params,
        requests: Sequence[Request],
        on_progress: OnProgress | None = None,
        on_finished: OnFinished | None = None,
        version: int = 0,
        partials: Mapping[int, PartialResponse] | None = None,
    ) -> tuple[list[Completion], DecodeStatistics]:
        """Returns completions in the order of `requests`, and counts of the work.

        Args:
          params: weights from `engine.load_params`.
          requests: requests to decode.
          version: number of the weights, for `Completion.versions`.
          partials: what is known of some responses already, by place.

        Raises:
          ValueError: a request has an empty prompt, no response tokens, or more positions than the largest
            cache bucket.
        """
        for request in requests:
            check_request(request, self.engine.buckets)
        known = partials or {}
        responses = [
            LiveResponse.resume(request, known.get(place, _NOTHING), self.stop_strings)
            for place, request in enumerate(requests)
        ]
        places = {response: place for place, response in enumerate(responses)}

        def report(synced: Sequence[LiveResponse]) -> None:
            for response in synced:
                if on_finished is not None and response.ending is not None:
                    on_finished(places[response], response.completion(self.tools is not None))
            if on_progress is not None:
                on_progress(loop.statistics.tokens, len(responses) - len(loop.live))

        idle = IDLE
        by_itself = self.stop_strings is None and self.tools is None  # every response ends on the device
        if self.speculator.run_ahead is not None:
            idle = SamplingAhead(self.speculator.run_ahead, self.speculator, takes_over=by_itself)
        policy = LoopPolicy(
            start_full=True, longest_first=self.lengths, reads_later=self.overlap and by_itself
        )
        loop = self.open_loop(params, policy, report, version, idle)
        taken = idle.begin(loop.slots, requests)
        for place, completion in taken.items():
            loop.statistics.tokens += len(completion.response_ids)
            if on_finished is not None:
                on_finished(place, completion)
        decoded = [response for place, response in enumerate(responses) if place not in taken]
        if decoded:
            loop.submit(decoded)
            while loop.live:
                loop.step()
            loop.finish_pass()  # a pass over requests that nobody waits for
            idle.end(loop.slots, requests)
            loop.statistics.running.append(loop.running_over_time.points())
        completions = [
            taken.get(place) or response.completion(self.tools is not None)
            for place, response in enumerate(responses)
        ]
        self.speculator.learn_lengths(requests, completions)
        return completions, loop.statistics

    def open_loop(
        self, params: Params, policy: LoopPolicy, on_sync: OnSync, version: int, idle: IdleSlots = IDLE
    ) -> DecodeLoop:
        """Returns a decode loop of the scheduler's parts, without requests. Arguments as of `open_loop`."""
        slots = open_slots(self.engine, params, self.speculator, self.overlap, version)
        return open_loop(slots, self.max_slots, self.tools, policy, on_sync, idle)

    def begin(self, params: Params, requests: Sequence[Request], version: int) -> BegunRequests:
        """Takes requests for `finish`. Rollout workers would begin now (`rljax/cluster/decoder.py`).

        Args:
          params: weights from `engine.load_params`; the arrays must stay as they are until then.
        """
        return BegunRequests(params, requests, version)

    def finish(
        self, begun: BegunRequests, on_progress: OnProgress | None = None
    ) -> tuple[list[Completion], DecodeStatistics]:
        """Decodes what was begun, as `run` does."""
        return self.run(begun.params, begun.requests, on_progress, version=begun.version)
