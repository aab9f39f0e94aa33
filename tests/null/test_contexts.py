"""Workers of one model with contexts of their own, as hosts with other memory have them: no answer is cut short."""

from __future__ import annotations

import pytest

from penstock.config.limits import RoutingConfig
from penstock.config.schema import GatewayConfig
from penstock.errors import RequestError
from penstock.types import FinishReason

from .router_town import Client, Town

LARGE, SMALL = 256, 64


async def unequal(town: Town) -> None:
    town.fork("both-0", max_model_len=LARGE, pages=160)
    town.fork("both-1", max_model_len=SMALL)
    await town.wait(0.5)


def writers(town: Town, client: Client) -> list[str]:
    """Who has written an answer, in order."""
    decisions = town.router.debug(client.request.id)
    return [decision.decode.worker for decision in decisions if decision.decode is not None]


def expecting(tokens: int) -> GatewayConfig:
    return GatewayConfig(name="g", model_name="null", routing=RoutingConfig(expected_answer_tokens=tokens))


async def test_an_answer_of_a_named_length_is_written_where_it_fits() -> None:
    async with Town() as town:
        await unequal(town)
        long = [town.ask(f"l{i}", prompt=(i, *range(39)), max_tokens=60) for i in range(6)]
        short = [town.ask(f"s{i}", prompt=(i, *range(39)), max_tokens=20) for i in range(6)]
        await town.finish()
        for client in town.clients:
            client.assert_true_answer()
        assert {name for client in long for name in writers(town, client)} == {"both-0"}
        assert "both-1" in {name for client in short for name in writers(town, client)}
        aside = [
            r.explanation for d in town.router.debug(long[0].request.id) for r in d.reasons() if r.worker == "both-1"
        ]
        assert aside == ["has a context of 64 tokens, and 100 are wanted"]
        await town.assert_idle()


@pytest.mark.parametrize("moves", [True, False])
async def test_one_of_no_named_length_begins_at_a_small_worker_and_goes_on_at_a_larger_one(moves: bool) -> None:
    """With its pages where they can move, computed anew where they cannot; it is the same answer."""
    async with Town(config=expecting(10)) as town:
        await unequal(town)
        if not moves:
            town.worker("both-1").mailbox._config = town.worker("both-1").mailbox._config.__class__(
                **_fields(town.worker("both-1").mailbox._config) | {"transfers_pages": False}
            )
        clients = [
            town.ask(f"r{i}", prompt=(i, *range(39)), max_tokens=LARGE - 40, open_ended=True, seed=i) for i in range(6)
        ]
        await town.finish(turns=6000)
        for client in clients:
            client.assert_true_answer()
            assert len(client.tokens) == LARGE - 40
        began_small = [client for client in clients if writers(town, client)[0] == "both-1"]
        assert began_small, "a small worker does not stand idle"
        assert all(writers(town, client)[1:] == ["both-0"] for client in began_small)
        again = town.router.metrics.exposition().decode()
        resubmitted = 0 if moves else len(began_small)
        assert f'penstock:resubmissions_total{{model_name="null"}} {resubmitted}.0' in again
        await town.assert_idle()


async def test_one_of_no_named_length_ends_with_the_longest_context_there_is() -> None:
    async with Town("both-0", config=expecting(10), max_model_len=SMALL) as town:
        client = town.ask(prompt=40, max_tokens=LARGE - 40, open_ended=True)
        await town.finish()
        assert client.error is None
        assert client.tokens == client.truth()[: SMALL - 40]
        assert client.finish is FinishReason.LENGTH
        await town.assert_idle()


async def test_it_waits_for_a_larger_worker_that_is_away() -> None:
    async with Town(config=expecting(10)) as town:
        await unequal(town)
        town.kill("both-0")
        client = town.ask(prompt=40, max_tokens=LARGE - 40, open_ended=True)
        named = town.ask("named", prompt=40, max_tokens=60)
        await town.until(lambda: len(client.tokens) == SMALL - 40)
        await town.wait(0.5)
        assert not client.over
        assert not named.over
        town.fork("both-0", max_model_len=LARGE, pages=160)
        await town.finish(turns=6000)
        client.assert_true_answer()
        named.assert_true_answer()
        await town.assert_idle()


@pytest.mark.parametrize("open_ended", [True, False])
async def test_what_fits_nowhere_is_refused_in_words(open_ended: bool) -> None:
    async with Town("both-0", max_model_len=SMALL) as town:
        client = town.ask(prompt=SMALL if open_ended else 40, max_tokens=60, open_ended=open_ended)
        await town.finish()
        assert isinstance(client.error, RequestError)
        assert "The longest context of any worker is 64 tokens." in str(client.error)


async def test_a_split_answer_of_no_named_length_moves_to_a_decode_worker_with_more_room() -> None:
    async with Town("prefill-0", config=expecting(10), max_model_len=LARGE) as town:
        town.fork("decode-0", max_model_len=SMALL)
        await town.wait(0.5)
        client = town.ask(prompt=40, max_tokens=LARGE - 40, open_ended=True)
        await town.until(lambda: len(client.tokens) > 2)
        town.fork("decode-1", max_model_len=LARGE)
        await town.finish(turns=6000)
        client.assert_true_answer()
        assert writers(town, client) == ["decode-0", "decode-1"]
        await town.assert_idle()


async def test_a_prompt_that_nobody_can_read_is_refused_though_its_answer_could_be_written() -> None:
    async with Town() as town:
        town.fork("prefill-0", max_model_len=32)
        town.fork("decode-0", max_model_len=LARGE)
        await town.wait(0.5)
        short, long = town.ask("short", prompt=31, max_tokens=40), town.ask("long", prompt=40, max_tokens=4)
        await town.finish(long, turns=100)
        assert isinstance(long.error, RequestError)
        assert "32 tokens" in str(long.error)
        await town.finish(short)
        short.assert_true_answer()


async def test_what_it_may_become_counts_as_what_is_expected() -> None:
    async with Town("both-0", config=expecting(10), max_model_len=LARGE) as town:
        town.ask(prompt=40, max_tokens=LARGE - 40, open_ended=True)
        await town.settle()
        assert town.router.fleet.load == [50]


def _fields(config: object) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}  # type: ignore[attr-defined]
