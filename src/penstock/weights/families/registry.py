"""What a model family says about its checkpoints, and where families are found.

A family is a built-in one, or an installed package's: an entry point of the group ``penstock.models`` whose name is
the architecture (``config.json``'s ``architectures``) and whose object has the two attributes of ``ModelPlugin``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Protocol

from penstock.errors import ModelError
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families import bert, deepseek, gemma, glm, gpt, llama, llama_like, mistral, qwen, whisper
from penstock.weights.families.fields import at_length

PLUGIN_GROUP = "penstock.models"


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """How a family reads ``config.json`` and names its tensors."""

    parse: Callable[[ConfigFields], ModelSpec]  # raises ModelError for what the family cannot compute
    layout: Callable[[ModelSpec], WeightLayout]
    at_length: Callable[[ModelSpec, int], ModelSpec] = lambda spec, positions: spec
    """The model for contexts of at most ``positions`` positions, where that changes it (``RopeConfig.at_length``)."""


class ModelPlugin(Protocol):
    """What an entry point's object has."""

    checkpoint: CheckpointFormat
    build: Callable[..., Any]  # see engine.models.registry


def _decoder(
    parse: Callable[[ConfigFields], ModelSpec], layout: Callable[[ModelSpec], WeightLayout]
) -> CheckpointFormat:
    return CheckpointFormat(parse, layout, at_length)


DECODERS: Mapping[str, CheckpointFormat] = MappingProxyType(
    {
        "CohereForCausalLM": _decoder(llama_like.parse_cohere, llama_like.cohere_layout),
        "DeepseekV2ForCausalLM": _decoder(deepseek.parse_deepseek_v2, deepseek.deepseek_layout),
        "DeepseekV3ForCausalLM": _decoder(deepseek.parse_deepseek_v3, deepseek.deepseek_layout),
        "GPT2LMHeadModel": _decoder(gpt.parse_gpt2, gpt.gpt2_layout),
        "Gemma2ForCausalLM": _decoder(gemma.parse_gemma2, gemma.gemma2_layout),
        "Gemma3ForCausalLM": _decoder(gemma.parse_gemma3, gemma.gemma2_layout),
        "Gemma3ForConditionalGeneration": _decoder(gemma.parse_gemma3_with_images, gemma.gemma3_with_images_layout),
        "GemmaForCausalLM": _decoder(gemma.parse_gemma, gemma.gemma_layout),
        "Glm4ForCausalLM": _decoder(glm.parse_glm4, glm.glm_layout),
        "Glm4MoeForCausalLM": _decoder(glm.parse_glm4_moe, glm.glm4_moe_layout),
        "GlmForCausalLM": _decoder(glm.parse_glm, glm.glm_layout),
        "GptOssForCausalLM": _decoder(gpt.parse_gpt_oss, gpt.gpt_oss_layout),
        "KimiK25ForConditionalGeneration": _decoder(deepseek.parse_kimi_with_images, deepseek.kimi_with_images_layout),
        "Llama4ForCausalLM": _decoder(llama.parse_llama4_text, llama.llama4_layout),
        "Llama4ForConditionalGeneration": _decoder(llama.parse_llama4_with_images, llama.llama4_layout),
        "LlamaForCausalLM": _decoder(llama.parse_llama, llama.llama_layout),
        "MistralForCausalLM": _decoder(mistral.parse_mistral, mistral.mistral_layout),
        "MixtralForCausalLM": _decoder(mistral.parse_mixtral, mistral.mixtral_layout),
        "Olmo2ForCausalLM": _decoder(llama_like.parse_olmo2, llama_like.olmo_layout),
        "Olmo3ForCausalLM": _decoder(llama_like.parse_olmo3, llama_like.olmo_layout),
        "Phi3ForCausalLM": _decoder(llama_like.parse_phi3, llama_like.phi3_layout),
        "Qwen2VLForConditionalGeneration": _decoder(qwen.parse_qwen2_vl, qwen.qwen_vl_layout),
        "Qwen2_5_VLForConditionalGeneration": _decoder(qwen.parse_qwen25_vl, qwen.qwen_vl_layout),
        "Qwen2ForCausalLM": _decoder(qwen.parse_qwen2, qwen.qwen_layout),
        "Qwen3ForCausalLM": _decoder(qwen.parse_qwen3, qwen.qwen_layout),
        "Qwen3MoeForCausalLM": _decoder(qwen.parse_qwen3_moe, qwen.qwen3_moe_layout),
        "Qwen3NextForCausalLM": _decoder(qwen.parse_qwen3_next, qwen.qwen3_next_layout),
        "SmolLM3ForCausalLM": _decoder(llama_like.parse_smollm3, llama_like.smollm3_layout),
        "StableLmForCausalLM": _decoder(llama_like.parse_stablelm, llama_like.stablelm_layout),
    }
)
"""Families that ``engine.models.decoder`` computes."""

