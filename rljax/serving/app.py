"""The HTTP server: OpenAI's endpoints over one `EngineWorker`, as an ASGI application.

    /v1/chat/completions   answers a chat, formatted by the policy's template
    /v1/completions        continues texts or token ids as they are
    /v1/models             lists the one policy
    /health                returns 200 while requests are accepted
    /metrics               returns Prometheus text

The event loop never waits for the device: jobs go to the worker's queue, and the worker's thread returns
pieces through `call_soon_threadsafe`.
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
_CLIENT_IS_GONE = 499  # status for logs; no client receives it


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


class _Exchange:
    """The jobs of one HTTP request, and their answers so far."""

    def __init__(self, service: "_Service", body: Body, prompts: Sequence[Sequence[int]]) -> None:
        served = service.served
        self.worker = served.worker
        self.writer = Writer(body, service.name, served.tokenizer, sum(map(len, prompts)))
        strings = served.stop_strings(body.stops)
        limit = served.max_tokens if body.most_tokens is None else body.most_tokens
        sampling = served.requested_sampling(body.sampling_settings)
        self._events: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(index: int, piece: Piece | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._events.put_nowait, (index, piece))

        self.jobs, self.answers = [], []
        for prompt in prompts:
            # Without a seed in the request every prompt gets a random one, so that repeats differ.
            seed = secrets.randbits(63) if body.seed is None else body.seed
            for sample in range(body.choices):
                index = len(self.jobs)
                self.answers.append(Answer(index, served.tokenizer, strings))
                self.jobs.append(
                    Job(
                        served.request(prompt, seed, sample, limit, sampling),
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
        """Yields every piece as it arrives: its answer, its new text, and the piece."""
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
        """Yields the lines of a stream (server-sent events)."""
        try:
            for answer in self.answers:
                yield _event(self.writer.first(answer))
            async for answer, text, piece in self.pieces():
                yield _event(self.writer.chunk(answer, text, piece))
            yield _event(self.writer.last(self.answers))
        except RequestError as error:  # the status has been sent, so the stream carries the error
            yield _event(error.body())
        yield b"data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """A stream that cancels its jobs when it ends."""

    def __init__(self, exchange: _Exchange) -> None:
        super().__init__(
            exchange.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._exchange = exchange

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A client may disconnect while nothing is sent, which only `receive` reports.
        streaming = asyncio.ensure_future(self.stream_response(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            self._exchange.worker.cancel(self._exchange.jobs)
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

    # -- helpers ---------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, body: Body, prompts: list[list[int]]) -> Response:
        worker = self.served.worker
        exchange = _Exchange(self, body, prompts)
        exchange.submit()
        if body.stream:
            return _Stream(exchange)
        answering = asyncio.ensure_future(exchange.whole())
        leaving = asyncio.ensure_future(_disconnected(request.receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return (
                JSONResponse(answering.result())
                if answering.done()
                else Response(status_code=_CLIENT_IS_GONE)
            )
        finally:
            worker.cancel(exchange.jobs)
            answering.cancel()
            leaving.cancel()

    def _all_ids(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        return [
            text_ids(self.served, prompt) if isinstance(prompt, str) else token_ids(self.served, prompt)
            for prompt in prompts
        ]

    def _check(self, body: Body, prompts: int = 1) -> None:
        """Raises a RequestError for a request that this policy cannot answer.

        Args:
          body: body of the request.
          prompts: number of its prompts.
        """
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
    """Parses a body in a thread, because a large body takes time and would stall the streams."""
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
