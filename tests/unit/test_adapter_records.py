"""Names of adapters as processes merge them: the same in any order, bounded, and one change at a time at their home."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from penstock import adapter_records
from penstock.adapter_records import AdapterRecord, AdapterRecords


def record(name: str = "fox", version: int = 1, content: str = "a", **fields: Any) -> AdapterRecord:
    given = {"folder": f"/adapters/{content}", "nbytes": 9, "rank": 2} | fields
    return AdapterRecord(name=name, version=version, fingerprint=content * 64, **given)


def test_processes_that_hear_the_same_in_any_order_know_the_same() -> None:
    said = [
        record(version=version, content=content, loaded=loaded)
        for version in (1, 2, 3)
        for content in "abc"
        for loaded in (True, False)
    ]
    known = set()
    for seed in range(50):
        heard = random.Random(seed).sample(said, len(said))
        process = AdapterRecords()
        for one in heard:
            process.add((one,))
        known.add(process.find("fox"))
        assert process.add(heard) == ()
    assert known == {record(version=3, content="c")}


def test_of_two_changes_that_know_the_same_the_home_accepts_the_first() -> None:
    home = AdapterRecords()
    assert home.change(record(content="a")) == record(content="a")
    assert home.change(record(content="b")) == record(content="a")
    assert home.change(record(version=2, content="b")) == record(version=2, content="b")
    assert home.change(record(version=2, content="c", loaded=False)) == record(version=2, content="b")
    assert home.change(record(version=7, content="c")) == record(version=7, content="c"), "the home had missed some"


def test_names_that_were_unloaded_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_records, "MAX_ADAPTER_RECORDS", 4)
    process = AdapterRecords()
    process.add([record(str(number)) for number in range(4)])
    assert process.change(record("new")) is None
    process.add((record("2", version=2, loaded=False),))
    assert process.change(record("new")) == record("new")
    assert [known.name for known in process.all()] == ["0", "1", "3", "new"]


@pytest.mark.parametrize(
    "field",
    [{"name": ""}, {"name": "x" * 257}, {"version": 0}, {"version": 1 << 50}, {"fingerprint": "../" * 20},
     {"folder": "relative"}, {"folder": "/" * 5000}, {"nbytes": -1}, {"rank": 0}, {"loaded": 1}],
)  # fmt: skip
def test_what_cannot_be_is_refused(field: dict[str, Any]) -> None:
    plain = msgspec.to_builtins(record())
    assert msgspec.convert(plain, AdapterRecord) == record()
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain | field, AdapterRecord)
