"""The heartbeat: when a worker says that its step should end."""

from __future__ import annotations

from penstock.launch.heartbeat import HeartbeatTable, HeartbeatWriter


def test_a_beat_says_when_the_step_should_end() -> None:
    now_ns = 0
    (slot,) = HeartbeatTable(1).slots
    pulse = HeartbeatWriter(slot, lambda: 7, lambda: now_ns)
    for now_s, predicted_s in ((1.0, 0.5), (1.6, 0.0)):
        now_ns = int(now_s * 1e9)
        pulse.beat(predicted_s)
        beat = slot.read()
        assert (beat.beat_s, beat.predicted_end_s, beat.steps) == (now_s, now_s + predicted_s, 7)
