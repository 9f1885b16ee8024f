"""One HTTP request while it is answered: its jobs, the pieces that come back, and the answer or its stream.

The event loop never waits for the device: jobs go to the worker's queue, and the worker's thread returns
pieces through `call_soon_threadsafe`.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rljax import requests as rollout
from rljax.errors import UserError
from rljax.models.tokenizer import Decode, Tokenizer
from rljax.rollout.stop_strings import StopStrings
from rljax.serving.answers import Answer, Writer
from rljax.serving.jobs import Closed, Job, Piece, QueueFull
from rljax.serving.protocol import Body, RequestError, parse
from rljax.serving.scoring import Scores
from rljax.serving.worker import EngineWorker

MOST_BYTES = 4 << 20  # of a request's body
CLIENT_IS_GONE = 499  # status for logs; no client receives it


class Exchange:
    """The jobs of one HTTP request, and their answers so far.

    Args:
      requests: one for each choice of the answer.
      stop: texts that end a choice, searched in the text of all its tokens.
      shown: function from token ids to the text that the client gets.
      finished: called with the exchange once all choices are complete, before the client gets them.
      score: returns the scores of a prompt and its response, and may take long; None where no request may
        want any. A choice with scores comes in one piece, when it is complete.
    """

    def __init__(
        self,
        worker: EngineWorker,
        writer: Writer,
        tokenizer: Tokenizer,
        requests: Sequence[rollout.Request],
        stop: tuple[str, ...],
        shown: Decode,
        finished: Callable[["Exchange"], None] = lambda exchange: None,
        score: Callable[[rollout.Request, Sequence[int]], Scores] | None = None,
    ) -> None:
        self.worker, self.writer, self._finished = worker, writer, finished
        self._requests, self._score = requests, score if writer.body.wants_scores else None
        self._events: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(index: int, piece: Piece | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._events.put_nowait, (index, piece))

        self.answers = [
            Answer(index, tokenizer.decode, stop, shown, request.prompt_ids if writer.body.echoes else ())
            for index, request in enumerate(requests)
        ]
        self.jobs = [  # none where only the prompt is wanted
            Job(
                request,
                lambda piece, index=index: deliver(index, piece),
                StopStrings(stop, tokenizer.decode) if stop else None,
            )
            for index, request in enumerate(requests)
            if request.max_response
        ]

    def submit(self) -> None:
        if not self.jobs:
            for index in range(len(self.answers)):
                self._events.put_nowait((index, Piece([], [], "length")))
        try:
            self.worker.submit(self.jobs)
        except QueueFull as error:
            raise RequestError(429, f"{error}; try again later", code="queue_full") from error
        except Closed as error:
            raise RequestError(503, str(error)) from error

    async def pieces(self) -> AsyncIterator[tuple[Answer, str, Piece]]:
        """Yields every piece as it arrives: its answer, its new text, and the piece."""
        texts = [""] * len(self.answers)  # of the pieces that are not yielded yet
        left = len(self.answers)
        while left:
            index, piece = await self._events.get()
            if isinstance(piece, BaseException):
                raise RequestError(500, f"decoding has failed: {piece}") from piece
            if piece.ending == "cancelled":
                raise RequestError(503, "the server is shutting down")
            answer = self.answers[index]
            text = answer.take(piece)
            if self._score is not None:
                texts[index] += text
                if piece.ending is None:
                    continue
                text, piece = texts[index], Piece(answer.tokens, answer.logprobs, piece.ending)
                try:
                    answer.add_scores(
                        await asyncio.to_thread(self._score, self._requests[index], answer.tokens)
                    )
                except Exception as error:
                    raise RequestError(500, f"scoring has failed: {error}") from error
            left -= piece.ending is not None
            if not left:
                self._finished(self)
            yield answer, text, piece

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


class Stream(StreamingResponse):
    """A stream that cancels its jobs when it ends."""

    def __init__(self, exchange: Exchange, over: Callable[[], None]) -> None:
        super().__init__(
            exchange.events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._exchange, self._over = exchange, over

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A client may disconnect while nothing is sent, which only `receive` reports.
        streaming = asyncio.ensure_future(self.stream_response(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({streaming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
        finally:
            self._exchange.worker.cancel(self._exchange.jobs)
            streaming.cancel()
            leaving.cancel()
            self._over()


async def answer(request: Request, exchange: Exchange, over: Callable[[], None] = lambda: None) -> Response:
    """Submits the jobs of an exchange and answers the request, as a stream where it wants one.

    Args:
      request: the request.
      exchange: its jobs.
      over: called when nothing more will come, whether the client has got everything or not.
    """
    try:
        exchange.submit()
    except RequestError:
        over()
        raise
    if exchange.writer.body.stream:
        return Stream(exchange, over)
    answering = asyncio.ensure_future(exchange.whole())
    leaving = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(answering.result()) if answering.done() else Response(status_code=CLIENT_IS_GONE)
    finally:
        exchange.worker.cancel(exchange.jobs)
        answering.cancel()
        leaving.cancel()
        over()


@contextlib.contextmanager
def naming(param: str) -> Iterator[None]:
    """Turns the error of a prompt into a 400 that names the field."""
    try:
        yield
    except UserError as error:
        raise RequestError(400, f"{param}: {error}", param) from error


async def parsed(kind: type[Body], request: Request) -> Body:
    """Parses a body in a thread, because a large body takes time and would stall the streams."""
    return await asyncio.to_thread(parse, kind, await body_json(request))


async def body_json(request: Request) -> Any:
    """Returns the JSON of a request's body; a RequestError where there is none."""
    content = bytearray()
    try:
        async for part in request.stream():
            content += part
            if len(content) > MOST_BYTES:
                raise RequestError(413, f"the body is larger than {MOST_BYTES} bytes")
    except ClientDisconnect as error:
        raise RequestError(CLIENT_IS_GONE, "the client has gone") from error
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(content: dict[str, Any] | None) -> bytes:
    return b"" if content is None else b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
