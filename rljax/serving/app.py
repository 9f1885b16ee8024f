"""The HTTP server: OpenAI's endpoints over one `EngineWorker`, as an ASGI application.

    /v1/chat/completions   answers a chat, formatted by the policy's template
    /v1/completions        continues texts or token ids as they are
    /v1/models             lists the one policy
    /health                returns 200 while requests are accepted
    /metrics               returns Prometheus text

`exchange.py` has what becomes of one request.
"""

import asyncio
import collections
import functools
import secrets
import time
from collections.abc import Sequence
from typing import Any

from rljax.errors import ConfigError
from rljax.serving.answers import Writer
from rljax.serving.policy import ServedPolicy
from rljax.serving.prompts import chat_ids, text_ids, token_ids
from rljax.serving.protocol import Body, ChatBody, CompletionBody, RequestError

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from rljax.serving.exchange import Exchange, answer, naming, parsed
    from rljax.serving.metrics import metrics_text
except ImportError as error:
    raise ConfigError(f"serving needs {error.name}: pip install 'rljax[serve]'") from error


def make_app(served: ServedPolicy, name: str) -> Starlette:
    """Returns the application.

    Args:
      served: the policy. The caller starts and closes its worker.
      name: name of the model for clients.
    """
    service = _Service(served, name)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
        ],
        exception_handlers={RequestError: service.refuse, HTTPException: service.refuse_http},
    )


class _Service:
    """The endpoints."""

    def __init__(self, served: ServedPolicy, name: str) -> None:
        self.served, self.name = served, name
        self.refused: collections.Counter[int] = collections.Counter()  # by status
        self._created = int(time.time())

    # -- endpoints -------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        body = await parsed(ChatBody, request)
        self._check(body)
        messages = [message.for_template() for message in body.messages]
        with naming("messages"):
            prompt = await asyncio.to_thread(chat_ids, self.served, messages, body.chat_template_kwargs or {})
        return await self._answer(request, body, [prompt])

    async def completions(self, request: Request) -> Response:
        body = await parsed(CompletionBody, request)
        self._check(body, len(body.prompts))
        with naming("prompt"):
            prompts = await asyncio.to_thread(self._all_ids, body.prompts)
        return await self._answer(request, body, prompts)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        if self.served.worker.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": str(self.served.worker.error or "shutting down")}, 503)

    async def metrics(self, request: Request) -> Response:
        return Response(
            metrics_text(self.served.worker, self.refused), media_type="text/plain; version=0.0.4"
        )

    # -- helpers ---------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, body: Body, prompts: list[list[int]]) -> Response:
        served = self.served
        limit = served.max_tokens if body.most_tokens is None else body.most_tokens
        sampling = served.requested_sampling(body.sampling_settings)
        requests = []
        for prompt in prompts:
            # Without a seed in the request every prompt gets a random one, so that repeats differ.
            seed = secrets.randbits(63) if body.seed is None else body.seed
            for sample in range(body.choices):
                requests.append(served.request(prompt, seed, sample, limit, sampling))
        writer = Writer(body, self.name, served.tokenizer, sum(map(len, prompts)))
        stop = served.stop_strings(body.stops)
        shown = functools.partial(served.tokenizer.decode, skip_special_tokens=True)
        exchange = Exchange(
            served.worker, writer, served.tokenizer, requests, stop, shown, score=served.score
        )
        return await answer(request, exchange)

    def _all_ids(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        return [
            text_ids(self.served, prompt) if isinstance(prompt, str) else token_ids(self.served, prompt)
            for prompt in prompts
        ]

    def _check(self, body: Body, prompts: int = 1) -> None:
        """Raises a RequestError for a request that this policy cannot answer."""
        self._check_name(body.model)
        count, worker = prompts * body.choices, self.served.worker
        if count > worker.max_waiting + worker.max_slots:
            raise RequestError(400, f"n: {count} responses are more than can ever wait here", "n")
        sampling = self.served.sampling
        for name in ("presence_penalty", "frequency_penalty"):
            requested, served = getattr(body, name), getattr(sampling, name)
            if requested is not None and requested != served:
                raise RequestError(
                    400,
                    f"{name}: all requests to this server have {served:g}, got {requested:g}; leave it out",
                    name,
                    "unsupported_value",
                )
        try:
            self.served.requested_sampling(body.sampling_settings)
        except ValueError as error:
            raise RequestError(400, str(error), str(error).partition(":")[0]) from error
        if body.wants_scores and self.served.scorer is None:
            name = "echo" if body.echoes else "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
            raise RequestError(
                400,
                f"{name}: alternatives and log-probabilities of prompts are computed on one device, and this"
                " policy lies on several",
                name,
                "unsupported_value",
            )
        most = body.most_tokens
        if most is not None and most > self.served.max_tokens:
            name = body.tokens_field
            raise RequestError(
                400, f"{name}: {most} is more than the {self.served.max_tokens} that fit (--max-tokens)", name
            )

    def _check_name(self, name: str) -> None:
        if name != self.name:
            raise RequestError(
                404, f"model: there is no {name!r} here, only {self.name!r}", "model", "model_not_found"
            )

    def _card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "rljax"}

    async def refuse(self, request: Request, error: RequestError) -> Response:
        self.refused[error.status] += 1
        headers = {"Retry-After": "1"} if error.status == 429 else None
        return JSONResponse(error.body(), error.status, headers)

    async def refuse_http(self, request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = await self.refuse(request, RequestError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response
