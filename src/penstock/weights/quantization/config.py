"""``quantization_config`` of a ``config.json``: which format, for which modules; and the tensors that are stored in it.

What is stored decides whether a matrix is coded; the configuration says how codes are read, and must not deny them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import msgspec

from penstock.weights.config_json import ConfigFields
from penstock.weights.quantization import compressed_tensors, fp8_mxfp4, gptq_awq
from penstock.weights.quantization.base import (
    EVERY_LINEAR,
    QuantizationScheme,
    QuantizedTensor,
    StoredModule,
    StoredTensors,
    module_pattern,
)
from penstock.weights.quantization.compressed_tensors import PackedIntScheme
from penstock.weights.quantization.fp8_mxfp4 import EightBitScheme, Mxfp4Scheme
from penstock.weights.quantization.gptq_awq import AwqScheme, GptqScheme

CONFIG_FIELD = "quantization_config"
OLD_FIELD = "compression_config"
TEXT = "text_config"

UNUSED = re.compile(r".*\.(?:k_scale|v_scale|q_scale|prob_output_scale|kv_cache_scale|[kv]_proj\.output_scale)")
"""Tensors about a quantized KV cache: pages keep the compute type, or codes whose scales each row makes for itself
(docs/gpu.md)."""

AnyScheme = EightBitScheme | PackedIntScheme | GptqScheme | AwqScheme | Mxfp4Scheme


class QuantizationGroup(msgspec.Struct, frozen=True):
    """Modules that are stored alike: names and patterns, see ``base.module_pattern``."""

    targets: tuple[str, ...]
    scheme: AnyScheme


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's matrices are stored."""

    method: str  # as config.json calls it
    groups: tuple[QuantizationGroup, ...]
    ignored: tuple[str, ...] = ()  # modules that are not quantized
    activations: str = ""  # what its makers do to activations, which is not done here

    @property
    def name(self) -> str:
        """The format's name, for messages."""
        scheme = self.groups[0].scheme
        match scheme:
            case EightBitScheme():
                return "fp8" if scheme.kind == "e4m3" else "int8"
            case PackedIntScheme():
                return f"int{scheme.code_bits}"
            case GptqScheme():
                return f"gptq-int{scheme.code_bits}"
            case AwqScheme():
                return "awq-int4"
            case Mxfp4Scheme():
                return "mxfp4"

    def scheme_of(self, module: str) -> AnyScheme | None:
        """A module's scheme, by the configuration alone; None if it is not quantized."""
        if self.is_ignored(module):
            return None
        return next((group.scheme for group in self.groups if _targets(group.targets, module)), None)

    def is_ignored(self, module: str) -> bool:
        """Whether the list of unconverted modules names it."""
        pattern = _pattern(self.ignored)
        return pattern is not None and pattern.match(module) is not None

    def found_in(self, stored: StoredTensors) -> dict[str, QuantizedTensor]:
        """Every tensor of the model that is stored as codes, by its name in the model.  Reads no numbers.

        Raises ModelError for tensors that do not fit one another, or the configuration.
        """
        known = frozenset(stored.names)
        schemes = {group.scheme.end: group.scheme for group in self.groups}
        found: dict[str, QuantizedTensor] = {}
        for name in stored.names:
            for end, scheme in schemes.items():
                if name.endswith(end) and (end != EightBitScheme.end or stored.info(name).dtype in scheme.types):
                    module = StoredModule(stored, known, name.removesuffix(end))
                    tensor, coded = self._own_scheme(module, end).find_tensor(module)
                    found[tensor] = coded
        return found

    def _own_scheme(self, module: StoredModule, end: str) -> QuantizationScheme:
        if self.is_ignored(module.name):
            raise module.error(end, "is quantized, and quantization_config names its module as one that is not")
        own = self.scheme_of(module.name)
        if own is None or own.end != end:
            raise module.error(end, "is quantized, and no group of quantization_config targets it in this form")
        return own


def _targets(targets: tuple[str, ...], module: str) -> bool:
    if EVERY_LINEAR in targets:
        return True
    pattern = _pattern(targets)
    return pattern is not None and pattern.match(module) is not None


@cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str] | None:
    return module_pattern(names, CONFIG_FIELD)


SINGLE: Mapping[str, Callable[[ConfigFields], tuple[QuantizationScheme, str]]] = MappingProxyType(
    {
        "fp8": fp8_mxfp4.parse_fp8,
        "fbgemm_fp8": fp8_mxfp4.parse_fbgemm_fp8,
        "gptq": gptq_awq.parse_gptq,
        "awq": gptq_awq.parse_awq,
        "mxfp4": fp8_mxfp4.parse_mxfp4,
    }
)
"""Methods that have one scheme for all modules, by ``quant_method``."""

MANY = "compressed-tensors"
METHODS = (*SINGLE, MANY)


def parse_quantization(config: ConfigFields) -> Quantization | None:
    """What ``config.json`` says, also of the text part of a model with more; None for plain weights.

    Raises ModelError for methods and variants that cannot be served.
    """
    stored = config.section(CONFIG_FIELD)
    if stored is None and (text := config.section(TEXT)) is not None:
        stored = text.section(CONFIG_FIELD)
    if stored is None:
        if config.has(OLD_FIELD):
            raise config.error(f"{OLD_FIELD}: a form of before 2024; files with {CONFIG_FIELD} can be served")
        return None
    method = stored.get("quant_method", str, "")
    if method not in METHODS:
        raise stored.error(f"quant_method {method!r} is not known; {', '.join(METHODS)} can be served")
    groups: list[tuple[tuple[str, ...], QuantizationScheme]]
    if method == MANY:
        groups, activations = compressed_tensors.parse_compressed_tensors(stored)
    else:
        scheme, activations = SINGLE[method](stored)
        groups = [(_converted(stored), scheme)]
    found = tuple(QuantizationGroup(targets, scheme) for targets, scheme in groups)  # type: ignore[arg-type]
    ignored = _names(stored, "modules_to_not_convert") or _names(stored, "ignored_layers") or _names(stored, "ignore")
    ignored += tuple(f"re:{name[2:]}" for name in stored.get("dynamic", dict, {}) if str(name).startswith("-:"))
    for names in (ignored, *(targets for targets, _ in groups)):
        module_pattern(names, stored.where)
    return Quantization(method=method, groups=found, ignored=ignored, activations=activations)


def _converted(stored: ConfigFields) -> tuple[str, ...]:
    """The modules that GPTQ's files may list; everything for others."""
    listed = stored.get("modules_in_block_to_quantize", list, [])
    return tuple(str(name) for names in listed for name in (names if isinstance(names, list) else [names])) or (
        EVERY_LINEAR,
    )


def _names(stored: ConfigFields, field: str) -> tuple[str, ...]:
    names = stored.get(field, list, [])
    if not all(isinstance(name, str) for name in names):
        raise stored.error(f"{field} must hold names of modules")
    return tuple(names)
