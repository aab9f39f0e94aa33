"""Workers of two numerics classes behind one router: an answer stays in its class unless the operator lets it go on."""

from __future__ import annotations

from penstock.config.schema import GatewayConfig
from penstock.types import ModelIdentity

from .router_town import Client, Town
from .worker_stage import IDENTITY

OTHER_CLASS = ModelIdentity(fingerprint=IDENTITY.fingerprint, numerics="null-2")
OTHER_MODEL = ModelIdentity(fingerprint="e" * 64, numerics=IDENTITY.numerics)
MIXED = GatewayConfig(name="g", model_name="null", allow_mixed_numerics=True)


async def half_an_answer(town: Town, other: ModelIdentity) -> Client:
    """An answer of ``both-0`` that has lost it in its middle; ``both-1``, which stands ready, is another."""
    town.fork("both-1", identity=other)
    await town.turn()
    client = town.ask(max_tokens=12)
    await town.until(lambda: len(client.tokens) >= 4)
    town.kill("both-0")
    return client


async def it_waits_for_its_own(town: Town, client: Client) -> None:
    for _ in range(50):
        await town.turn()
    assert not client.over
    town.fork("both-0")
    await town.finish()
    client.assert_true_answer()


async def test_an_answer_waits_for_its_own_class():
    async with Town("both-0") as town:
        client = await half_an_answer(town, OTHER_CLASS)
        await it_waits_for_its_own(town, client)
        assert {decision.identity for decision in town.router.debug(client.request.id)} == {IDENTITY}


async def test_where_it_is_allowed_another_class_goes_on_with_it():
    async with Town("both-0", config=MIXED) as town:
        client = await half_an_answer(town, OTHER_CLASS)
        await town.finish()
        client.assert_true_answer()
        decisions = town.router.debug(client.request.id)
        assert [decision.identity for decision in decisions] == [IDENTITY, OTHER_CLASS]
        await town.assert_idle()


async def test_another_model_never_does():
    async with Town("both-0", config=MIXED) as town:
        client = await half_an_answer(town, OTHER_MODEL)
        await it_waits_for_its_own(town, client)
