"""Who gets which cores, for machines that nobody here has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.cpu_cores import (
    SHARED_PREFILL_NICENESS,
    CoreAssignment,
    CoreSettings,
    WorkerRoles,
    assign_cores,
    format_cpus,
    parse_cpus,
)
from penstock.config.facts import PhysicalCore
from penstock.errors import ConfigError
from penstock.types import Role, WorkerId


def cores(count: int, *, nodes: int = 1, siblings: int = 1) -> list[PhysicalCore]:
    """Numbered as Linux does: all first threads, then all second ones; equal nodes."""
    return [
        PhysicalCore(cpus=tuple(i + count * s for s in range(siblings)), numa_node=i * nodes // count)
        for i in range(count)
    ]


def fleet(prefill: int, decode: int) -> WorkerRoles:
    return tuple(
        (WorkerId(f"{role.value}-{i}"), role)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        for i in range(count)
    )


def division(
    machine: list[PhysicalCore], places: WorkerRoles | None = None, usable: int | None = None, **wishes: object
) -> CoreAssignment:
    made = CoreSettings(**wishes)  # type: ignore[arg-type]
    return assign_cores(places or fleet(1, 1), machine, len(machine) if usable is None else usable, made)


def loans(made: CoreAssignment) -> list[list[tuple[str, int, str]]]:
    return [[(loan.lender, loan.cores, format_cpus(loan.cpus)) for loan in share.loans] for share in made.shares]


def test_a_laptop_gives_each_worker_a_core_and_the_other_on_loan() -> None:
    made = division(cores(2))
    assert [(s.threads, s.cpus, s.niceness, s.lent_cores) for s in made.shares] == [(1, (), 0, 1)] * 2
    assert loans(made) == [[("decode-0", 1, "")], [("prefill-0", 1, "")]]
    assert (made.numa_nodes, made.notes) == ((), ())


def test_the_second_threads_of_a_core_stay_with_the_first() -> None:
    made = division(cores(8, siblings=2))
    assert [(s.threads, format_cpus(s.cpus)) for s in made.shares] == [(4, "0-3,8-11"), (4, "4-7,12-15")]
    assert loans(made) == [[("decode-0", 4, "4-7,12-15")], [("prefill-0", 4, "0-3,8-11")]]


def test_workers_stay_within_a_node() -> None:
    made = division(cores(24, nodes=2), fleet(1, 2))
    assert [format_cpus(s.cpus) for s in made.shares] == ["0-7", "12-19", "8-11,20-23"]
    assert made.numa_nodes == (0, 1)
    assert made.notes == (
        "NUMA nodes: prefill-0 on 0; decode-0 on 1; decode-1 on 0-1; weights are interleaved over all",
    )
    assert [format_cpus(s.cpus) for s in division(cores(24, nodes=2), fleet(2, 2)).shares] == [
        "0-5",
        "6-11",
        "12-17",
        "18-23",
    ]


def test_one_core_is_shared_and_decode_goes_first() -> None:
    made = division(cores(1))
    assert [(s.threads, s.niceness, s.lent_cores, s.loans) for s in made.shares] == [
        (1, SHARED_PREFILL_NICENESS, 0, ()),
        (1, 0, 0, ()),
    ]
    assert made.notes == ("prefill and decode share cores: decode has priority",)


def test_one_worker_has_all_and_lends_nothing() -> None:
    made = division(cores(4), ((WorkerId("both-0"), Role.BOTH),))
    assert [(s.threads, s.niceness, s.loans) for s in made.shares] == [(4, 0, ())]


def test_a_quota_leaves_fewer_cores_and_no_places() -> None:
    made = division(cores(64), usable=16)
    assert [(s.threads, s.cpus, s.lent_cores) for s in made.shares] == [(8, (), 8)] * 2


def test_no_lending_when_told() -> None:
    assert all(not s.loans and not s.lent_cores for s in division(cores(8), lend=False).shares)


def test_threads_as_asked_limit_what_is_lent() -> None:
    made = division(cores(16), threads=2)
    assert [(s.threads, s.lent_cores) for s in made.shares] == [(2, 2)] * 2
    assert [s.lent_cores for s in division(cores(2), threads=3).shares] == [1, 1]


def test_listed_cores_are_pinned_and_divided() -> None:
    made = division(cores(8), fleet(2, 1), prefill_cpus="0-3", decode_cpus="4-6")
    assert [(s.threads, format_cpus(s.cpus)) for s in made.shares] == [(2, "0-1"), (2, "2-3"), (3, "4-6")]
    assert loans(made)[2] == [("prefill-0", 2, "0-1"), ("prefill-1", 2, "2-3")]


def test_one_list_leaves_the_rest_to_the_other_role() -> None:
    assert [format_cpus(s.cpus) for s in division(cores(8), decode_cpus="0-1").shares] == ["2-7", "0-1"]
    everything = division(cores(8), decode_cpus="0-7")
    assert [(format_cpus(s.cpus), s.niceness) for s in everything.shares] == [
        ("0-7", SHARED_PREFILL_NICENESS),
        ("0-7", 0),
    ]


def test_shared_cores_are_nobodys_to_lend() -> None:
    made = division(cores(6), prefill_cpus="0-3", decode_cpus="2-5")
    assert [(s.niceness, s.lent_cores) for s in made.shares] == [(SHARED_PREFILL_NICENESS, 2), (0, 2)]
    assert loans(made) == [[("decode-0", 2, "4-5")], [("prefill-0", 2, "0-1")]]
    assert made.notes == ("prefill and decode share cores: decode has priority",)


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "0-", "1;2", "²"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--decode-cores .*expected a list of processors such as 0-3,8"):
        parse_cpus(text, "--decode-cores")


def test_processors_that_are_not_ours_are_named() -> None:
    with pytest.raises(ConfigError, match=r"--prefill-cores 2-5: this process may use processors 0-3, not 4-5"):
        division(cores(4), prefill_cpus="2-5")


@given(st.sets(st.integers(0, 300), min_size=1))
def test_lists_are_read_as_they_are_shown(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus), "--decode-cores") == cpus


@given(
    count=st.integers(1, 40),
    nodes=st.integers(1, 4),
    siblings=st.integers(1, 2),
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    lend=st.booleans(),
)
def test_no_core_has_two_owners_where_there_are_enough(
    count: int, nodes: int, siblings: int, prefill: int, decode: int, lend: bool
) -> None:
    places = fleet(prefill, decode)
    made = division(cores(count, nodes=nodes, siblings=siblings), places, lend=lend)
    owned = [cpu for share in made.shares for cpu in share.cpus]
    assert len(owned) == len(set(owned))
    assert sum(share.threads for share in made.shares) <= max(count, len(places))
    for (worker, _), share in zip(places, made.shares, strict=True):
        assert share.threads + sum(loan.cores for loan in share.loans) <= max(count, 1)
        assert worker not in {loan.lender for loan in share.loans}
