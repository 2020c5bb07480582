"""What an engine refuses of a request: what depends on its model and its sizes."""

from __future__ import annotations

from collections.abc import Iterable

from peagle.config import SamplingParams, token_ids
from peagle.errors import UserError


def checked_prompt(
    prompt_token_ids: Iterable[int], vocab_size: int, max_model_len: int
) -> list[int]:
    """The prompt as a list.

    Raises:
        UserError: it is empty, holds ids outside the vocabulary, or leaves no room for output.
    """
    prompt = token_ids(list(prompt_token_ids), vocab_size, "prompt_token_ids")
    if not prompt:
        raise UserError("The prompt is empty; expected at least one token.")
    if len(prompt) >= max_model_len:
        raise UserError(
            f"The prompt has {len(prompt)} tokens; expected at most {max_model_len - 1}, "
            f"one fewer than the context of {max_model_len}. Shorten the prompt."
        )
    return prompt


def check_params(params: SamplingParams, vocab_size: int, num_speculative_tokens: int) -> None:
    """Check token ids, and the drafts asked for against those that the engine makes.

    Raises:
        UserError: an id is outside the vocabulary, or more drafts are asked for.
    """
    token_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    token_ids(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    token_ids([token for token, _ in params.logit_bias], vocab_size, "logit_bias")
    for word in params.bad_words:
        assert not isinstance(word, str), "texts are encoded by whoever knows the tokenizer"
        token_ids(word, vocab_size, "bad_words")
    asked = params.num_speculative_tokens
    if asked is not None and asked > num_speculative_tokens:
        raise UserError(
            f"num_speculative_tokens of the request is {asked}; the engine was made for at "
            f"most {num_speculative_tokens}. Ask for fewer, or set it in the speculative "
            "configuration."
        )
