"""The sizes of a language model, as its config.json has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a target, or of the layers of a head; None: the file has no such number.

    Attributes:
        text: the keys of the decoder, which some models nest.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads: as their names say.
        num_kv_heads: as many as `num_heads` where the file has no number.
        head_dim: width of a head, by `hidden_size` where the file has no number.
        max_model_len: the longest context.
        layer_kinds: kind of attention of each layer; () where the file does not say.
    """

    text: Mapping[str, Any]
    vocab_size: int | None
    hidden_size: int | None
    intermediate_size: int | None
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    max_model_len: int | None
    layer_kinds: tuple[str, ...]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read the content of a config.json; content of another form gives no facts."""
        file = data if isinstance(data, Mapping) else {}
        inner = file.get("transformer_layer_config") or file.get("text_config")
        text = inner if isinstance(inner, Mapping) else file
        kinds = text.get("layer_types")

        def size(name: str) -> int | None:
            value = text.get(name)
            return value if type(value) is int and value > 0 else None

        width, heads = size("hidden_size"), size("num_attention_heads")
        return cls(
            text=text,
            vocab_size=size("vocab_size"),
            hidden_size=width,
            intermediate_size=size("intermediate_size"),
            num_layers=size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads") or heads,
            head_dim=size("head_dim") or (width // heads if width and heads else None),
            max_model_len=size("max_position_embeddings"),
            layer_kinds=tuple(map(str, kinds)) if isinstance(kinds, list) else (),
        )
