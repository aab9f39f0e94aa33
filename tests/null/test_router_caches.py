"""The router knows what real workers have cached, whatever becomes of the messages."""

from __future__ import annotations

from penstock.config.limits import RoutingConfig
from penstock.config.schema import GatewayConfig
from penstock.hashing import block_hashes, chain_root

from .router_town import IDENTITY, WIDE, Town

BOTH = ("both-0", "both-1", "both-2")


def hits(town: Town, tokens: tuple[int, ...]) -> dict[str, int]:
    """Leading blocks of a prompt that the router believes each worker to have."""
    hashes = tuple(block_hashes(chain_root(IDENTITY), tokens))
    fleet = town.router.fleet
    return dict(zip(fleet.ids, town.router._placement.prefixes.hits(hashes, len(fleet)).tolist(), strict=True))


def truth(town: Town, tokens: tuple[int, ...]) -> dict[str, int]:
    """Leading blocks that each worker has."""
    hashes = tuple(block_hashes(chain_root(IDENTITY), tokens))
    found = {}
    for name in town.alive:
        prefix = town.worker(name).scheduler.memory.prefix
        found[name] = next((i for i, block in enumerate(hashes) if block not in prefix), len(hashes))
    return found


async def test_a_chat_goes_on_where_its_beginning_lies_answers_included():
    async with Town(*BOTH) as town:
        known: tuple[int, ...] = tuple(range(50))
        homes = set()
        for turn in range(4):
            client = town.ask(f"turn-{turn}", prompt=known, max_tokens=20)
            await town.finish(client)
            client.assert_true_answer()
            (decision,) = town.router.debug(client.request.id)
            homes.add(decision.stages[0].worker)
            cached = (len(known) - 5) // 16 * 16 if turn else 0
            assert client.batches[0].cached_tokens >= cached - 16
            known += (*client.tokens, turn, turn, turn, turn, turn)
        assert len(homes) == 1
        await town.wait(0.5)
        assert hits(town, known) == truth(town, known)
        assert town.router._placement.prefixes.gaps == 0
        await town.assert_idle()


async def test_both_legs_of_a_split_request_are_known_to_have_its_prompt():
    async with Town(*WIDE) as town:
        client = town.ask(prompt=64)
        await town.finish(client)
        await town.wait(0.5)
        prompt = client.request.prompt
        assert hits(town, prompt) == truth(town, prompt)
        assert sorted(truth(town, prompt).values()) == [0, 0, 4, 4]


async def test_eviction_and_restart_are_known():
    async with Town("both-0", "both-1", pages=8, max_model_len=128) as town:
        clients = [town.ask(f"r{i}", prompt=tuple(range(i, i + 64))) for i in range(8)]
        await town.finish()
        await town.wait(0.5)
        for client in clients:
            assert hits(town, client.request.prompt) == truth(town, client.request.prompt)
        town.kill("both-0")
        assert {hits(town, client.request.prompt)["both-0"] for client in clients} == {0}
        town.fork("both-0")
        await town.wait(0.5)
        again = town.ask("again", prompt=clients[0].request.prompt)
        await town.finish(again)
        await town.wait(0.5)
        assert hits(town, again.request.prompt) == truth(town, again.request.prompt)


async def test_a_prompt_waits_for_another_that_begins_alike_when_that_is_sooner():
    async with Town(*BOTH, max_chunk_tokens=16) as town:
        first = town.ask("first", prompt=128)
        for _ in range(7):  # a chunk is left, which is less than the whole beginning elsewhere
            await town.turn(0.03)
        second = town.ask("second", prompt=(*range(120), 7, 7, 7, 7, 7, 7, 7, 7, 7))
        await town.finish()
        assert (
            town.router.debug(first.request.id)[0].stages[0].worker
            == town.router.debug(second.request.id)[0].stages[0].worker
        )
        assert second.batches[0].cached_tokens == 112


async def test_round_robin_goes_round():
    config = GatewayConfig(name="g", routing=RoutingConfig(policy="round-robin", remembered_requests=2))
    async with Town(*BOTH, config=config) as town:
        homes = []
        for i in range(6):
            client = town.ask(f"r{i}", prompt=40)
            await town.finish(client)
            (told,) = town.router.routing_decisions(client.request.id)
            homes.append(told["legs"][0]["worker"])
            assert town.router.routing_decision_line(client.request.id).startswith(
                "policy=round-robin; why=whole; whole=both-"
            )
        assert sorted(homes[:3]) == sorted(BOTH)
        assert homes[3:] == homes[:3]
        assert town.router.routing_decisions(town.clients[0].request.id) == []
        assert town.router.routing_decision_line(town.clients[0].request.id) is None
