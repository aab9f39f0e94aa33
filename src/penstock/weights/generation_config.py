"""What ``generation_config.json`` suggests to sample by.  Knows nothing about requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

LEAST_TEMPERATURE = 1e-4
"""Above 0, which is greedy: single precision can divide by it."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the model's makers suggest; None: nothing.  Within what a request may ask for."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=2)] | None = None

    def words(self) -> str:
        """``temperature 0.7, top_p 0.9``; empty when nothing is suggested."""
        return ", ".join(
            f"{name} {value:g}" for name, value in msgspec.structs.asdict(self).items() if value is not None
        )


def sampling_defaults(values: Mapping[str, Any]) -> SamplingDefaults:
    """Of the file's content.  A value that no request may have is left out; a file that says ``do_sample: false``
    suggests nothing to sample by."""
    if values.get("do_sample") is False:
        return SamplingDefaults()
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(SamplingDefaults):
        try:
            found[field.name] = msgspec.convert(values.get(field.name), field.type)
        except msgspec.ValidationError:
            continue
    if 0 < (found.get("temperature") or 0) < LEAST_TEMPERATURE:
        del found["temperature"]
    return SamplingDefaults(**found)
