"""Gently: a prompt that is very long is read in small pieces beside the answers that it would make stutter.

A step may be as long as its budget, and a prompt that fills steps up to it makes every answer that slow for as long as
it is read.  For most prompts that is a moment.  One that takes more than twice the target for a first token
(``SchedulerConfig.long_prompt_ms``) even with the worker to itself takes longer instead: ``r ** 3`` times as long as
alone, when that is ``2 * r`` targets; no more than ``MOST_TIMES``, nor than one share of the step for it and one for
each answer allow, nor than may be waited: ``SchedulerConfig.gentle_read_s``, or half of what is left of a deadline.
One that has begun its answer is read again at full speed: a client sees each second of that.
Who begins after it is not kept: its pieces leave most of each step to others.  Should it fall behind, or should no
answer be written, it has as much of a step as there is.  So it always ends in time, and nothing idles.

Pure; knows one request and what the answers in a step take, and neither pages nor the queue.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.config.limits import LONG_PROMPT
from penstock.engine.core.request import Request

MOST_TIMES = 8.0
"""As long as alone at most: answers then take a seventh longer meanwhile."""


class Beside(NamedTuple):
    """What is in the step already, and when it begins."""

    answers: int
    answers_s: float  # predicted seconds of a step with them alone
    now: float


class Bounds(NamedTuple):
    """What is long, and how long that may take."""

    target_s: float  # for a first token
    most_s: float  # nothing takes longer for being read gently


def piece_s(request: Request, left_s: float, beside: Beside, bounds: Bounds) -> float:
    """Seconds of a step that may go to this prompt; ``left_s``: what reading the rest of it takes.  May be inf.

    Notes in the request when it is to be read, the first time that this is asked with answers in the step.
    """
    if not beside.answers or not bounds.target_s or request.rank or request.output:
        return math.inf
    if request.read_by is None:
        times = min((left_s / (LONG_PROMPT * bounds.target_s)) ** 3, MOST_TIMES, 1.0 + beside.answers)
        may_s = bounds.most_s
        if request.deadline is not None:
            may_s = min(may_s, (request.deadline - beside.now) / 2)
        request.read_by = beside.now + min(left_s * times, may_s) if times > 1.0 else 0.0
    over_s = request.read_by - beside.now
    return beside.answers_s * left_s / (over_s - left_s) if over_s > left_s else math.inf
