"""How long a step will take: a linear model, learned from the steps that were measured.

seconds = a + b * tokens + c * (query, key) pairs + d * positions that are drawn from.  Two things are tracked: how fast
the machine is, which others who use it change from one second to the next, by a scalar filter on the logarithm of the
measured over the predicted; and the four weights against each other, which are the model's and change slowly, by a
Kalman filter on what relative error is left (Ljung, System Identification, 2nd ed., 11.6).  So one measured step says
much about steps of another kind.  Pure: the seconds are given to it.  It knows neither layers nor machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

CostVector = tuple[float, float, float, float]

SCALE: CostVector = (1.0, 256.0, 262_144.0, 16.0)
"""Units of the four features: a step, and amounts of work that one step may well contain."""

PRIOR: CostVector = (1e-3, 64e-3, 1e-3, 1e-3)
"""Seconds for each unit, before anything was measured: slow, so that the first chunk on an unknown machine is short."""

NOISE = 0.05  # relative variance of a measured step at most, and before it is known
MIN_NOISE = 2e-3  # the same at least; a steady machine lets steps of nearly one length tell the weights apart
NOISE_SHARE = 0.05  # of the last step's in what is known of it
SPEED_DRIFT = 4e-3  # variance of the machine's speed, in its logarithm, from one step to the next
SPEED_VARIANCE = 64.0  # the same before anything was measured: the first step tells the speed
DRIFT = 2e-4  # relative variance of each weight's own walk in one step
WEIGHT_VARIANCE = 1.0  # each weight is within this many times its present value, then and at any time
MIN_WEIGHT_SHARE = 0.05  # of what the prior says at the machine's speed is any weight: nothing is for free
WARMUP_STEPS = 8  # for so long any surprise is believed: there is no knowledge to protect yet
MAX_SURPRISE = 4.0  # then; a process that was stopped for a minute teaches no more than a step of four times the length


@dataclass(slots=True)
class StepWork:
    """What one step computes."""

    tokens: int = 0
    pairs: int = 0  # query-key pairs of causal attention
    draws: int = 0  # positions whose logits are needed

    def add(self, start: int, count: int, draws: int) -> None:
        """``count`` tokens from position ``start``, with logits of ``draws`` of them."""
        self.tokens += count
        self.pairs += count * start + count * (count + 1) // 2
        self.draws += draws

    def vector(self) -> CostVector:
        """The four features, in units of ``SCALE``."""
        return (1.0, self.tokens / SCALE[1], self.pairs / SCALE[2], self.draws / SCALE[3])


SLOW_FLOPS = 10e9
"""Multiplications and additions a second of a machine that is slower than most."""

WEIGHTS_TOKENS = 8.0
"""Reading all weights takes as long as computing this many tokens; 1 to some hundred, by the machine."""


def cost_prior(parameters: int) -> CostVector:
    """What to expect of a model of this size before its first step: that the machine is slow.

    So the first chunk on any machine ends long before anybody takes the worker for stuck, and the second is right.
    """
    token_s = 2 * parameters / SLOW_FLOPS
    return (max(PRIOR[0], WEIGHTS_TOKENS * token_s), token_s * SCALE[1], PRIOR[2], max(PRIOR[3], token_s))


class StepCostModel:
    """Predicts and learns; weights are never negative."""

    def __init__(self, prior: CostVector = PRIOR) -> None:
        self._prior = prior
        self._weights = list(prior)
        self._speed_spread = SPEED_VARIANCE
        self._noise = NOISE
        self._spread = [[((WEIGHT_VARIANCE * prior[i]) ** 2 if i == j else 0.0) for j in range(4)] for i in range(4)]
        self.measured_steps = 0

    def predict(self, work: StepWork) -> float:
        """Seconds of one step."""
        _, tokens, pairs, draws = work.vector()
        a, b, c, d = self._weights
        return a + b * tokens + c * pairs + d * draws

    @property
    def rates(self) -> CostVector:
        """Seconds of a step, and of each token, (query, key) pair and draw in it."""
        step, token, pair, draw = (weight / unit for weight, unit in zip(self._weights, SCALE, strict=True))
        return step, token, pair, draw

    def affordable_tokens(self, work: StepWork, budget_s: float, start: int, *, draws_each: bool = False) -> int:
        """Tokens from position ``start`` that can be added to ``work`` within ``budget_s``; may be 0 or less."""
        left = budget_s - self.predict(work) - self._weights[3] / SCALE[3]
        each = self._weights[1] / SCALE[1] + (self._weights[3] / SCALE[3] if draws_each else 0.0)
        pair = self._weights[2] / SCALE[2]
        linear = max(each + pair * (start + 0.5), 1e-12)
        if left <= 0:
            return 0
        # the positive root of  pair/2 n^2 + linear n = left,  in the form that does not cancel
        return int(min(2 * left / (linear + sqrt(linear * linear + 2 * pair * left)), 1e9))

    def update(self, work: StepWork, seconds: float) -> None:
        """Take a measured step into account.  A step of no work teaches nothing."""
        if work.tokens == 0:
            return
        self.measured_steps += 1
        expected = max(self.predict(work), 1e-9)
        ratio = max(seconds / expected, 1e-9)
        if self.measured_steps > WARMUP_STEPS:
            ratio = min(ratio, MAX_SURPRISE)
        slower = self._learn_speed(ratio)
        self._learn_weights([value / (expected * slower) for value in work.vector()], ratio / slower)

    def _learn_speed(self, ratio: float) -> float:
        """All weights grow by what is returned, for a step that took ``ratio`` of what was foreseen."""
        gain = self._speed_spread / (self._speed_spread + NOISE)
        self._speed_spread = (1 - gain) * self._speed_spread + SPEED_DRIFT
        slower = exp(gain * log(ratio))
        self._weights = [weight * slower for weight in self._weights]
        for row in self._spread:
            for j in range(4):
                row[j] *= slower * slower
        return slower

    def _learn_weights(self, x: list[float], ratio: float) -> None:
        """``x``: the features by the predicted seconds; the step took ``ratio`` of those."""
        x0, x1, x2, x3 = x
        p0, p1, p2, p3 = self._prior
        speed = 1.0 / (p0 * x0 + p1 * x1 + p2 * x2 + p3 * x3)
        least = [MIN_WEIGHT_SHARE * speed * p for p in self._prior]
        self._drift([max(w, small) for w, small in zip(self._weights, least, strict=True)])
        w0, w1, w2, w3 = self._weights
        surprise = ratio - (w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3)
        px = [s0 * x0 + s1 * x1 + s2 * x2 + s3 * x3 for s0, s1, s2, s3 in self._spread]
        px0, px1, px2, px3 = px
        odd = min(surprise * surprise, NOISE)  # one step that is unlike the others teaches no more than a noisy one
        self._noise += NOISE_SHARE * (odd - self._noise)
        scale = max(self._noise, odd, MIN_NOISE) + (x0 * px0 + x1 * px1 + x2 * px2 + x3 * px3)
        self._weights = [
            max(w + p / scale * surprise, small) for w, p, small in zip(self._weights, px, least, strict=True)
        ]
        for i, row in enumerate(self._spread):
            for j in range(4):
                row[j] -= px[i] * px[j] / scale

    def _drift(self, sizes: list[float]) -> None:
        """The weights may have moved since.

        What the steps do not tell apart (tokens and draws of pure decoding) would grow without bound: it is capped.
        """
        spread = self._spread
        for i, size in enumerate(sizes):
            spread[i][i] += DRIFT * size * size
            most = WEIGHT_VARIANCE * size
            if spread[i][i] > most * most:
                shrink = most / sqrt(spread[i][i])
                for j in range(4):
                    spread[i][j] *= shrink
                    spread[j][i] *= shrink
