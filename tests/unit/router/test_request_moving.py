"""An answer that changes its worker in flight: which leg counts when."""

from __future__ import annotations

import pytest
from flight_words import D0, D1, P0, chosen, flying, item, said, started
from router_words import IDENTITY, ROOT, fleet_of, report, request
from tests.null.span_notes import SpanNotes

from penstock.config.limits import RoutingConfig
from penstock.router.decide import PlacementRequest, PlacementRules, choose_migration_target
from penstock.router.effects import AbortMigration, StageEnded, SubmitStage
from penstock.router.placement import Placement
from penstock.router.policy.baselines import NAMES, make_policy
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import RoutedRequest
from penstock.router.submission import build_migration_submit, recipient_of
from penstock.router.tracing import RequestSpans
from penstock.router.worker_load import ExpectedWork
from penstock.telemetry.registry import Metrics
from penstock.telemetry.spans import LEG, RETRY
from penstock.types import RequestStage, Role
from penstock.wire.gateway_messages import PageSource, ReturnReason

SOURCE = PageSource(worker=D0, incarnation=1, endpoint="memory://decode-0")


def writing() -> RoutedRequest:
    """``decode-0`` has written three tokens."""
    flight = started(flying())
    assert said(flight.on_tokens(item(1, 2, 3), D0, 1, 1.0)) == ["deliver 2 3", "cancel prefill-0 e1"]
    return flight


def moving() -> RoutedRequest:
    flight = writing()
    assert flight.can_migrate(D0, 1, 1)
    assert said(flight.begin_migration(chosen(RequestStage.DECODE, D1), SOURCE, ROOT, 2.0)) == [
        "send decode-1 decode e1"
    ]
    return flight


def test_who_joins_is_told_what_the_client_has_and_where_the_rest_is():
    flight = writing()
    (send,) = flight.begin_migration(chosen(RequestStage.DECODE, D1), SOURCE, ROOT, 2.0)
    assert isinstance(send, SubmitStage)
    submit = send.submit
    assert (submit.emitted, submit.pages_from, submit.joins, submit.epoch) == ((1, 2, 3), SOURCE, True, 1)
    assert submit.block_hashes == request().block_hashes


def test_the_first_word_of_who_joins_ends_who_wrote_before():
    flight = moving()
    assert said(flight.on_tokens(item(3, 4), D0, 1, 2.0)) == ["deliver 4"]
    assert said(flight.on_tokens(item(3, 4, 5), D1, 1, 2.0)) == ["cancel decode-0 e1", "deliver 5"]
    assert said(flight.on_tokens(item(5, 6), D1, 1, 2.0)) == ["deliver 6"]
    assert flight.on_returned(1, ReturnReason.HANDED_OVER, D0, 1, 2.0) == ()
    assert flight.can_migrate(D1, 1, 1)


def test_tokens_of_the_next_worker_wait_for_the_last_of_the_one_before():
    flight = moving()
    assert said(flight.on_tokens(item(4, 5), D1, 1, 2.0)) == ["cancel decode-0 e1"]
    assert said(flight.on_tokens(item(3, 4), D0, 1, 2.0)) == ["deliver 4", "deliver 5"]


@pytest.mark.parametrize("reason", ["queue_full", "too_long", "pages_lost: silent", "no Hello"])
def test_who_joins_in_vain_disturbs_nobody(reason: str):
    flight = moving()
    assert said(flight.on_returned(1, reason, D1, 1, 2.0)) == ["end decode-1 e1"]
    assert said(flight.on_tokens(item(3, 4), D0, 1, 2.0)) == ["deliver 4"]
    assert flight.can_migrate(D0, 1, 1)
    assert (D1, 1) in flight.placement_request(2.0).distrusted


def test_who_wrote_is_called_back_when_who_joins_dies():
    flight = moving()
    ended, recall = flight.on_worker_lost(D1, 1, "killed", 2.0)
    assert said((ended,)) == ["end decode-1 e1"]
    assert recall == AbortMigration(D0, 1, request().id, 1)


def test_when_who_wrote_dies_the_answer_is_submitted_anew():
    assert said(moving().on_worker_lost(D0, 1, "killed", 2.0)) == ["cancel decode-0 e1", "cancel decode-1 e1", "wait 2"]


