from __future__ import annotations

import argparse
import asyncio
import io
import os
import signal
from typing import Any

import pytest
from scripted_server import Exchange, scripted, usage_chunk

from penstock.cli import chat
from penstock.cli.chat import Chat, printable, wait_until_ready
from penstock.cli.http_stream import HttpStreamClient
from penstock.errors import PenstockError, WorkerError


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
        talk = Chat(
            client=client, model="teller", fields={"seed": 1}, messages=[{"role": "system", "content": "short"}]
        )
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
        talk = Chat(client=client, model="teller", fields={}, messages=[])
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
            talk = Chat(client=client, model="teller", fields={})
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
        talk = Chat(client=client, model="m", fields={})
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


def test_questions_come_from_standard_input_when_none_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A whole conversation in one loop: the server runs in the runner's own loop."""
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\n/new\nsecond\n"))
    with asyncio.Runner() as runner:
        scene = scripted(story)
        server = runner.run(scene.__aenter__())
        client = HttpStreamClient(server.url)
        chat.converse(runner, Chat(client=client, model="teller", fields={}))
        client.close()
        runner.run(scene.__aexit__(None, None, None))
    assert [len(asked.body["messages"]) for asked in server.asked] == [1, 1]
    shown = capsys.readouterr()
    assert shown.out.count("Once upon a time") == 2
    assert shown.err.count("tokens, first after") == 2
