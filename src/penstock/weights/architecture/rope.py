"""Rotary positions (RoPE, arXiv:2104.09864): the recipe of their frequencies, and how a ``config.json`` writes it.

Scalings are those of Hugging Face transformers.  A recipe is fixed before the first token: where its makers let the
length of a prompt choose (LongRoPE), the longest context that is served chooses once, so one prompt has one answer.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.weights.architecture.spec import ModelDetails
from penstock.weights.config_json import ConfigFields

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class LinearRopeScaling(ModelDetails, frozen=True, kw_only=True, tag="Linear"):
    """Positions are divided by ``factor`` (arXiv:2306.15595)."""

    factor: float

    attention_factor = 1.0

    def of(self, plain: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
        """The frequencies instead of ``plain``."""
        return plain / self.factor


class Llama3RopeScaling(ModelDetails, frozen=True, kw_only=True, tag="Llama3"):
    """Short wavelengths stay, long ones are divided by ``factor``, those in between are blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    attention_factor = 1.0

    def of(self, plain: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
        """The frequencies instead of ``plain``."""
        turns = self.original_max_positions * plain / (2 * math.pi)  # within the original context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return plain * (kept + (1.0 - kept) / self.factor)


class YarnRopeScaling(ModelDetails, frozen=True, kw_only=True, tag="Yarn"):
    """Columns that turn often within the original context stay, those that hardly turn are divided by ``factor``, a
    ramp over the column's number blends the others (arXiv:2309.00071)."""

    factor: float
    original_max_positions: int
    attention_factor: float  # cos and sin are multiplied by it
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ramp begins and ends at whole columns

    def of(self, plain: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
        """The frequencies instead of ``plain``."""
        columns = 2 * len(plain)

        def column_of(turns: float) -> float:
            return columns * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = column_of(self.beta_fast), column_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, columns - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
        blended: NDArray[np.float64] = plain / self.factor * ramp + plain * (1.0 - ramp)
        return blended


class LongRopeScaling(ModelDetails, frozen=True, kw_only=True, tag="LongFactors"):
    """Every frequency has a divisor of its own, one list for contexts up to the original length, another beyond
    (arXiv:2402.13753)."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_positions: int
    attention_factor: float
    is_long: bool

    def of(self, plain: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
        """The frequencies instead of ``plain``."""
        stretched: NDArray[np.float64] = plain / np.array(self.long if self.is_long else self.short, np.float64)
        return stretched


class MropeSections(ModelDetails, frozen=True, kw_only=True, tag="Axes"):
    """Multi-axis positions (M-RoPE, arXiv:2409.12191): a token of an image has three positions (frame, row and
    column), each followed by ``pairs[i]`` pairs of columns.  Text has the same position three times, which is plain
    RoPE."""

    pairs: tuple[int, int, int]

    attention_factor = 1.0

    def of(self, plain: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
        """The frequencies instead of ``plain``."""
        return plain

    @property
    def of_pairs(self) -> tuple[int, ...]:
        """Each pair's axis."""
        return tuple(axis for axis, count in enumerate(self.pairs) for _ in range(count))


class RopeConfig(ModelDetails, frozen=True, kw_only=True, tag="Rope"):
    """The first ``columns`` of every head are rotated, in pairs (i, i + columns / 2) or, interleaved, (2i, 2i + 1)."""

    theta: float
    columns: int  # even
    interleaved: bool = False
    scaling: LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling | MropeSections | None = None

    def inv_freq(self) -> NDArray[np.float64]:
        """Radians a position for each pair of columns; [columns / 2]."""
        exponents = np.arange(0, self.columns, 2, dtype=np.float64) / self.columns
        plain: NDArray[np.float64] = self.theta**-exponents
        return plain if self.scaling is None else self.scaling.of(plain, self.theta)

    @property
    def axes(self) -> tuple[int, ...] | None:
        """Which of a token's three positions each pair of columns follows, where they differ."""
        return self.scaling.of_pairs if isinstance(self.scaling, MropeSections) else None

    @property
    def attention_factor(self) -> float:
        """cos and sin are multiplied by it."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def at_length(self, positions: int) -> RopeConfig:
        """The same recipe for contexts of at most ``positions`` positions."""
        if not isinstance(self.scaling, LongRopeScaling):
            return self
        is_long = positions > self.scaling.original_max_positions
        return msgspec.structs.replace(self, scaling=msgspec.structs.replace(self.scaling, is_long=is_long))

    def positions(self, configured: int) -> int:
        """The model's context: YaRN's makers leave the original one in ``max_position_embeddings``."""
        if not isinstance(self.scaling, YarnRopeScaling):
            return configured
        return max(configured, int(self.scaling.original_max_positions * self.scaling.factor))


def rope_section(config: ConfigFields) -> ConfigFields:
    """``rope_parameters`` (transformers 5) or ``rope_scaling``; empty if the file has neither."""
    section = config.section("rope_scaling") or config.section("rope_parameters") or ConfigFields({}, config.where)
    if any(isinstance(value, dict) for value in section.values.values()):
        raise section.error("differs from layer to layer; one recipe for all layers can be served here")
    return section


def parse_rope(
    config: ConfigFields,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    section: ConfigFields | None = None,
    interleaved: bool = False,
) -> RopeConfig:
    """The recipe in ``section`` (by default ``rope_section``), with the fall-backs of transformers.

    Raises ModelError for a scaling that is not known, or whose numbers make no sense.
    """
    section = rope_section(config) if section is None else section
    partial = section.positive_float("partial_rotary_factor", config.positive_float("partial_rotary_factor", 1.0))
    columns = int(head_dim * partial)
    if partial > 1 or columns < 2 or columns % 2:
        raise section.error(f"partial_rotary_factor {partial} of heads of {head_dim} is no even number of columns")
    return RopeConfig(
        theta=section.positive_float("rope_theta", config.positive_float("rope_theta", theta)),
        columns=columns,
        interleaved=interleaved,
        scaling=_parse_scaling(config, section, columns),
    )


def parse_two_ropes(config: ConfigFields, head_dim: int, *, near: float, far: float) -> tuple[RopeConfig, RopeConfig]:
    """Recipes of layers with a window and of those without, each with a section of its own (transformers 5), or by
    these bases where the file has none; a scaling that is not in a section is that of the layers without a window.

    Raises ModelError as ``parse_rope``.
    """
    sections = config.section("rope_parameters") or ConfigFields({}, config.where)
    local = (sections.section("sliding_attention") or ConfigFields({}, config.where)).with_defaults(
        {"rope_theta": near}
    )
    return (
        parse_rope(config, head_dim, section=local),
        parse_rope(config, head_dim, theta=far, section=sections.section("full_attention")),
    )


def _parse_scaling(
    config: ConfigFields, section: ConfigFields, columns: int
) -> LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling | MropeSections | None:
    name = section.get("rope_type", str, section.get("type", str, "default"))
    match name:
        case "default" | "mrope" if section.has("mrope_section"):
            return _parse_axes(section, columns // 2)
        case "default":
            return None
        case "dynamic":  # stretched only beyond max_position_embeddings, and no longer context is served
            section.positive_float("factor")
            return None
        case "linear":
            return LinearRopeScaling(factor=section.positive_float("factor"))
        case "longrope" | "su" | "yarn" if section.has("short_factor"):  # old files of Phi-3 have other names for it
            return _parse_long(config, section, columns // 2)
        case "llama3":
            return _parse_llama3(config, section)
        case "yarn":
            return _parse_yarn(config, section)
        case "longrope":
            raise section.error("has no short_factor")
    raise section.error(f"rope_type {name!r} cannot be served; these can: {', '.join(ROPE_TYPES)}")


def _parse_axes(section: ConfigFields, pairs: int) -> MropeSections:
    counts = section.get("mrope_section", list)
    if len(counts) != 3 or not all(type(count) is int and count >= 0 for count in counts) or sum(counts) != pairs:
        raise section.error(f"mrope_section must be three numbers of pairs of columns, {pairs} in all, got {counts!r}")
    if section.get("mrope_interleaved", bool, False):
        raise section.error("mrope_interleaved is true; only axes one after another can be served")
    return MropeSections(pairs=(counts[0], counts[1], counts[2]))


def _original(config: ConfigFields, section: ConfigFields) -> int:
    """The context before it was stretched; the value outside the section wins, as in Phi-3."""
    inside = section.positive_int(
        "original_max_position_embeddings", config.positive_int("max_position_embeddings", 2048)
    )
    return config.positive_int("original_max_position_embeddings", inside)


def _parse_llama3(config: ConfigFields, section: ConfigFields) -> Llama3RopeScaling:
    low, high = section.positive_float("low_freq_factor"), section.positive_float("high_freq_factor")
    if high <= low:
        raise section.error(f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return Llama3RopeScaling(
        factor=section.positive_float("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_original(config, section),
    )


def _parse_yarn(config: ConfigFields, section: ConfigFields) -> YarnRopeScaling:
    original = _original(config, section)
    factor = section.positive_float("factor", config.positive_int("max_position_embeddings", 2048) / original)
    fast, slow = section.positive_float("beta_fast", 32.0), section.positive_float("beta_slow", 1.0)
    if fast < slow:
        raise section.error(f"beta_fast ({fast}) must not be below beta_slow ({slow})")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = section.positive_float("mscale", 1.0), 0.0
    if section.values.get("mscale") and section.values.get("mscale_all_dim"):
        denominator = section.positive_float("mscale_all_dim")
    else:
        numerator = 1.0
    return YarnRopeScaling(
        factor=factor,
        original_max_positions=original,
        attention_factor=section.positive_float("attention_factor", mscale(numerator) / mscale(denominator)),
        beta_fast=fast,
        beta_slow=slow,
        truncate=section.get("truncate", bool, True),
    )


def _parse_long(config: ConfigFields, section: ConfigFields, pairs: int) -> LongRopeScaling:
    original, positions = _original(config, section), config.positive_int("max_position_embeddings")
    factor = section.positive_float("factor", positions / original)
    if original < 2:
        raise section.error(f"original_max_position_embeddings must be at least 2, got {original}")
    stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short=_divisors(section, "short_factor", pairs),
        long=_divisors(section, "long_factor", pairs),
        original_max_positions=original,
        attention_factor=section.positive_float("attention_factor", stretch),
        is_long=positions > original,
    )


def _divisors(section: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    values = section.get(name, list)
    if len(values) != count:
        raise section.error(f"{name} must have {count} numbers, one a pair of rotated columns, not {len(values)}")
    if not all(type(value) in (int, float) and 0 < value < math.inf for value in values):
        raise section.error(f"{name} must hold positive numbers only")
    return tuple(float(value) for value in values)
