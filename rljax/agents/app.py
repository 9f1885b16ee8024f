"""The HTTP server that agents talk to, as an ASGI application.

    /v1/episodes/{id}/chat/completions   OpenAI's endpoint, for a client with base_url .../v1/episodes/{id}
    /v1/episodes/{id}/reward             takes {"reward": number, "info": {name: number}}
    /v1/episodes/{id}/models             lists the policy
    /v1/episodes                         POST: returns the next episode to an agent that requests one; 204
                                         where there is none now
    /v1/models, /health                  as for `rljax serve`

The noise of a request follows from its episode and its number there, and the sampling is the run's: what is
sampled is trained, so a request for other settings is refused.
"""

import asyncio
import hmac
import math
import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rljax import requests as rollout
from rljax.agents.board import EpisodeBoard
from rljax.agents.episode import AgentEpisode, Turn
from rljax.models.chat_turns import ChatTurns
from rljax.models.tokenizer import Tokenizer
from rljax.sampling.distribution import SamplingParams
from rljax.sampling.noise import request_key
from rljax.serving.answers import Writer
from rljax.serving.exchange import Exchange, answer, body_json, naming, parsed
from rljax.serving.protocol import ChatBody, RequestError
from rljax.serving.worker import EngineWorker


class AgentService:
    """The endpoints.

    Args:
      name: name of the policy for clients.
      stop: texts that end every reply.
      longest_prompt, longest_response: see `AgentEpisode.room`.
      most_requests: most requests of an episode.
      api_key: key that requests must bring; None for none.

    Attributes:
      worker: decodes the requests; None between rollouts.
      step: training step of the rollout.
      training: whether the replies may be trained on.
    """

    def __init__(
        self,
        board: EpisodeBoard,
        tokenizer: Tokenizer,
        name: str,
        seed: int,
        sampling: SamplingParams,
        stop: tuple[str, ...],
        longest_prompt: int,
        longest_response: int,
        most_requests: int,
        api_key: str | None,
    ) -> None:
        self.board, self.tokenizer, self.name, self.seed = board, tokenizer, name, seed
        self._chat, self._sampling, self._stop = ChatTurns(tokenizer), sampling, stop
        self._longest = longest_prompt, longest_response
        self._most_requests, self._api_key = most_requests, api_key
        self.worker: EngineWorker | None = None
        self.step, self.training = 0, True
        self._created = int(time.time())
        episode = "/v1/episodes/{id}"
        self.app = Starlette(
            routes=[
                Route(f"{episode}/chat/completions", self.chat, methods=["POST"]),
                Route(f"{episode}/reward", self.reward, methods=["POST"]),
                Route(f"{episode}/models", self.models),
                Route("/v1/episodes", self.next, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
            ],
            exception_handlers={RequestError: self.refuse, HTTPException: self.refuse_http},
        )

    # -- endpoints -------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        episode = self._episode(request)
        body = await parsed(ChatBody, request)
        self._check(body)
        messages = [message.for_template() for message in body.messages]
        with naming("messages"):
            prompt = await asyncio.to_thread(episode.prompt, messages, self._chat)
        room = episode.room(prompt, *self._longest)
        if room < 1:
            raise RequestError(
                400,
                f"messages: {len(prompt)} tokens are more than fit: rollout.max_prompt_length"
                f" {self._longest[0]} before the first reply, max_response_length {self._longest[1]} from"
                " it on",
                "messages",
                "context_length_exceeded",
            )
        limit = room if body.most_tokens is None else min(room, body.most_tokens)
        worker = self.worker
        with episode.lock:
            if worker is None or episode.ended:
                raise _no_episode(episode.id)
            if episode.requests >= self._most_requests:
                raise RequestError(
                    400, f"an episode has at most {self._most_requests} requests (agents.max_requests)"
                )
            number = episode.requests
            episode.requests += 1
        requests = [
            rollout.Request(
                prompt,
                request_key(self.seed, *episode.identity, number, choice),
                limit,
                self.training,
                self.step,
                episode.sampling,
            )
            for choice in range(body.choices)
        ]
        recorded = False

        def record(exchange: Exchange) -> None:
            nonlocal recorded
            recorded = True
            with episode.lock:
                episode.turns += [
                    Turn(
                        messages,
                        each.text,
                        prompt,
                        tuple(each.tokens),
                        tuple(each.logprobs),
                        job.response.ending,
                        tuple(job.response.versions),
                        job.response.drafted,
                        job.response.accepted,
                    )
                    for each, job in zip(exchange.answers, exchange.jobs, strict=True)
                ]

        def forget() -> None:
            """The number of a request whose reply the agent never got is free for its next one."""
            with episode.lock:
                if not recorded and episode.requests == number + 1:
                    episode.requests = number

        stop = tuple(dict.fromkeys((*self._stop, *body.stops)))
        writer = Writer(body, self.name, self.tokenizer, len(prompt))
        shown = self.tokenizer.response_text
        exchange = Exchange(worker, writer, self.tokenizer, requests, stop, shown, record)
        return await answer(request, exchange, forget)

    async def reward(self, request: Request) -> Response:
        episode = self._episode(request)
        content = await body_json(request)
        reward = content.get("reward") if isinstance(content, dict) else None
        info = content.get("info") or {} if isinstance(content, dict) else {}
        if not _is_number(reward):
            raise RequestError(400, f"reward: should be a finite number, not {reward!r:.60}", "reward")
        if not (isinstance(info, dict) and all(_is_number(value) for value in info.values())):
            raise RequestError(400, "info: should be an object of finite numbers", "info")
        self.board.report(episode, float(reward), {name: float(value) for name, value in info.items()})
        self.board.end(episode)
        return JSONResponse({"status": "ok"})

    async def next(self, request: Request) -> Response:
        self._authorize(request)
        episode = self.board.next()
        if episode is None:
            return Response(status_code=204, headers={"Retry-After": "1"})
        base = str(request.base_url).rstrip("/")
        return JSONResponse(
            {
                "id": episode.id,
                "base_url": f"{base}/v1/episodes/{episode.id}",
                "model": self.name,
                "problem": problem_fields(episode),
            }
        )

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        card = {"id": self.name, "object": "model", "created": self._created, "owned_by": "rljax"}
        return JSONResponse({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok" if self.worker is not None else "between rollouts"})

    # -- helpers ---------------------------------------------------------------------------------------------

    def _episode(self, request: Request) -> AgentEpisode:
        self._authorize(request)
        episode = self.board.get(request.path_params["id"])
        if episode is None:
            raise _no_episode(request.path_params["id"])
        return episode

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._api_key is not None and not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise RequestError(
                401, "the API key is missing or wrong (agents.api_key)", code="invalid_api_key"
            )

    def _check(self, body: ChatBody) -> None:
        if body.model != self.name:
            raise RequestError(
                404, f"model: there is no {body.model!r} here, only {self.name!r}", "model", "model_not_found"
            )
        settings = dict(body.sampling_settings)
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(body, name) is not None:
                settings[name] = getattr(body, name)
        for name, value in settings.items():
            if value != getattr(self._sampling, name):
                raise RequestError(
                    400,
                    f"{name}: the run samples with {getattr(self._sampling, name):g} (rollout.{name}) and"
                    f" trains what it samples, got {value:g}; leave it out",
                    name,
                    "unsupported_value",
                )
        for name in ("top_logprobs", "chat_template_kwargs"):
            if getattr(body, name):
                raise RequestError(
                    400, f"{name}: an episode has none; leave it out", name, "unsupported_value"
                )
        if any(message.tool_calls for message in body.messages):
            raise RequestError(
                400,
                "messages: an episode's turns are text, as they were sampled: leave tool_calls out",
                "messages",
            )
        if body.seed is not None:
            raise RequestError(
                400, "seed: the noise follows from the episode; leave it out", "seed", "unsupported_value"
            )

    async def refuse(self, request: Request, error: RequestError) -> Response:
        return JSONResponse(error.body(), error.status)

    async def refuse_http(self, request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(RequestError(error.status_code, message).body(), error.status_code)


def problem_fields(episode: AgentEpisode) -> dict[str, Any]:
    """Returns what an agent gets of its problem, as JSON values. The right answer is part of it: the agent
    scores.
    """
    problem = episode.problem
    return {
        "id": problem.id,
        "messages": [dict(message) for message in problem.messages],
        "answer": problem.answer,
        "data": dict(problem.data or {}),
    }


def _no_episode(name: str) -> RequestError:
    return RequestError(404, f"no episode {name!r} is open: it has ended, or never was", code="no_episode")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
