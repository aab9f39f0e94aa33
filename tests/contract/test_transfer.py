"""One suite for every page carrier, over the transport it is meant for."""

from __future__ import annotations

from transfer_rig import R, Rig

from penstock.kv.transfer.effects import FirstToken, Granted, PagesAdvanced, Released


def test_pages_arrive_identical_and_everything_is_released(rig: Rig) -> None:
    rig.expect([9, 8, 7], tokens=40)
    rig.until(lambda: True)
    rig.open()
    rig.until(lambda: bool(rig.granted))
    assert rig.granted == [Granted(R, 1)]
    for block, page in enumerate([30, 31, 32]):
        rig.offer(block, page, tokens=min(16, 40 - 16 * block))
    rig.until(lambda: bool(rig.advanced) and rig.advanced[-1].computed == 40)
    assert not rig.firsts
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    assert [rig.receiver_page(page) for page in (9, 8, 7)] == [rig.sender_page(page) for page in (30, 31, 32)]
    assert rig.firsts == [FirstToken(R, 1, rig.firsts[0].first)]
    assert rig.firsts[0].first.tokens == (42,)
    assert rig.released == [Released(R, 1, "received")]
    assert rig.advanced[-1] == PagesAdvanced(R, 1, 40)
    assert not rig.failed
    assert rig.all_free()
