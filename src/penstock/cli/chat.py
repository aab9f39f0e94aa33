"""``penstock chat``: talks to any server of the OpenAI API, showing every token as it comes.

Keeps the conversation and sends it whole each time.  Knows nothing about the model or its template.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

import msgspec

from penstock.cli.asking import add_service_flags
from penstock.cli.chunks import Usage, decode_chunk, error_of
from penstock.cli.http_stream import HttpStreamClient, StreamError
from penstock.cli.parsing import COMMANDS
from penstock.cli.sse import DONE
from penstock.config.load import load_client
from penstock.errors import ConfigError, PenstockError, WorkerError

EPILOG = """\
examples:
  penstock chat                                          talk to it
  penstock chat "Tell me a story about a fox."           ask once
  penstock chat --url http://10.0.0.7:8000 --temperature 0.7 --seed 1

In a conversation: Ctrl-C stops an answer, /new starts afresh, Ctrl-D ends.
"""

READY_POLL_S = 0.05


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "chat",
        help=COMMANDS["chat"],
        description="Talk to a model in the terminal, or ask it once.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="ask this and end; none: a conversation")
    add_service_flags(parser)
    parser.add_argument("--model", metavar="NAME", help="default: the first that /v1/models names")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the server's; 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="default: the server's")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of one answer; default: the server's")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="until the server is ready, at most")


def run(args: argparse.Namespace) -> int:
    """0 after an answer or the end of the conversation, 130 for an answer that was stopped.

    Raises PenstockError when a single question fails.
    """
    try:
        url, key = load_client(args.url, args.api_key)
        client = HttpStreamClient(url, api_key=key)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with asyncio.Runner() as runner:
        try:
            runner.run(wait_until_ready(client, args.wait))
            fields = {name: getattr(args, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
            chat = Chat(
                client=client,
                model=args.model or runner.run(first_model(client)),
                fields={name: value for name, value in fields.items() if value is not None},
                messages=[{"role": "system", "content": args.system}] if args.system else [],
            )
            if args.prompt is not None:
                figures = runner.run(chat.ask(args.prompt, sys.stdout))
                print_figures(figures)
                return 130 if figures.stopped else 0
            converse(runner, chat)
        finally:
            runner.run(_close(client))
    return 0


async def _close(client: HttpStreamClient) -> None:
    client.close()


async def wait_until_ready(client: HttpStreamClient, patience: float) -> None:
    """Ask ``/ready`` until it answers 200.  Raises WorkerError when ``patience`` seconds did not bring that."""
    deadline = time.monotonic() + patience
    while patience > 0:
        try:
            state = f"/ready answers {(await client.get('/ready')).status}"
            if state.endswith(" 200"):
                return
        except StreamError as error:
            state = str(error)
        if time.monotonic() > deadline:
            raise WorkerError(f"not ready after {patience:g} s: {state}")
        await asyncio.sleep(READY_POLL_S)


async def first_model(client: HttpStreamClient) -> str:
    """The first model that the server names.  Raises WorkerError, StreamError."""
    try:
        reply = await client.get("/v1/models")
    except StreamError as error:
        hint = "; start one with `penstock serve`" if error.kind == "connection refused" else ""
        raise WorkerError(f"no server at {client.server.authority} ({error.kind}){hint}") from error
    try:
        return str(msgspec.json.decode(reply.body)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        message = error_of(reply.body).message
        raise WorkerError(f"/v1/models answers {reply.status} {message or 'and names no model'}") from None


@dataclass(slots=True)
class Figures:
    """How one answer came.  Seconds."""

    asked: float
    first: float | None = None
    last: float = 0.0
    pieces: int = 0
    usage: Usage | None = None
    stopped: bool = False

    def words(self) -> str:
        """``62 tokens, first after 0.041 s, then 84.1 a second``"""
        if self.first is None:
            return "stopped before its first token" if self.stopped else "no text"
        tokens = self.usage.completion_tokens if self.usage and self.usage.completion_tokens else self.pieces
        text = f"{tokens} tokens, first after {self.first - self.asked:.3f} s"
        if tokens > 1 and self.last > self.first:
            text += f", then {(tokens - 1) / (self.last - self.first):.1f} a second"
        return text + (", stopped" if self.stopped else "")


def print_figures(figures: Figures) -> None:
    """On standard error, so that standard output is the answer alone."""
    print(f"[{figures.words()}]", file=sys.stderr)


@dataclass(slots=True, kw_only=True)
class Chat:
    """A conversation with one model."""

    client: HttpStreamClient
    model: str
    fields: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    async def ask(self, prompt: str, out: TextIO) -> Figures:
        """Send the conversation with this question; write the answer as it comes.

        Cancelled, it keeps what came and returns.  Raises PenstockError, and then forgets the question.
        """
        self.messages.append({"role": "user", "content": prompt})
        answer = _Answer(out, Figures(time.perf_counter()))
        body = {"model": self.model, "messages": self.messages, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        try:
            reply = await self.client.post_until_told(
                "/v1/chat/completions",
                msgspec.json.encode(body | options | self.fields),
                answer.take,
                key=secrets.token_hex(16),
            )
            if reply.status != 200:
                raise WorkerError(error_of(reply.body).message or f"the server answers {reply.status}")
            if not answer.done:
                raise StreamError("stream ended early")
        except asyncio.CancelledError:
            answer.figures.stopped = True
        except PenstockError:
            self.messages.pop()
            raise
        finally:
            answer.end_line()
        self.messages.append({"role": "assistant", "content": "".join(answer.texts)})
        return answer.figures


class _Answer:
    """Takes the events of one answer, and writes their text."""

    def __init__(self, out: TextIO, figures: Figures) -> None:
        self.figures = figures
        self.texts: list[str] = []  # without reasoning, which does not go back to the model
        self._thinks = False
        self._written = ""
        self.done = False
        self._out = out

    def take(self, data: bytes, arrived: float) -> None:
        if data == DONE:
            self.done = True
            return
        try:
            chunk = decode_chunk(data)
        except msgspec.DecodeError as error:
            raise StreamError("bad chunk", str(error)) from error
        if chunk.error is not None and chunk.error.code == WorkerError.code:
            raise StreamError("connection lost", chunk.error.message)  # asked for again
        if chunk.error is not None:
            raise WorkerError(chunk.error.message)
        self.figures.usage = chunk.usage or self.figures.usage
        for choice in chunk.choices:
            if choice.added():
                self.figures.first = self.figures.first or arrived
                self.figures.last = arrived
                self.figures.pieces += 1
                self._show(choice.thought(), choice.said())

    def _show(self, thought: str, said: str) -> None:
        """Reasoning, then, set off by a blank line, the answer."""
        set_off = "\n\n" if said and (self._thinks or thought) else ""
        self._thinks = not said and (self._thinks or bool(thought))
        if said:
            self.texts.append(said)
        self._write(thought + set_off + said)

    def end_line(self) -> None:
        if self._written and not self._written.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        self._written = text
        self._out.write(printable(text))
        self._out.flush()


def printable(text: str) -> str:
    """Without control characters but line ends and tabs: no answer shall steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


def converse(runner: asyncio.Runner, chat: Chat) -> None:
    """Questions and answers until the end of input."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and a history
    print(f"{chat.model}: Ctrl-C stops an answer, /new starts afresh, Ctrl-D ends.", file=sys.stderr)
    start = len(chat.messages)
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if question == "/new":
            del chat.messages[start:]
        elif question:
            answer_one(runner, chat, question)


def answer_one(runner: asyncio.Runner, chat: Chat, question: str) -> None:
    """One turn; what goes wrong is said, and the conversation goes on."""
    try:
        print_figures(runner.run(chat.ask(question, sys.stdout)))
    except PenstockError as error:
        print(f"[{error}]", file=sys.stderr)
