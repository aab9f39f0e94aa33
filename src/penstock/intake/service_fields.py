"""In which class a request wants to be served: ``service_tier`` in OpenAI's words, ``priority`` in vLLM's or in ours.

Knows nothing about headers, which go before these fields, nor about who may have which class.
"""

from __future__ import annotations

from penstock.errors import BadField, RequestError
from penstock.intake.fields import WRONG_TYPE, Fields
from penstock.types import ServiceClass

SERVICE_CLASS_FIELDS = frozenset({"service_tier", "priority"})

_TIERS = {
    "auto": None,  # as the key has it
    "default": ServiceClass.INTERACTIVE,
    "standard": ServiceClass.INTERACTIVE,
    "scale": ServiceClass.INTERACTIVE,
    "priority": ServiceClass.INTERACTIVE,
    "flex": ServiceClass.BATCH,
    "batch": ServiceClass.BATCH,
}
_NAMED = {service.name.lower(): service for service in ServiceClass}
_MOST = 1 << 31


def parse_service(fields: Fields) -> ServiceClass | None:
    """None when nothing is said.  Raises RequestError."""
    tier, own = _parse_tier(fields), _parse_priority(fields)
    if tier is not None and own is not None and tier is not own:
        raise RequestError(
            f"'service_tier' means {tier.name.lower()} here and 'priority' means {own.name.lower()}: leave one out.",
            param="priority",
            code="invalid_parameter_combination",
        )
    return tier if own is None else own


def _parse_tier(fields: Fields) -> ServiceClass | None:
    value = fields.raw("service_tier")
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadField("service_tier", got=value, want="a string", code=WRONG_TYPE)
    if value not in _TIERS:
        raise BadField("service_tier", got=value, want=f"one of {', '.join(_TIERS)}")
    return _TIERS[value]


def _parse_priority(fields: Fields) -> ServiceClass | None:
    """A class by its name; or a number as vLLM's, of which lower ones go first: above 0 is batch work."""
    value = fields.raw("priority")
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _NAMED:
            raise BadField("priority", got=value, want=f"one of {', '.join(_NAMED)}, or an integer")
        return _NAMED[value]
    if type(value) is not int or not -_MOST <= value < _MOST:
        raise BadField("priority", got=value, want=f"one of {', '.join(_NAMED)}, or an integer", code=WRONG_TYPE)
    return ServiceClass.BATCH if value > 0 else ServiceClass.INTERACTIVE
