"""A fleet whose prompts are read in one numerics class and whose answers are written in another, behind one router.

The runner of these workers writes into every token's place who computed it, and insists before each step that prompts
are the readers' and answers the writers': whatever happens, nobody computes what is the other's.
"""

from __future__ import annotations

import pytest

from penstock.config.schema import GatewayConfig
from penstock.hashing import block_hashes, chain_root
from penstock.types import ModelIdentity, RequestId, SamplingParams, ValidRequest, pack_token_ids

from .router_town import Client, Town
from .worker_stage import IDENTITY, WINDOWED

MIXED = ModelIdentity(fingerprint=IDENTITY.fingerprint, numerics="null-gpu>null-1")
FLEET = ("prefill-0", "decode-0", "decode-1")
ALLOWED = GatewayConfig(name="g", model_name="null", allow_mixed_numerics=True)


def fleet(**more: object) -> Town:
    """Its workers are forked by ``begin``."""
    return Town(config=ALLOWED, **more)


async def begin(town: Town, **scheduler: int) -> None:
    for name in FLEET:
        town.fork(name, identity=MIXED, **scheduler)
    await town.turn()


def ask(town: Town, prompt: tuple[int, ...] = tuple(range(40)), *, name: str = "r", tokens: int = 24) -> Client:
    hashes = tuple(block_hashes(chain_root(MIXED), prompt))
    sampling = SamplingParams(seed=7, max_tokens=tokens)
    return town.serve(
        ValidRequest(
            id=RequestId(name),
            prompt=pack_token_ids(prompt),
            block_hashes=hashes,
            sampling=sampling,
            arrival=town.clock.now(),
        )
    )


def writers(town: Town, client: Client) -> list[str]:
    """Who has this answer now."""
    return [n for n in town.alive if n.startswith("decode") and town.worker(n).scheduler.get_request(client.request.id)]


def writer(town: Town, client: Client) -> str:
    (name,) = writers(town, client)
    return name


@pytest.mark.parametrize("layout", [None, WINDOWED], ids=["whole", "windows"])
@pytest.mark.parametrize("dies", ["writer", "reader", "both"])
async def test_an_answer_goes_on_and_each_token_stays_who_computed_it(layout, dies: str):
    async with fleet(**({} if layout is None else {"layout": layout})) as town:
        await begin(town)
        client = ask(town, tokens=40)
        await town.until(lambda: len(client.tokens) >= 18)
        if dies != "reader":
            town.kill(writer(town, client))
        if dies != "writer":
            town.kill("prefill-0")
            town.fork("prefill-0", identity=MIXED)
        await town.finish()
        client.assert_true_answer()
        decisions = town.router.debug(client.request.id)
        assert {decision.identity for decision in decisions} == {MIXED}
        placed = sum(bool(decision.stages) for decision in decisions)
        assert placed == 1 if dies == "reader" else placed > 1
        await town.assert_idle()


async def test_an_answer_that_dies_again_and_again_ends_as_it_should():
    async with fleet() as town:
        await begin(town)
        client = ask(town, tokens=60)
        for reached in (1, 2, 17, 33, 50):
            await town.until(lambda reached=reached: len(client.tokens) >= reached and writers(town, client))
            name = writer(town, client)
            town.kill(name)
            town.fork(name, identity=MIXED)
        await town.finish()
        client.assert_true_answer()
        await town.assert_idle()


async def test_a_reader_dies_in_the_middle_of_a_prompt():
    """Some of its pages are at the writer already; who comes after it hands over the prompt, and nobody else reads."""
    async with fleet() as town:
        await begin(town, max_chunk_tokens=16)
        client = ask(town, tuple(range(160)))
        sender = town.worker("prefill-0").sender
        await town.until(lambda: client.tokens or sender.acknowledged_pages(client.request.id, 1))
        assert not client.tokens
        town.kill("prefill-0")
        town.fork("prefill-0", identity=MIXED)
        await town.finish()
        client.assert_true_answer()
        assert len(town.router.debug(client.request.id)) > 1
        await town.assert_idle()


async def test_what_was_written_is_read_anew_when_it_comes_back_as_a_prompt():
    async with fleet() as town:
        await begin(town)
        first = ask(town, tokens=40)
        await town.finish()
        again = ask(town, (*range(40), *first.tokens, *range(500, 530)), name="next", tokens=24)
        await town.finish()
        again.assert_true_answer()
        same = ask(town, name="same", tokens=40)
        await town.finish()
        assert same.tokens == first.tokens
        await town.assert_idle()


async def test_a_writer_that_leaves_hands_its_answers_to_another():
    async with fleet() as town:
        await begin(town)
        client = ask(town, tokens=60)
        await town.until(lambda: len(client.tokens) >= 20)
        await town.retire(writer(town, client))
        await town.finish()
        client.assert_true_answer()
        assert client.error is None
        await town.assert_idle()


async def test_a_batch_in_too_little_memory_keeps_to_it():
    async with fleet() as town:
        await begin(town, pages=10, max_model_len=128)
        clients = [ask(town, tuple(range(9 * n, 9 * n + 40)), name=f"r{n}", tokens=40) for n in range(5)]
        await town.finish(turns=20_000)
        for client in clients:
            client.assert_true_answer()
        await town.assert_idle()


async def test_one_token_is_the_readers_and_the_last_one_of_an_answer_is_not():
    async with fleet() as town:
        await begin(town)
        alone = ask(town, name="one", tokens=1)
        await town.finish()
        alone.assert_true_answer()
        client = ask(town, tokens=20)
        await town.until(lambda: len(client.tokens) >= 19)
        if not client.over:
            town.kill(writer(town, client))
        await town.finish()
        client.assert_true_answer()


async def test_slow_pages_are_waited_for():
    """A decode worker of any other fleet would compute them itself."""
    async with fleet(lease_s=10.0) as town:
        await begin(town)
        client = ask(town, tokens=12)
        for _ in range(3):
            await town.turn()
        town.stop("prefill-0")
        await town.wait(0.6)
        town.wake("prefill-0")
        await town.finish()
        client.assert_true_answer()
        outrun = [town.worker(name).receiver.counters.outrun for name in town.alive]
        assert sum(outrun) == 0
