from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scripted_server import Exchange, scripted, usage_chunk

from penstock.cli import chat
from penstock.cli.chat import Chat, printable, wait_until_ready
from penstock.cli.console import WrappedOutput
from penstock.cli.openai_client import ServedModel, served_model
from penstock.errors import ConfigError, PenstockError, WorkerError
from penstock.http_client import HttpStreamClient

TELLER = ServedModel("teller", max_model_len=2048)


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


async def story(exchange: Exchange) -> None:
    if exchange.asked.path == "/v1/models":
        await exchange.plain(200, {"data": [{"id": "teller"}]})
        return
    await exchange.begin_stream()
    for text in ("Once", " upon", " a", " time"):
        await exchange.event(delta(text))
    await exchange.event(usage_chunk(9, 4))
    await exchange.end_stream()


async def test_the_conversation_is_kept():
    out = io.StringIO()
    async with scripted(story) as server, HttpStreamClient(server.url) as client:
        talk = Chat(client=client, model=TELLER, fields={"seed": 1}, messages=[{"role": "system", "content": "short"}])
        figures = await talk.ask("a story", out)
        await talk.ask("again", out)
    assert out.getvalue() == "Once upon a time\n" * 2
    assert figures.words().startswith("4 tokens, first after 0.")
    second = server.asked[1].body
    assert second["seed"] == 1
    assert [(m["role"], m["content"]) for m in second["messages"]] == [
        ("system", "short"),
        ("user", "a story"),
        ("assistant", "Once upon a time"),
        ("user", "again"),
    ]


