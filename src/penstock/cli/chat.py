"""``penstock chat``: talks to any server of the OpenAI API, showing every token as it comes.

Keeps the conversation and sends it whole each time.  Knows nothing about the model or its template.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import stat
import sys
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

import msgspec

from penstock.cli.console import WrappedOutput
from penstock.cli.openai_client import ChunkUsage, ServedModel, add_service_flags, decode_chunk, error_of, served_model
from penstock.cli.parsing import COMMANDS
from penstock.config.base import expanded_path
from penstock.config.load import load_client
from penstock.errors import ConfigError, PenstockError, WorkerError
from penstock.http_client import DONE, HttpReply, HttpStreamClient, StreamError

EPILOG = """\
examples:
  penstock chat                                          talk to it
  penstock chat "Tell me a story about a fox."           ask once
  penstock chat --url http://10.0.0.7:8000 --temperature 0.7 --seed 1
  cat notes.txt | penstock chat "Summarize this:"        ask once; what is piped in follows the prompt

In a conversation: Ctrl-C stops a response, Ctrl-D ends.  Commands:
"""

HELP = """\
/new              start a new conversation
/system [TEXT]    set the system message, or remove it
/set NAME VALUE   set temperature, top_p, max_tokens or seed; VALUE "default" removes it
/show             show the model, the settings and how full the conversation is
/save FILE        write the conversation there, as JSON
/help             show this (also /?)
/bye              end (also /exit, /quit, Ctrl-D)
\"\"\"               begin and end a message of several lines
"""

SETTINGS: dict[str, type[int] | type[float]] = {"temperature": float, "top_p": float, "max_tokens": int, "seed": int}

READY_POLL_S = 0.05
SEVERAL_LINES = '"""'
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "chat",
        help=COMMANDS["chat"],
        description="Talk to a model in the terminal, or ask it once.",
        epilog=EPILOG + HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="ask this and end; none: a conversation")
    add_service_flags(parser)
    parser.add_argument("--model", metavar="NAME", help="default: the first that /v1/models names")
    add_chat_flags(parser)
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help="until the server is ready, at most")


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the requests."""
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: the server's; 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="default: the server's")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of one answer; default: the server's")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")


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
            chat = Chat(
                client=client,
                model=runner.run(served_model(client, args.model)),
                fields={name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None},
                messages=[{"role": "system", "content": args.system}] if args.system else [],
            )
            if args.prompt is not None or not sys.stdin.isatty():
                prompt = with_piped_text(args.prompt)
                figures = runner.run(chat.ask(prompt, sys.stdout))
                print_figures(figures, chat.model)
                return 130 if figures.stopped else 0
            run_conversation(runner, chat)
        finally:
            runner.run(_close(client))
    return 0


def is_piped(file: TextIO) -> bool:
    """Whether a pipe or a file stands there, whose end will come; no terminal, socket or /dev/null."""
    mode = os.fstat(file.fileno()).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def with_piped_text(prompt: str | None) -> str:
    """The prompt, and behind it what is piped into the command.  Raises ConfigError when both are empty."""
    piped = sys.stdin.read().strip() if is_piped(sys.stdin) else ""
    whole = "\n\n".join(part for part in (prompt or "", piped) if part)
    if not whole:
        raise ConfigError("nothing to ask: give a PROMPT, pipe a text in, or start it in a terminal")
    return whole


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


@dataclass(slots=True)
class ResponseTimes:
    """How one answer came.  Seconds."""

    asked: float
    first: float | None = None
    last: float = 0.0
    pieces: int = 0
    usage: ChunkUsage | None = None
    stopped: bool = False

    def words(self, context: int | None = None) -> str:
        """``62 tokens, first after 0.041 s, then 84.1 a second; 310 of 2,048 tokens used``"""
        if self.first is None:
            return "stopped before its first token" if self.stopped else "no text"
        tokens = self.usage.completion_tokens if self.usage and self.usage.completion_tokens else self.pieces
        text = f"{tokens} tokens, first after {self.first - self.asked:.3f} s"
        if tokens > 1 and self.last > self.first:
            text += f", then {(tokens - 1) / (self.last - self.first):.1f} a second"
        text += ", stopped" if self.stopped else ""
        if context and self.usage:
            text += f"; {self.usage.prompt_tokens + tokens:,} of {context:,} tokens used"
        return text


def print_figures(figures: ResponseTimes, model: ServedModel) -> None:
    """On standard error, so that standard output is the answer alone."""
    print(f"[{figures.words(model.max_model_len)}]", file=sys.stderr)


class ContextFullError(PenstockError):
    """The model's context has no room for a further question."""