TRANSCRIBERS: Mapping[str, CheckpointFormat] = MappingProxyType(
    {"WhisperForConditionalGeneration": CheckpointFormat(whisper.parse_whisper, whisper.whisper_layout)}
)
"""Families that ``engine.models.whisper`` computes: they write what they hear."""

BUILT_IN: Mapping[str, CheckpointFormat] = MappingProxyType({**DECODERS, **TRANSCRIBERS})

_BERT = CheckpointFormat(bert.parse_bert, bert.bert_layout)
_ROBERTA = CheckpointFormat(bert.parse_roberta, bert.roberta_layout)
_XLM_ROBERTA = CheckpointFormat(bert.parse_xlm_roberta, bert.roberta_layout)

ENCODERS: Mapping[str, CheckpointFormat] = MappingProxyType(
    {
        "BertForSequenceClassification": _BERT,
        "BertModel": _BERT,
        "RobertaForSequenceClassification": _ROBERTA,
        "RobertaModel": _ROBERTA,
        "XLMRobertaForSequenceClassification": _XLM_ROBERTA,
        "XLMRobertaModel": _XLM_ROBERTA,
    }
)
"""Families that ``engine.models.encoder`` computes: they read, and write nothing."""

POOLING_DECODERS: Mapping[str, CheckpointFormat] = MappingProxyType(
    {
        f"{name}{end}": DECODERS[f"{name}ForCausalLM"]
        for name in ("Gemma", "Gemma2", "Llama", "Mistral", "Phi3", "Qwen2", "Qwen3")
        for end in ("ForSequenceClassification", "Model")
    }
)
"""Pooling decoders (``weights.pooling_config``): the architecture in their specification is the generating one's."""

SYNONYMS: Mapping[str, CheckpointFormat] = MappingProxyType(
    {"Kimi_K25ForConditionalGeneration": DECODERS["KimiK25ForConditionalGeneration"]}
)
"""What transformers calls an architecture whose makers call it otherwise."""

_KNOWN: Mapping[str, CheckpointFormat] = MappingProxyType({**POOLING_DECODERS, **ENCODERS, **SYNONYMS, **BUILT_IN})


def installed_plugin(architecture: str) -> ModelPlugin | None:
    """The family that an installed package offers for this architecture."""
    for point in entry_points(group=PLUGIN_GROUP, name=architecture):
        plugin: ModelPlugin = point.load()
        return plugin
    return None


def known_architectures() -> list[str]:
    """Architectures that can be served: built-in ones and those of installed packages."""
    return sorted({*_KNOWN, *(point.name for point in entry_points(group=PLUGIN_GROUP))})


def architecture_of(config: ConfigFields) -> str:
    """The one architecture that a ``config.json`` names.  Raises ModelError if it names none or several."""
    names = config.get("architectures", list, [])
    if len(names) != 1 or not isinstance(names[0], str):
        raise config.error(
            f"architectures must name one architecture, got {names!r}; "
            f"these can be served: {', '.join(known_architectures())}"
        )
    return names[0]


def _near(architecture: str) -> str:
    """Architectures of like names that can be served, and where all of them stand."""
    names = difflib.get_close_matches(architecture, known_architectures(), n=3)
    like = f"these of like names can: {', '.join(names)}; " if names else ""
    return f"{like}docs/models.md lists all {len(known_architectures())}"


def checkpoint_format(architecture: str, where: str) -> CheckpointFormat:
    """The format of an architecture.  Raises ModelError, beginning with ``where``, if there is none."""
    if architecture in _KNOWN:
        return _KNOWN[architecture]
    plugin = installed_plugin(architecture)
    if plugin is None:
        raise ModelError(f"{where}: the architecture {architecture!r} cannot be served; {_near(architecture)}")
    return plugin.checkpoint
