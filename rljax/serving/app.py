"""The HTTP server: OpenAI's endpoints over one `EngineWorker`, as an ASGI application.

    /v1/chat/completions   a chat, by the policy's own template
    /v1/completions        texts or token ids, continued as they stand
    /v1/models             the one policy there is
    /health                200 while requests are taken
    /metrics               Prometheus text

The event loop never waits for the device: jobs go to the worker's queue, and its pieces come back through
`call_soon_threadsafe`.
"""

import asyncio
import collections
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from rljax.errors import ConfigError, UserError
from rljax.serving.answers import Answer, Writer
from rljax.serving.policy import ServedPolicy
from rljax.serving.prompts import chat_ids, text_ids, token_ids
from rljax.serving.protocol import Body, ChatBody, CompletionBody, RequestError, parse
from rljax.serving.worker import Closed, Job, Piece, QueueFull

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    from rljax.serving.metrics import metrics_text
except ImportError as error:
    raise ConfigError(f"serving needs {error.name}: pip install 'rljax[serve]'") from error

MOST_BYTES = 4 << 20  # of a request's body
_CLIENT_IS_GONE = 499  # for logs: nobody reads it


def make_app(served: ServedPolicy, name: str) -> Starlette:
    """The application.

    Args:
      served: the policy; its worker is the caller's to start and to close.
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


class _Asked:
    """The jobs of one HTTP request, and what they have answered so far."""

    def __init__(self, service: "_Service", body: Body, prompts: Sequence[Sequence[int]]) -> None:
        served = service.served
        self.worker = served.worker
        self.writer = Writer(body, service.name, served.tokenizer, sum(map(len, prompts)))
        strings = served.stop_strings(body.stops)
        limit = served.max_tokens if body.most_tokens is None else body.most_tokens
        self._events: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(index: int, piece: Piece | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._events.put_nowait, (index, piece))

        self.jobs, self.answers = [], []
        for prompt in prompts:
            # A prompt's own, where none is given: one that comes twice should not be answered twice the same.
            seed = secrets.randbits(63) if body.seed is None else body.seed
            for sample in range(body.choices):
                index = len(self.jobs)
                self.answers.append(Answer(index, served.tokenizer, strings))
                self.jobs.append(
                    Job(
                        served.request(prompt, seed, sample, limit),
                        lambda piece, index=index: deliver(index, piece),
                        served.stop(strings),
                    )
                )

    def submit(self) -> None:
        try:
            self.worker.submit(self.jobs)
        except QueueFull as error:
            raise RequestError(429, f"{error}; try again later", code="queue_full") from error
        except Closed as error:
            raise RequestError(503, str(error)) from error

    async def pieces(self) -> AsyncIterator[tuple[Answer, str, Piece]]:
        """Everything that comes: whose it is, its text, and the piece itself."""
        left = len(self.jobs)
        while left:
            index, piece = await self._events.get()
            if isinstance(piece, BaseException):
                raise RequestError(500, f"decoding has failed: {piece}") from piece
            if piece.ending == "cancelled":
                raise RequestError(503, "the server is shutting down")
            left -= piece.ending is not None
            yield self.answers[index], self.answers[index].take(piece), piece

    async def whole(self) -> dict[str, Any]:
        async for _ in self.pieces():
            pass
        return self.writer.whole(self.answers)

    async def events(self) -> AsyncIterator[bytes]:
        """The lines of a stream (server-sent events)."""
        try:
            for answer in self.answers:
                yield _event(self.writer.first(answer))
            async for answer, text, piece in self.pieces():
                yield _event(self.writer.chunk(answer, text, piece))
            yield _event(self.writer.last(self.answers))
        except RequestError as error:  # the status has been sent: say it in the stream
            yield _event(error.body())
        yield b"data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """A stream whose jobs are given up with it."""

    def __init__(self, asked: _Asked) -> None:
        super().__init__(
            asked.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._asked = asked

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A client may leave while nothing is sent, and nothing else would tell.
        streaming = asyncio.ensure_future(self.stream_response(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            self._asked.worker.cancel(self._asked.jobs)
            streaming.cancel()
            leaving.cancel()


class _Service:
    """The endpoints."""

    def __init__(self, served: ServedPolicy, name: str) -> None:
        self.served, self.name = served, name
        self.refused: collections.Counter[int] = collections.Counter()  # by status
        self._created = int(time.time())

    # -- endpoints -------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        body = await _parsed(ChatBody, request)
        self._check(body)
        messages = [message.for_template() for message in body.messages]
        with _naming("messages"):
            prompt = await asyncio.to_thread(chat_ids, self.served, messages)
        return await self._answer(request, body, [prompt])

    async def completions(self, request: Request) -> Response:
        body = await _parsed(CompletionBody, request)
        self._check(body, len(body.prompts))
        with _naming("prompt"):
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

    # -- how -------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, body: Body, prompts: list[list[int]]) -> Response:
        worker = self.served.worker
        asked = _Asked(self, body, prompts)
        asked.submit()
        if body.stream:
            return _Stream(asked)
        answering = asyncio.ensure_future(asked.whole())
        leaving = asyncio.ensure_future(_disconnected(request.receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return (
                JSONResponse(answering.result())
                if answering.done()
                else Response(status_code=_CLIENT_IS_GONE)
            )
        finally:
            worker.cancel(asked.jobs)
            answering.cancel()
            leaving.cancel()

    def _all_ids(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        return [
            text_ids(self.served, prompt) if isinstance(prompt, str) else token_ids(self.served, prompt)
            for prompt in prompts
        ]

    def _check(self, body: Body, prompts: int = 1) -> None:
        """Raises a RequestError unless this policy can answer so many prompts."""
        self._check_name(body.model)
        count, worker = prompts * body.choices, self.served.worker
        if count > worker.max_waiting + worker.max_slots:
            raise RequestError(400, f"n: {count} responses are more than can ever wait here", "n")
        sampling = self.served.sampling
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
            asked, is_ = getattr(body, name), getattr(sampling, name)
            if asked is not None and asked != is_:
                way_out = "leave it out"
                if name in ("temperature", "top_p"):
                    way_out += f", or start a server with --{name.replace('_', '-')} {asked:g}"
                raise RequestError(
                    400,
                    f"{name}: this server samples with {is_:g} and no other, got {asked:g}; {way_out}",
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


@contextlib.contextmanager
def _naming(param: str) -> Iterator[None]:
    """Turns the error of a prompt into a 400 that names the field."""
    try:
        yield
    except UserError as error:
        raise RequestError(400, f"{param}: {error}", param) from error


async def _parsed(kind: type[Body], request: Request) -> Body:
    """In a thread, as is all that takes time with a large body: streams should not stand still meanwhile."""
    return await asyncio.to_thread(parse, kind, await _json(request))


async def _json(request: Request) -> Any:
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            if len(content) > MOST_BYTES:
                raise RequestError(413, f"the body is larger than {MOST_BYTES} bytes")
    except ClientDisconnect as error:
        raise RequestError(_CLIENT_IS_GONE, "the client has gone") from error
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any] | None) -> bytes:
    return b"" if content is None else b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