@dataclass(slots=True, kw_only=True)
class Chat:
    """A conversation with one model."""

    client: HttpStreamClient
    model: ServedModel
    fields: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    used: int = 0  # tokens of prompt and response, when it was last answered

    def begin_anew(self) -> None:
        """Forget everything but the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.used = 0

    def set_system(self, text: str) -> None:
        """Set the system message of the conversation; an empty text removes it."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def set_field(self, name: str, value: str) -> str:
        """Set a request field from text, or remove it for ``default``; what was done, or why not."""
        kind = SETTINGS.get(name)
        if kind is None or not value:
            return f"Usage: /set NAME VALUE, of {', '.join(SETTINGS)}"
        if value == "default":
            self.fields.pop(name, None)
            return f"{name}: the server's default"
        try:
            self.fields[name] = kind(value)
        except ValueError:
            return f"{name}: expected a number, got {value!r}"
        return f"{name}: {self.fields[name]}"

    def described(self) -> str:
        """Model, settings, and how full the conversation is."""
        settings = ", ".join(f"{name} {value}" for name, value in self.fields.items()) or "the server's defaults"
        context = f" of {self.model.max_model_len:,}" if self.model.max_model_len else ""
        return f"model {self.model.id}; {settings}; {len(self.messages)} messages, {self.used:,}{context} tokens used"

    async def ask(self, prompt: str, out: TextIO) -> ResponseTimes:
        """Send the conversation with this question; write the answer as it comes.

        Cancelled, it keeps what came and returns.  Raises PenstockError, and then forgets the question.
        """
        self.messages.append({"role": "user", "content": prompt})
        answer = _ChatReply(out, ResponseTimes(time.perf_counter()))
        body = {"model": self.model.id, "messages": self.messages, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        try:
            reply = await self.client.post_resumable(
                "/v1/chat/completions",
                msgspec.json.encode(body | options | self.fields),
                answer.add_chunk,
                key=secrets.token_hex(16),
            )
            if reply.status != 200:
                raise error_of_reply(reply)
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
        if usage := answer.figures.usage:
            self.used = usage.prompt_tokens + (usage.completion_tokens or 0)
        return answer.figures


def error_of_reply(reply: HttpReply) -> PenstockError:
    """The error that a status other than 200 stands for."""
    error = error_of(reply.body)
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        return ContextFullError(error.message)
    return WorkerError(error.message or f"the server answers {reply.status}")


class _ChatReply:
    """Takes the events of one answer, and writes their text."""

    def __init__(self, out: TextIO, figures: ResponseTimes) -> None:
        self.figures = figures
        self.texts: list[str] = []  # without reasoning, which does not go back to the model
        self._thinks = False
        self._written = ""
        self.done = False
        self._out = WrappedOutput(out)

    def add_chunk(self, data: bytes, arrived: float) -> None:
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
            if choice.text_added():
                self.figures.first = self.figures.first or arrived
                self.figures.last = arrived
                self.figures.pieces += 1
                self._show(choice.reasoning_added(), choice.content_added())

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


def printable(text: str) -> str:
    """Without control characters but line ends and tabs: no answer shall steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160))


def run_conversation(runner: asyncio.Runner, chat: Chat) -> None:
    """Questions and answers until the end of input."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing and a history
    print(f"{chat.model.id}: /help lists commands, Ctrl-C stops a response, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            question = read_question()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if question.startswith("/"):
            if not run_command(chat, question):
                return
        elif question:
            run_turn(runner, chat, question)


def read_question() -> str:
    """One line, or the lines between two of three quotation marks.  Raises EOFError."""
    line = input("> ").strip()
    if not line.startswith(SEVERAL_LINES):
        return line
    lines = [line.removeprefix(SEVERAL_LINES)]
    while not lines[-1].rstrip().endswith(SEVERAL_LINES):
        lines.append(input(". "))
    lines[-1] = lines[-1].rstrip().removesuffix(SEVERAL_LINES)
    return "\n".join(lines).strip()


def run_command(chat: Chat, line: str) -> bool:
    """Carry out a line that begins with a slash; False when it ends the conversation."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/bye" | "/exit" | "/quit":
            return False
        case "/new":
            chat.begin_anew()
        case "/system":
            chat.set_system(rest)
        case "/set":
            print_note(chat.set_field(*rest.partition(" ")[::2]))
        case "/show":
            print_note(chat.described())
        case "/save":
            print_note(save(chat, rest))
        case "/help" | "/?":
            print_note(HELP.rstrip())
        case _:
            print_note(f"There is no command {name}.\n{HELP.rstrip()}")
    return True


def print_note(text: str) -> None:
    """To the person, not to whom the answer is piped."""
    print(text, file=sys.stderr)


def save(chat: Chat, name: str) -> str:
    """Write the conversation to a file; what was done, or why not."""
    if not name:
        return "Usage: /save FILE"
    try:
        saved = msgspec.json.format(msgspec.json.encode({"messages": chat.messages}))
        expanded_path(name, "FILE").write_bytes(saved)
    except ConfigError as error:
        return f"Cannot write {error}"
    except OSError as error:
        return f"Cannot write {name}: {error.strerror}"
    return f"Wrote {len(chat.messages)} messages to {name}"


def run_turn(runner: asyncio.Runner, chat: Chat, question: str) -> None:
    """One turn; what goes wrong is said, and the conversation goes on."""
    try:
        print_figures(runner.run(chat.ask(question, sys.stdout)), chat.model)
    except ContextFullError as error:
        print_note(f"[The conversation is full: /new starts a new one.  {error}]")
    except PenstockError as error:
        print_note(f"[{error}]")
