"""Bodies of requests as sampling parameters."""

from typing import Any

import pytest

from peagle.config import SamplingParams
from peagle.serving.app import parsed
from peagle.serving.engine_process import EngineInfo
from peagle.serving.errors import ApiError
from peagle.serving.protocol import ChatBody, CompletionBody, HeadBody, completion_params


def params_of(defaults: dict[str, Any], **fields: Any) -> SamplingParams:
    """The parameters of a completion, by a model that asks for the defaults."""
    body = CompletionBody.model_validate({"model": "m", "prompt": "a", **fields})
    return completion_params(body, EngineInfo(64, 320, 4, {}, defaults, "cpu", {}), prompt_len=1)


def test_what_is_no_object_is_refused_in_words_of_ours() -> None:
    messages = [{"role": "user", "content": "x"}]
    for field, fields in (("prediction", " with the fields content, type"), ("metadata", "")):
        with pytest.raises(ApiError) as caught:
            parsed(ChatBody, {"messages": messages, field: "text"})
        assert caught.value.message == f"{field} is 'text'; it should be an object{fields}."
    with pytest.raises(ApiError, match=r"; it should have at most 1024 characters\."):
        parsed(HeadBody, {"head": "x" * 1025})


def test_min_tokens_of_the_model_gives_way_to_max_tokens_of_a_request() -> None:
    defaults = {"min_tokens": 10}
    assert params_of(defaults, max_tokens=20).min_tokens == 10
    assert params_of(defaults, max_tokens=4).min_tokens == 4
    with pytest.raises(ApiError, match="min_tokens is 10 and max_tokens 4"):
        params_of({}, max_tokens=4, min_tokens=10)