async def test_reasoning_is_shown_and_does_not_go_back():
    async def thoughtful(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for part in ({"reasoning_content": "Hm"}, {"reasoning_content": ".", "content": "Yes"}, {"content": "!"}):
            await exchange.event({"choices": [{"index": 0, "delta": part}]})
        await exchange.end_stream()

    out = io.StringIO()
    async with scripted(thoughtful) as server, HttpStreamClient(server.url) as client:
        talk = Chat(client=client, model=TELLER, fields={}, messages=[])
        await talk.ask("well?", out)
        await talk.ask("again", out)
    assert out.getvalue() == "Hm.\n\nYes!\n" * 2
    assert server.asked[1].body["messages"][1] == {"role": "assistant", "content": "Yes!"}


def test_control_c_stops_the_answer_and_keeps_what_came():
    class InterruptingOut(io.StringIO):
        def flush(self) -> None:
            if self.getvalue() == "Once":
                os.kill(os.getpid(), signal.SIGINT)

    async def endless(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.event(delta("Once"))
        await asyncio.Event().wait()

    async def scene() -> Chat:
        async with scripted(endless) as server, HttpStreamClient(server.url) as client:
            talk = Chat(client=client, model=TELLER, fields={})
            figures = await talk.ask("a story", InterruptingOut())
            assert figures.stopped
            assert figures.words().endswith(", stopped")
            return talk

    with asyncio.Runner() as runner:
        talk = runner.run(scene())
    assert [m["content"] for m in talk.messages] == ["a story", "Once"]


async def too_long(exchange: Exchange) -> None:
    await exchange.plain(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})


async def dies(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event({"error": {"message": "no worker"}})
    await exchange.end_stream()


async def breaks_off(exchange: Exchange) -> None:
    await exchange.begin_stream()
    await exchange.event(delta("On"))
    exchange.writer.close()


@pytest.mark.parametrize(
    ("script", "words"), [(too_long, "too long"), (dies, "no worker"), (breaks_off, "connection lost")]
)
async def test_a_failed_question_is_forgotten(script: Any, words: str):
    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        talk = Chat(client=client, model=ServedModel("m"), fields={})
        with pytest.raises(PenstockError, match=words):
            await talk.ask("?", io.StringIO())
        assert talk.messages == []


async def test_waiting_ends_when_the_server_is_ready():
    answers = iter([503, 503, 200])

    async def script(exchange: Exchange) -> None:
        await exchange.plain(next(answers), {})

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        await wait_until_ready(client, 10)
        assert [asked.path for asked in server.asked] == ["/ready"] * 3


async def test_waiting_has_an_end():
    async def script(exchange: Exchange) -> None:
        await exchange.plain(503, {})

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        with pytest.raises(WorkerError, match=r"not ready after 0\.01 s: /ready answers 503"):
            await wait_until_ready(client, 0.01)


def test_no_answer_steers_the_terminal():
    assert printable("a\x1b[2Jb\x07\r\x9bc\n\tü\u200b") == "a[2Jbc\n\tü\u200b"


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    chat.add_parser(parser.add_subparsers())
    return parser.parse_args(["chat", *words])


def test_nobody_listens():
    with pytest.raises(WorkerError, match="penstock serve"):
        chat.run(parse("--url", "http://127.0.0.1:1", "hello"))


Talk = Callable[[str], tuple[Chat, list[Any]]]
"""From typed lines to the conversation and the bodies of its requests."""


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Talk]:
    """A whole conversation in one loop, typed as given: the server runs in the runner's own loop."""
    with asyncio.Runner() as runner:
        scene = scripted(full_after_two)
        server = runner.run(scene.__aenter__())
        client = HttpStreamClient(server.url)

        def typed(lines: str) -> tuple[Chat, list[Any]]:
            monkeypatch.setattr("sys.stdin", io.StringIO(lines))
            chat_ = Chat(client=client, model=TELLER, fields={"seed": 1})
            chat.run_conversation(runner, chat_)
            return chat_, [asked.body for asked in server.asked]

        yield typed
        client.close()
        runner.run(scene.__aexit__(None, None, None))


async def full_after_two(exchange: Exchange) -> None:
    if len(exchange.asked.body["messages"]) > 3:
        words = "maximum context length is 2048 tokens. However, you requested 2079"
        await exchange.plain(400, {"error": {"message": words, "code": "context_length_exceeded"}})
    else:
        await story(exchange)


def test_a_conversation_with_commands(talk: Talk, capsys: pytest.CaptureFixture[str]):
    _, bodies = talk(
        "first\n\n/new\n/set temperature 0.5\n/set seed default\n/system Be brief.\nsecond\n"
        '"""two\nlines"""\n/bye\nnever\n'
    )
    assert [[m["content"] for m in body["messages"]] for body in bodies] == [
        ["first"],
        ["Be brief.", "second"],
        ["Be brief.", "second", "Once upon a time", "two\nlines"],
    ]
    assert [(body.get("seed"), body.get("temperature")) for body in bodies] == [(1, None), (None, 0.5), (None, 0.5)]
    shown = capsys.readouterr()
    assert shown.out.count("Once upon a time") == 2
    assert shown.err.count("; 13 of 2,048 tokens used]") == 2


def test_a_full_conversation_says_how_to_go_on(talk: Talk, capsys: pytest.CaptureFixture[str]):
    assert len(talk("one\ntwo\nthree\n/show\n")[0].messages) == 4
    assert "[The conversation is full: /new starts a new one.  maximum context" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/bey", "/?", "/help"])
def test_commands_are_listed_and_never_asked_of_the_model(line: str, talk: Talk, capsys: pytest.CaptureFixture[str]):
    assert talk(f"{line}\n")[1] == []
    shown = capsys.readouterr().err
    assert "/save FILE" in shown
    assert ("There is no command /bey" in shown) == (line == "/bey")


def test_a_conversation_is_saved(talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    talk(f"first\n/save {tmp_path / 'talk.json'}\n/save {tmp_path / 'no' / 'folder'}\n/save ~nosuchuser/x\n/save\n")
    assert [m["role"] for m in json.loads((tmp_path / "talk.json").read_text())["messages"]] == ["user", "assistant"]
    shown = capsys.readouterr().err
    assert "Wrote 2 messages" in shown
    assert "Cannot write" in shown
    assert "~nosuchuser has no home folder on this host" in shown
    assert "Usage: /save FILE" in shown


@pytest.mark.parametrize(
    ("prompt", "piped", "whole"), [("Summarise:", "a text\n", "Summarise:\n\na text"), (None, "a text", "a text")]
)
def test_what_is_piped_in_follows_the_prompt(
    prompt: str | None, piped: str, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "piped").write_text(piped)
    with (tmp_path / "piped").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert chat.with_piped_text(prompt) == whole


def test_nothing_to_ask(monkeypatch: pytest.MonkeyPatch):
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        with pytest.raises(ConfigError, match="nothing to ask"):
            chat.with_piped_text(None)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://127.0.0.1:1/v1/"])
def test_the_base_url_of_openai_clients_is_taken(url: str):
    with pytest.raises(WorkerError, match=r"127\.0\.0\.1:1; start it with `penstock serve --port 1`"):
        chat.run(parse("--url", url, "hello"))


async def test_a_missing_key_is_said_as_elsewhere():
    async def script(exchange: Exchange) -> None:
        await exchange.plain(401, {"error": {"message": "no key"}})

    async with scripted(script) as server, HttpStreamClient(server.url) as client:
        with pytest.raises(ConfigError, match="wants a key: add --api-key KEY or set PENSTOCK_API_KEY"):
            await served_model(client, None)


def on_terminal(text: str, width: int, pieces: int = 3) -> list[str]:
    """The lines of a terminal of this width after the text came in pieces."""
    out = io.StringIO()
    wrapped = WrappedOutput(out, width)
    for start in range(0, len(text), pieces):
        wrapped.write(text[start : start + pieces])
    screen: list[list[str]] = [[]]
    for part in re.findall(r"\x1b\[\d+D|\x1b\[K|.|\n", out.getvalue(), re.DOTALL):
        if part == "\n":
            screen.append([])
        elif part.endswith("D") and part.startswith("\x1b"):
            del screen[-1][-int(part[2:-1]) :]
        elif part != "\x1b[K":
            screen[-1].append(part)
            assert len(screen[-1]) <= width
    return ["".join(line) for line in screen]


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_lines_break_between_words(pieces: int):
    text = "The fox went home through a forest.\nSupercalifragilistic end"
    assert on_terminal(text, 12, pieces) == [
        "The fox went",
        "home through",
        "a forest.",
        "Supercalifra",
        "gilistic end",
    ]


def test_a_file_gets_the_text_as_it_is():
    out = io.StringIO()
    WrappedOutput(out).write("word " * 100)
    assert out.getvalue() == "word " * 100