def test_an_answer_that_was_handed_over_to_a_worker_that_dies_is_submitted_anew():
    flight = moving()
    assert said(flight.on_returned(1, ReturnReason.HANDED_OVER, D0, 1, 2.0)) == ["end decode-0 e1"]
    assert said(flight.on_worker_lost(D1, 1, "killed", 2.0)) == ["cancel decode-1 e1", "wait 2"]


def test_an_answer_moves_only_when_it_has_begun_and_nobody_has_come_for_it():
    assert not flying().can_migrate(D0, 1, 1)
    assert not writing().can_migrate(P0, 1, 1)
    assert not writing().can_migrate(D0, 1, 0)
    assert not writing().can_migrate(D0, 2, 1)
    assert not moving().can_migrate(D0, 1, 1)


def test_whoever_is_lost_on_its_way_to_an_answer_is_no_retry():
    notes, flight = SpanNotes(), writing()
    recorded = RequestSpans(notes, request(), 0.0)
    for effect in flight.begin_migration(chosen(RequestStage.DECODE, D1), SOURCE, ROOT, 2.0):
        recorded.on_effect(effect, 2.0)
    recorded.on_failure(
        (D1, 1), "unknown", flight.on_returned(0, "unknown", D1, 1, 2.0), 2.0
    )  # of an older epoch: ignored
    effects = flight.on_worker_lost(D1, 1, "killed", 3.0)
    assert any(isinstance(effect, AbortMigration) for effect in effects)
    recorded.on_failure((D1, 1), "killed", effects, 3.0)
    for effect in effects:
        recorded.on_effect(effect, 3.0)
    assert (notes.facts(RETRY, "reason"), notes.facts(LEG, "outcome")) == ([], ["killed"])
    recorded.on_effect(
        SubmitStage(
            D1,
            1,
            build_migration_submit(
                request(), 1, (1,), SOURCE, ROOT, to=recipient_of(chosen(RequestStage.DECODE, D1), IDENTITY), now=0.0
            ),
            5,
            ExpectedWork(tokens=5),
        ),
        4.0,
    )
    recorded.on_failure((D1, 1), "unknown", (), 4.0)
    recorded.on_effect(StageEnded(D1, 1, request().id, 1), 5.0)
    assert notes.facts(LEG, "outcome") == ["killed", "ended"]


@pytest.mark.parametrize("policy", NAMES)
def test_whoever_writes_and_is_not_the_same_may_go_on(policy: str):
    fleet = fleet_of("prefill-0", "decode-0", "decode-1", "both-0")
    ask = PlacementRequest(request=request(), emitted=3, identity=IDENTITY, avoid=frozenset({(D0, 1)}))
    how = PlacementRules(policy=make_policy(policy))
    decision = choose_migration_target(ask, fleet, PrefixIndex(64, 8), 0.0, how, write=8)
    (leg,) = decision.stages
    assert leg.stage is RequestStage.DECODE
    assert leg.worker in ("decode-1", "both-0")
    assert decision.reasons()
    for name in ("decode-1", "both-0"):
        assert fleet.on_report(report(name, hands_over=False), 0.0)
    assert choose_migration_target(ask, fleet, PrefixIndex(64, 8), 0.0, how, write=8).stages == ()


def test_who_has_a_leg_already_is_not_asked_to_join():
    """The reader of the prompt writes answers by now, and still holds pages for the writer, which is to stop."""
    fleet = fleet_of("prefill-0", "decode-0")
    assert fleet.on_report(report("prefill-0", role=Role.BOTH), 0.0)
    placement = Placement(RoutingConfig(), fleet, Metrics(model_name="m"), mixed_numerics=False)
    flight = started(flying())
    assert flight.can_migrate(D0, 1, 1)
    decision, _ = placement.choose_migration_target(flight, D0, 1, 1.0)
    assert decision.stages == ()
    assert said(flight.on_tokens(item(1, 2), D0, 1, 1.0)) == ["deliver 2", "cancel prefill-0 e1"]
    decision, _ = placement.choose_migration_target(flight, D0, 1, 1.0)
    assert [leg.worker for leg in decision.stages] == [P0]
