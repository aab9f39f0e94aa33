"""What the tests of law 1 with real processes share: the plainest answers, and the same ones in too little memory, in a
batch, from the cache, and with a worker that dies in the middle.

Knows no model and no topology: a test gives the flags of its services.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .server import PenstockServer
from .streams import Answer, all_answers, make_client, stream_completion
from .varied import CROWD_PROMPT, crowd, varied_requests

ROOMS = {"roomy": "128MiB", "tight": "4MiB"}
"""KV memory of the bundled model; tight: 128 pages, one full context, so that a batch cannot stay together."""

ANSWER = 48
"""Tokens of a varied answer."""

TRUSTING = "[failover]\nsilence_s = 60.0\nstill_s = 60.0\n"
"""Nobody is taken for dead who is only slow: what is asked again finds its own pages."""

CROWDS = 6
"""How often the crowd comes at most."""

GUESSES = 4
"""How often the crowd comes one by one at most, until a draft token was right."""


@dataclass(frozen=True)
class Plain:
    """The answers of one worker, to one request at a time, from nothing, with whole prompts."""

    varied: list[dict[str, Any]]
    crowd_bodies: list[dict[str, Any]]
    crowd: list[dict[str, Any]]


def plain_answers(
    flags: Sequence[str],
    *,
    length: int = ANSWER,
    crowd_prompt: int = CROWD_PROMPT,
    environ: Mapping[str, str] | None = None,
) -> Plain:
    """Of a service of its own; ``length``: of the varied answers at most; ``crowd_prompt``: see ``crowd``."""
    flags = [*flags, "--aggregated", "--kv-memory", ROOMS["roomy"]]
    with (
        tempfile.TemporaryDirectory() as folder,
        PenstockServer(flags, config=TRUSTING, environ=environ, folder=Path(folder)) as server,
    ):
        bodies = varied_requests(max_tokens=length, salt="plain", salt_each=True)
        answers = asyncio.run(all_answers(server.url, bodies, together=False))
        bodies_of_crowd = crowd(crowd_prompt)
        crowded = asyncio.run(all_answers(server.url, bodies_of_crowd, together=False))
    assert all(answer.cached_tokens == 0 for answer in answers if len(answer.choices) == 1)
    return Plain([answer.identical for answer in answers], bodies_of_crowd, [answer.identical for answer in crowded])


LEFT = 20
"""Tokens that an answer must still have before it when its worker is killed: it takes a moment to die."""


KILLS = 8
"""How often a kill is tried: on a busy machine a client may read its third token when the last one was written."""


@dataclass
class Killer:
    """Kills the workers that write answers, once, after a token was delivered and long before the last one."""

    victims: list[int]  # pids
    lengths: list[int]  # tokens of each undisturbed answer
    signum: int = signal.SIGKILL
    after_tokens: int = 3
    killed_at: dict[int, int] = field(default_factory=dict)  # tokens that each stream had at that moment
    answers: dict[int, Answer] = field(default_factory=dict)

    def watch(self, number: int):
        def on_chunk(answer: Answer) -> None:
            self.answers[number] = answer
            had = len(answer.times)
            if self.killed_at or had < self.after_tokens or self.lengths[number] < had + LEFT or _finished(answer):
                return
            for pid in self.victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, self.signum)
            self.killed_at = {n: len(a.times) for n, a in self.answers.items() if not _finished(a)}

        return on_chunk

    @property
    def hit_an_answer(self) -> bool:
        """In its middle."""
        return any(0 < had < len(self.answers[n].times) for n, had in self.killed_at.items())


def _finished(answer: Answer) -> bool:
    return any(choice.finish for choice in answer.choices.values())


def the_worker(worker: dict[str, Any]) -> int:
    """Its process, or the leader of its ranks."""
    return int(worker["pid"])


def a_follower(worker: dict[str, Any]) -> int:
    """A rank of the worker that does not lead."""
    return int(next(rank["pid"] for rank in worker["ranks"] if rank["pid"] != worker["pid"]))


async def answers_with_a_kill(
    server: PenstockServer,
    bodies: list[dict[str, Any]],
    plain: list[dict[str, Any]],
    *,
    together: bool,
    victim: Callable[[dict[str, Any]], int] = the_worker,
    signum: int = signal.SIGKILL,
) -> list[Answer]:
    """All answers, while the worker that decodes dies once (alone: in the middle of the first long one)."""
    lengths = [answer["completion_tokens"] for answer in plain]
    async with make_client() as client:
        for _ in range(KILLS):
            await asyncio.to_thread(server.wait_all_ready)
            victims = [victim(worker) for worker in server.workers() if worker["role"] in ("both", "decode")]
            killer = Killer(victims, lengths, signum)
            streams = [
                stream_completion(client, server.url, body, on_chunk=killer.watch(number))
                for number, body in enumerate(bodies)
            ]
            answers = await asyncio.gather(*streams) if together else [await stream for stream in streams]
            if killer.hit_an_answer:
                return answers
            compare(answers, plain, "no answer was hit")
    raise AssertionError(f"no kill hit an answer in its middle; the last: {killer.killed_at}")


def compare(answers: list[Answer], plain: list[dict[str, Any]], where: str) -> None:
    for number, (answer, wanted) in enumerate(zip(answers, plain, strict=True)):
        assert answer.identical == wanted, f"{where}: request {number} was answered differently"


def crowd_until_somebody_gives_way(server: PenstockServer, plain: Plain, where: str) -> None:
    """The crowd's answers, again while none was preempted: on a busy machine one may have ended before the other
    begins."""
    for _ in range(CROWDS):
        compare(asyncio.run(all_answers(server.url, plain.crowd_bodies, together=True)), plain.crowd, where)
        server.wait_idle()
        if server.metrics()["penstock:num_preemptions_total"] > 0:
            return


def guess_until_some_are_right(server: PenstockServer, plain: Plain) -> None:
    """First and alone: a full batch has no time for drafts, and guessing that was seldom right is switched off."""
    for number in range(GUESSES):
        answers = asyncio.run(all_answers(server.url, plain.crowd_bodies, together=False))
        compare(answers, plain.crowd, f"guess {number}")
        metrics = server.metrics()
        drafts, right = (metrics[f"penstock:spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted"))
        if 0 < right < drafts:
            return
    raise AssertionError(f"{right:g} of {drafts:g} draft tokens were right in {GUESSES} rounds")


def assert_it_took_place(server: PenstockServer, *, split: bool, tight: bool) -> None:
    """Rows shared steps, pages travelled, somebody was preempted where room was short, and nothing leaked."""
    server.wait_idle()
    server.wait_counted("engine_multi_row_steps_total")
    server.wait_counted("resubmissions_total")
    if split:
        server.wait_counted("kv_transfer_pages_total")
    if tight:
        server.wait_counted("num_preemptions_total")
    assert all(worker["kv_pages_leaked"] == 0 for worker in server.workers())


def assert_same_in_a_crowd(server: PenstockServer, plain: Plain, where: str, *, length: int = ANSWER) -> None:
    """In a batch, with a kill, then from the cache, and crowded; the service's memory is too little for that."""
    for kill in (True, False):
        bodies = varied_requests(max_tokens=length, salt=f"{where} kill={kill}")
        if kill:
            answers = asyncio.run(answers_with_a_kill(server, bodies, plain.varied, together=True))
            compare(answers, plain.varied, f"{where}, with a kill")
        compare(asyncio.run(all_answers(server.url, bodies, together=True)), plain.varied, f"{where} kill={kill}")
    crowd_until_somebody_gives_way(server, plain, f"{where}, crowded")
    assert_it_took_place(server, split="--aggregated" not in server.flags, tight=True)
