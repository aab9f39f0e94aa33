"""BERT (arXiv:1810.04805) with MiniLM, BGE, E5 and GTE, and RoBERTa (arXiv:1907.11692) with XLM-R: ``config.json`` and
tensor names."""

from __future__ import annotations

from penstock.weights.architecture import encoder
from penstock.weights.architecture.encoder import NO_KV, EncoderConfig, EncoderTensorNames
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import MAX_HEAD_DIM, layer_count, parse_activation, refuse_true, refuse_variants

BERT = EncoderTensorNames(model="bert.")
ROBERTA = EncoderTensorNames(model="roberta.", dense="classifier.dense", score="classifier.out_proj", own_dense=True)


def parse_bert(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    return _parse(config, "bert", first_position=0)


def parse_roberta(config: ConfigFields) -> ModelSpec:
    """As ``parse_bert``."""
    return _parse(config, "roberta", first_position=_behind_padding(config))


def parse_xlm_roberta(config: ConfigFields) -> ModelSpec:
    """As ``parse_bert``."""
    return _parse(config, "xlm-roberta", first_position=_behind_padding(config))


def bert_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``encoder_layout``)."""
    return encoder.encoder_layout(spec, BERT, EncoderTensorNames(model=""))


def roberta_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``encoder_layout``)."""
    return encoder.encoder_layout(spec, ROBERTA, EncoderTensorNames(model=""))


def _behind_padding(config: ConfigFields) -> int:
    """The table's rows up to the padding token's are that token's."""
    return config.get("pad_token_id", int, 1) + 1


def _parse(config: ConfigFields, model_type: str, *, first_position: int) -> ModelSpec:
    refuse_variants(config, model_type)
    refuse_true(config, "is_decoder", "add_cross_attention")
    kind = config.get("position_embedding_type", str, "absolute")
    if kind != "absolute":
        raise config.error(f"position_embedding_type is {kind!r}; only 'absolute' can be served")
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
    head_dim, rest = divmod(hidden, heads)
    if rest or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise config.error(
            f"hidden_size ({hidden}) must be num_attention_heads ({heads}) times an even number up to {MAX_HEAD_DIM}"
        )
    positions = config.positive_int("max_position_embeddings", 512)
    if not 0 <= first_position < positions:
        raise config.error(f"max_position_embeddings ({positions}) leaves no position behind pad_token_id")
    layers = layer_count(config, "num_hidden_layers")
    return ModelSpec(
        architecture=config.get("architectures", list)[0],
        vocab=config.positive_int("vocab_size"),
        hidden=hidden,
        layers=layers,
        kv=NO_KV,
        max_positions=positions - first_position,
        tied=True,
        details=EncoderConfig(
            layers=layers,
            heads=heads,
            head_dim=head_dim,
            intermediate=config.positive_int("intermediate_size"),
            activation=parse_activation(config, "hidden_act", "gelu"),
            eps=config.positive_float("layer_norm_eps", 1e-12),
            positions=positions,
            first_position=first_position,
            types=config.positive_int("type_vocab_size", 2),
        ),
    )
