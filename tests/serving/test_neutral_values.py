"""Fields that ask for what happens anyway: each route takes them, and nothing changes."""

from pathlib import Path
from typing import Any

import pytest

from peagle.serving.app import parsed
from peagle.serving.errors import ApiError
from peagle.serving.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    TokenizeBody,
)
from serving.test_family_chat import USER, Chat, family_tokenizer

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
# What clients of OpenAI's and vLLM's servers send without a wish.
GENERATION: dict[str, list[Any]] = {
    "add_special_tokens": [False],
    "bad_words": [[]],
    "detokenize": [True],
    "documents": [[]],
    "echo": [False],
    "ignore_eos": [False],
    "include_reasoning": [True],
    "include_stop_str_in_output": [False],
    "length_penalty": [1, 1.0],
    "logit_bias": [{}],
    "logits_processors": [[]],
    "metadata": [{}],
    "min_p": [0, 0.0],
    "min_tokens": [0],
    "mm_processor_kwargs": [{}],
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "priority": [0],
    "repetition_penalty": [1, 1.0],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
    "service_tier": ["auto", "default"],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "stop": [[]],
    "stop_token_ids": [[]],
    "store": [False],
    "stream": [False],
    "temperature": [1, 1.0],
    "top_k": [0, -1],
    "top_p": [1, 1.0],
    "typical_p": [1],
    "use_beam_search": [False],
    "user": ["", "someone"],
    "vllm_xargs": [{}],
}
OF_BOTH = {
    "best_of": [1],
    "n": [1],
    "response_format": [{"type": "text"}],
    "stream_options": [{}, {"include_usage": True}, {"include_usage": False}],
    "store": [False, True],
}
TOOLS = {
    "parallel_tool_calls": [True, False],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "verbosity": ["medium"],
    "chat_template_kwargs": [{}],
}
NEUTRAL: dict[str, dict[str, list[Any]]] = {
    COMPLETIONS: {**GENERATION, **OF_BOTH, "suffix": [""], "add_special_tokens": [True]},
    CHAT: {
        **GENERATION,
        **OF_BOTH,
        **TOOLS,
        "continue_final_message": [False],
        "add_generation_prompt": [True],
        "function_call": ["none", "auto"],
        "functions": [[]],
        "logprobs": [False],
        "modalities": [["text"]],
        "top_logprobs": [0],
    },
    RESPONSES: {
        **GENERATION,
        **TOOLS,
        "background": [False],
        "include": [[]],
        "reasoning": [{}, {"effort": None}, {"effort": None, "summary": None}],
        "stream_options": [{}, {"include_obfuscation": False}],
        "text": [{}, {"format": {"type": "text"}}, {"format": None}, {"verbosity": "medium"}],
        "top_logprobs": [0],
        "truncation": ["disabled"],
    },
    "/tokenize": {"return_token_strs": [False], "add_special_tokens": [True], "tools": [[]]},
    "/detokenize": {},
}
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    COMPLETIONS: (CompletionBody, {"prompt": "x", "max_tokens": 4}),
    CHAT: (ChatBody, {"messages": [USER], "max_tokens": 4}),
    RESPONSES: (ResponsesBody, {"input": "x", "max_output_tokens": 4}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [70]}),
}
CASES = [
    (route, name, value)
    for route, fields in NEUTRAL.items()
    for name in {*fields, *BODIES[route][0].model_fields, "a_field_of_tomorrow"}
    for value in [*fields.get(name, ()), *([None] if name not in BODIES[route][1] else [])]
]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    family = "qwen3-coder"
    return Chat(family_tokenizer(family), Path(tmp_path_factory.mktemp(family)))


def answer_to(chat: Chat, route: str, body: dict[str, Any]) -> Any:
    """Return what the engine is asked for, or the answer of a route without an engine."""
    chat.engine.script = "Hi"
    chat.engine.prompts, chat.engine.params = [], []
    answer = chat.post(route, **body)
    assert "error" not in answer or answer["error"] is None, (body, answer)
    return (chat.engine.prompts, chat.engine.params) if chat.engine.prompts else answer


@pytest.mark.slow
def test_neutral_values_change_nothing(chat: Chat) -> None:
    assert len(CASES) > 250
    plain = {route: answer_to(chat, route, body) for route, (_, body) in BODIES.items()}
    for route, name, value in CASES:
        body = BODIES[route][1] | {name: value}
        assert answer_to(chat, route, body) == plain[route], (route, name, value)
        if route in (COMPLETIONS, CHAT):
            assert answer_to(chat, "/invocations", body) == plain[route], (name, value)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"use_beam_search": 0}, "use_beam_search"),
        (COMPLETIONS, {"length_penalty": True}, "length_penalty"),
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs"),
        (CHAT, {"top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"store": True}, "store"),
        (RESPONSES, {"top_logprobs": 1}, "top_logprobs"),
        ("/tokenize", {"a_field_of_tomorrow": 0}, "a_field_of_tomorrow"),
    ],
)
def test_other_values_are_refused(
    chat: Chat, route: str, fields: dict[str, Any], param: str
) -> None:
    error = chat.post(route, **BODIES[route][1], **fields)["error"]
    assert error["param"] == param, error


def test_a_null_does_not_stand_for_what_is_needed() -> None:
    for model, body in BODIES.values():
        (name,) = body.keys() & {"prompt", "messages", "input", "tokens"}
        if model is not TokenizeBody:
            with pytest.raises(ApiError, match=f"{name} is missing"):
                parsed(model, {**body, name: None})


def test_a_negative_seed_is_a_seed(chat: Chat) -> None:
    for route in (COMPLETIONS, CHAT, RESPONSES):
        for seed, expected in ((-1, 2**63 - 1), (-(2**63), 0), (5, 5)):
            answer_to(chat, route, {**BODIES[route][1], "seed": seed})
            assert [params.seed for params in chat.engine.params] == [expected]
    error = chat.post(COMPLETIONS, prompt="x", seed=-(2**63) - 1)["error"]
    assert error["param"] == "seed" and "-2**63" in error["message"]
