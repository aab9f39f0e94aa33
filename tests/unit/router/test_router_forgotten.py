"""A worker that is idle against the book has lost what was sent to it; one that is merely late has not."""

from __future__ import annotations

from types import SimpleNamespace

from penstock.router.forgotten import FORGOTTEN_S, Forgotten


def fleet(*, running: int = 0, queued: int = 0, work: tuple[str, ...] = ("a",), heard: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(
        reports=[SimpleNamespace(running=running, queued=queued)],
        incarnations=[1],
        heard=[heard],
        work=lambda slot: work,
    )


def test_an_idle_worker_with_work_in_the_book_has_lost_it():
    forgotten = Forgotten()
    assert forgotten.look(fleet(heard=0.0), 0.0) == []
    assert forgotten.look(fleet(heard=1.0), 1.0) == []
    assert forgotten.look(fleet(heard=FORGOTTEN_S), FORGOTTEN_S) == [(0, ("a",))]


def test_a_worker_that_took_it_up_or_got_more_has_time_again():
    for other in (fleet(running=1), fleet(queued=1), fleet(work=()), fleet(work=("a", "b"))):
        forgotten = Forgotten()
        forgotten.look(fleet(), 0.0)
        assert forgotten.look(other, 1.0) == []
        assert forgotten.look(fleet(heard=2.0), 2.0) == []


def test_a_worker_that_has_said_nothing_since_is_not_judged():
    forgotten = Forgotten()
    forgotten.look(fleet(heard=0.0), 0.0)
    assert forgotten.look(fleet(heard=0.0), 10.0) == []
