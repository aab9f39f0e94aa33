"""Which models are in memory: by hand, and under random orders of everything that can happen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.catalog.residency import ModelResidency, ModelState, ResidentModel, StartModel, StopModel

L, U, C = ModelState.LOADED, ModelState.UNLOADED, ModelState.CLOSING


def house(budget: int | None = 100, **sizes: int) -> ModelResidency:
    pinned = {"p"}
    return ModelResidency.of([ResidentModel(name=n, nbytes=b, pinned=n in pinned) for n, b in sizes.items()], budget)


def load(models: ModelResidency, name: str, now: float = 0.0) -> None:
    assert models.request_model(name) == [StartModel(name)]
    models.on_loaded(name, now)


def test_a_model_is_started_once_however_many_want_it():
    models = house(a=50)
    assert models.request_model("a") == [StartModel("a")]
    assert models.request_model("a") == []
    assert models.state("a") is ModelState.LOADING
    assert models.on_loaded("a", 1.0) == []
    assert models.request_model("a") == []
    assert models.state("a") is L


def test_the_one_used_longest_ago_makes_room():
    models = house(a=50, b=50, c=50)
    load(models, "a", 1.0)
    load(models, "b", 2.0)
    models.on_request_started("a", 3.0)
    models.on_request_ended("a", 4.0)
    assert models.request_model("c") == [StopModel("b")]
    assert models.on_exited("b", "ended") == [StartModel("c")]
    assert [row["reason"] for row in models.rows()] == ["", "", ""]


def test_a_model_in_use_finishes_first_and_takes_nothing_new():
    models = house(a=80, b=80)
    load(models, "a")
    models.on_request_started("a", 1.0)
    assert models.request_model("b") == []
    assert models.state("a") is C
    assert models.request_model("a") == [], "who asks for it now waits behind b"
    assert models.on_request_ended("a", 2.0) == [StopModel("a")]
    assert models.on_exited("a", "") == [StartModel("b")]
    models.on_loaded("b", 3.0, promised=2)
    assert models.state("b") is L, "it is theirs who waited, before it goes for those who wait for a"
    assert models.on_request_started("b", 4.0) == []
    assert models.state("b") is L
    assert models.on_request_started("b", 5.0) == []
    assert models.state("b") is C
    assert models.on_request_ended("b", 6.0) == []
    assert models.on_request_ended("b", 7.0) == [StopModel("b")]


def test_an_idle_model_goes_before_one_in_use_and_a_pinned_one_never():
    models = house(p=20, a=40, b=40, c=40)
    for now, name in enumerate("pab"):
        load(models, name, now)
    models.on_request_started("a", 9.0)
    assert models.request_model("c") == [StopModel("b")]
    assert models.state("p") is L


def test_who_came_first_is_first():
    models = house(a=60, b=90, c=10)
    load(models, "a")
    models.on_request_started("a", 1.0)
    assert models.request_model("b") == []
    assert models.request_model("c") == [], "it would fit, and b would wait for ever"


def test_what_cannot_be_loaded_is_told_and_the_others_go_on():
    models = house(a=60, b=60)
    models.request_model("a")
    models.request_model("b")
    assert models.on_exited("a", "no such folder") == [StartModel("b")]
    assert models.rows()[0]["reason"] == "no such folder"
    assert models.state("a") is U


def test_an_operator_unloads_what_nobody_uses_at_once():
    models = house(None, a=1, b=1)
    load(models, "a")
    assert models.request_unload("a") == [StopModel("a")]
    assert models.request_unload("b") == []
    assert models.on_exited("a", "x") == []
    assert models.request_model("a") == [StartModel("a")]


NAMES = "pabcd"
moves = st.lists(
    st.tuples(st.sampled_from(["want", "unwant", "use", "end", "dismiss", "fail"]), st.sampled_from(NAMES))
)


@given(moves)
def test_memory_is_never_exceeded_and_nobody_waits_for_ever(script: list[tuple[str, str]]) -> None:
    sizes = {"p": 30, "a": 40, "b": 70, "c": 20, "d": 60}
    models, uses, now = house(**sizes), dict.fromkeys(NAMES, 0), 0.0
    running: dict[str, bool] = {}  # told to start; and to stop
    came: set[str] = set()  # was loaded; who waits for another may close it at once

    def do(effects: list[StartModel | StopModel]) -> None:
        for effect in effects:
            if isinstance(effect, StartModel):
                assert effect.name not in running
                running[effect.name] = False
                assert sum(sizes[name] for name in running) <= 100
            else:
                assert not uses[effect.name], "a running answer would be lost"
                assert running[effect.name] is False
                running[effect.name] = True

    def settle(fail: str = "") -> None:
        """Processes start and end, as told."""
        for name in list(running):
            if running[name] or name == fail:
                if uses[name]:
                    continue
                del running[name]
                do(models.on_exited(name, "ended"))
            elif models.state(name) is ModelState.LOADING:
                came.add(name)
                do(models.on_loaded(name, now))

    for what, name in script:
        now += 1.0
        if what == "want":
            do(models.request_model(name))
        elif what == "unwant":
            do(models.drop_request(name, last=True))
        elif what == "use" and models.state(name) is L:
            do(models.on_request_started(name, now))
            uses[name] += 1
        elif what == "end" and uses[name]:
            uses[name] -= 1
            do(models.on_request_ended(name, now))
        elif what == "dismiss":
            do(models.request_unload(name))
        settle(name if what == "fail" else "")
    for name in NAMES:
        while uses[name]:
            uses[name] -= 1
            do(models.on_request_ended(name, now))
    for name in "abcd":  # p is pinned and, once loaded, leaves room for each of these
        came.clear()
        do(models.request_model(name))
        for _ in range(12):
            settle()
        assert name in came or models.state(name) is L, name
        do(models.drop_request(name, last=True))
