"""The sizes in a config.json, compared with those that transformers reads from the same file."""

from typing import Any

import pytest
from transformers import AutoConfig

from peagle.model_shape import ModelShape

PLAIN = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GEMMA = {**PLAIN, "model_type": "gemma3_text", "head_dim": 16, "layer_types": ["x"] * 5}


@pytest.mark.parametrize(
    "data",
    [
        PLAIN,
        {**PLAIN, "head_dim": 24},
        {**PLAIN, "model_type": "qwen3", "head_dim": 16},
        {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"},
        {"model_type": "gemma3", "text_config": {**PLAIN, "model_type": "gemma3_text"}},
    ],
)
def test_sizes_are_those_of_transformers(data: dict[str, Any]) -> None:
    given = dict(data)
    text = AutoConfig.for_model(given.pop("model_type"), **given).get_text_config()
    shape = ModelShape.from_json(data)
    found = (shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_layers)
    wanted = (text.vocab_size, text.hidden_size, text.intermediate_size, text.num_hidden_layers)
    assert found == wanted
    assert (shape.num_heads, shape.num_kv_heads) == (
        text.num_attention_heads,
        text.num_key_value_heads,
    )
    assert shape.max_model_len == text.max_position_embeddings
    if "head_dim" in shape.text or text.model_type == "llama":
        assert shape.head_dim == text.head_dim


def test_layers_of_a_head_are_nested_too() -> None:
    shape = ModelShape.from_json({"transformer_layer_config": PLAIN, "hidden_size": 7})
    assert (shape.hidden_size, shape.head_dim, shape.layer_kinds) == (48, 8, ())
    assert ModelShape.from_json(GEMMA).layer_kinds == ("x",) * 5


@pytest.mark.parametrize("value", ["48", 0, -1, 4.5, True, None, [48]])
def test_no_sizes_are_not_told(value: Any) -> None:
    shape = ModelShape.from_json({**PLAIN, "hidden_size": value, "num_attention_heads": value})
    assert (shape.hidden_size, shape.num_heads, shape.head_dim) == (None, None, None)
    assert (shape.num_kv_heads, shape.num_layers) == (2, 5)
    assert ModelShape.from_json({}).vocab_size is None


@pytest.mark.parametrize("data", [[], None, 3, {"text_config": 3}, {"layer_types": 3}])
def test_files_of_another_form_say_nothing(data: Any) -> None:
    shape = ModelShape.from_json(data)
    assert (shape.hidden_size, shape.num_layers, shape.layer_kinds) == (None, None, ())
