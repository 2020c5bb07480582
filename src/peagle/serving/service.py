"""The state and the checks that all routes which generate share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.serving.config import ServerConfig
from peagle.serving.deadline import Deadline
from peagle.serving.engine_pool import EnginePool
from peagle.serving.errors import ApiError
from peagle.serving.generation import Caller, Generation, Job
from peagle.serving.messages import EngineInfo
from peagle.serving.metrics import Metrics
from peagle.serving.params import as_api_error, check_context, refuse_grammars
from peagle.serving.protocol import ChatBody, GenerationFields, TokenizeBody, Tool
from peagle.serving.quotas import Lease
from peagle.serving.tokenizer import Tokenizer
from peagle.serving.tool_parsers import detect_parser
from peagle.serving.tracing import Tracing


@dataclass(slots=True)
class Service:
    """The model that is served.

    Attributes:
        name: what clients call it.
        proposers: names of the proposers; the first one is the default.
        tokenizer: None while it loads.
        is_draining: no new requests are taken.
        num_open: answers under way.
    """

    config: ServerConfig
    name: str
    proposers: tuple[str, ...]
    pool: EnginePool
    metrics: Metrics
    tracing: Tracing | None = None
    tokenizer: Tokenizer | None = None
    is_draining: bool = False
    num_open: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return bool(self.tokenizer and self.pool.ready and not self.is_draining)

    def loaded(self) -> tuple[Tokenizer, EngineInfo]:
        """Tokenizer and engine facts.

        Raises:
            ApiError: 503 while there are none, or while the server drains.
        """
        if self.is_draining:
            text = "The server is about to stop and takes no new requests; try another one."
            raise ApiError(503, text, code="draining", headers={"Retry-After": "5"})
        info = self.pool.info
        if self.tokenizer is None or info is None:
            text = "The model is not loaded yet; try again shortly."
            raise ApiError(503, text, code="not_ready", headers={"Retry-After": "2"})
        return self.tokenizer, info

    def check_model(self, model: str | None) -> None:
        """Refuse another model's name.

        Raises:
            ApiError: 404.
        """
        if model is not None and model != self.name:
            raise ApiError(
                404,
                f"The model {model!r:.200} is not served here; expected {self.name!r}.",
                param="model",
                code="model_not_found",
            )

    def drafting_of(self, body: GenerationFields, info: EngineInfo) -> tuple[str, int | None]:
        """The proposer of a request and its K, None for the proposer's own; 0 is "plain".

        Raises:
            ApiError: there is none of that name, or K is more than it drafts.
        """
        asked = body.speculation
        if asked is None:
            return self.proposers[0], None
        name = asked.proposer or self.proposers[0]
        if name == "plain" and name not in self.proposers:
            return self.proposers[0], 0
        if name not in self.proposers:
            names = ", ".join(dict.fromkeys([*self.proposers, "plain"]))
            raise ApiError(
                400,
                f"speculation.proposer is {name!r:.80}; expected one of: {names}.",
                param="speculation.proposer",
            )
        k, most = asked.num_speculative_tokens, info.num_speculative_tokens[name]
        if k is not None and not 0 <= k <= most:
            raise ApiError(
                400,
                f"speculation.num_speculative_tokens is {k}; expected 0 (no drafts) to {most}.",
                param="speculation.num_speculative_tokens",
            )
        return name, k

    def tool_parser(self) -> str:
        """How tool calls are recognised in free output."""
        kind = self.config.tool_call_parser
        if kind != "auto":
            return kind
        source = self.tokenizer.template_source if self.tokenizer else None
        return detect_parser(source) if source else "none"

    def generation(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        body: GenerationFields,
        caller: Caller,
    ) -> Generation:
        """A request ready to run.

        Raises:
            ApiError: as `drafting_of`; or its grammar is refused.
        """
        if not self.config.user_grammars:
            refuse_grammars(body)
        proposer, k = self.drafting_of(body, self.loaded()[1])
        priority = 0 if self.config.ignore_priority else body.priority
        job = Job(prompts, replace(params, num_speculative_tokens=k), proposer, priority)
        return Generation(
            self.pool,
            self.metrics,
            self.tracing,
            self.name,
            job,
            caller,
            log_prompts=self.config.log_prompts,
        )

    async def render(
        self,
        body: ChatBody | TokenizeBody,
        tools: list[dict[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[list[int], bool]:
        """Token ids of a body's messages, and whether the answer begins inside its reasoning.

        Raises:
            ApiError: as `Tokenizer.render`, with the field that is wrong as `param`.
        """
        tokenizer, info = self.loaded()
        try:
            return await tokenizer.render(
                body.messages or [],
                info.max_model_len,
                tools=tools,
                template_kwargs=template_kwargs,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            )
        except UserError as error:
            text = str(error).replace(" template_kwargs", " chat_template_kwargs")
            param = "chat_template_kwargs" if text != str(error) else "messages"
            raise ApiError(400, text, param=param) from None

    async def encode(self, prompt: Any, *, add_special_tokens: bool = True) -> list[list[int]]:
        """The prompts of a completion as token ids: text, ids, or a list of either.

        Raises:
            ApiError: one is empty, too long for the context, or has ids outside the vocabulary.
        """
        tokenizer, info = self.loaded()
        items: Sequence[Any] = [prompt] if _is_one(prompt) else prompt
        longest = max(len(item) for item in items)
        if not isinstance(items[0], str):
            check_context(longest, 1, info.max_model_len)
        with as_api_error("prompt"):
            encoded = [
                await tokenizer.encode(
                    item, info.max_model_len, add_special_tokens=add_special_tokens
                )
                if isinstance(item, str)
                else list(item)
                for item in items
            ]
        for ids in encoded:
            if not ids:
                raise ApiError(
                    400, "The prompt is empty; expected a token at least.", param="prompt"
                )
            wrong = next((i for i in ids if not 0 <= i < info.vocab_size), None)
            if wrong is not None:
                raise ApiError(
                    400,
                    f"The prompt has the token id {wrong}; expected 0 to {info.vocab_size - 1}.",
                    param="prompt",
                )
        return encoded

    async def encode_words(self, params: SamplingParams) -> SamplingParams:
        """The parameters with bad words as token ids, so that no engine has to encode them.

        Raises:
            ApiError: a word is nothing to the tokenizer.
        """
        texts = [word for word in params.bad_words if isinstance(word, str)]
        if not texts:
            return params
        with as_api_error("bad_words"):
            words = await self.loaded()[0].encode_words(texts)
        return replace(params, bad_words=tuple(map(tuple, words)))


def _is_one(prompt: Any) -> bool:
    return isinstance(prompt, str) or isinstance(prompt[0], int)


def caller_of(request: Request, body: GenerationFields, deadline: Deadline) -> Caller:
    """Return the sender of a request; its own salt is combined with that of its key."""
    state: dict[str, Any] = request.scope.get("state", {})
    salt: bytes = state.get("cache_salt", b"")
    if body.cache_salt:
        own = b""
        with suppress(UnicodeEncodeError):
            own = body.cache_salt.encode()
        salt = hashlib.sha256(salt + b"\0" + own).digest()
    return Caller(
        state.get("request_id", ""),
        request.url.path,
        salt,
        state.get("lease", Lease()),
        deadline,
    )


def tool_dicts(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Tools as the chat template and the parsers have them."""
    return [tool.model_dump(exclude_none=True) for tool in tools or ()]
