"""The system's count of kills for want of memory, and which deaths it explains."""

from __future__ import annotations

from penstock.launch.fork_server import OOM_KILL_WINDOW_S, OomKillLog


class Count:
    def __init__(self) -> None:
        self.value = 7

    def __call__(self) -> int:
        return self.value


def test_looks_between_the_kill_and_the_death_do_not_hide_it() -> None:
    count = Count()
    kills = OomKillLog(0.0, count)
    kills.sample(0.1)
    count.value += 1
    for step in range(20):
        kills.sample(0.2 + step / 10)
    assert kills.claim_kill()


def test_a_kill_explains_one_death_and_two_kills_two() -> None:
    count = Count()
    kills = OomKillLog(0.0, count)
    assert not kills.claim_kill()
    count.value += 1
    kills.sample(0.1)
    assert kills.claim_kill()
    assert not kills.claim_kill()
    count.value += 2
    kills.sample(0.2)
    assert [kills.claim_kill() for _ in range(3)] == [True, True, False]


def test_a_kill_after_one_that_is_explained_counts_however_old_the_looks() -> None:
    count = Count()
    kills = OomKillLog(0.0, count)
    count.value += 1
    kills.sample(0.1)
    assert kills.claim_kill()
    kills.sample(0.1 + OOM_KILL_WINDOW_S)
    count.value += 1
    assert kills.claim_kill()


def test_a_kill_of_long_ago_explains_nothing() -> None:
    count = Count()
    kills = OomKillLog(0.0, count)
    count.value += 1
    kills.sample(1.0)
    kills.sample(1.5 + OOM_KILL_WINDOW_S)
    assert not kills.claim_kill()
