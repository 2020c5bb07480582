"""Questions of a certificate to a server with OpenAI's API, and its answers token by token.

A *prefix* is a prompt with the first tokens of an answer behind it, sent to /v1/completions. Where
the server names tokens by their ids and has /tokenize (ours and vLLM), a prefix is a list of ids.
Elsewhere it is text, and counts only if the server reads as many tokens as it should.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peagle.client.answers import ForeignAnswer, Usage, error_message, read_whole
from peagle.client.logprobs import ScoredToken, scored_tokens
from peagle.errors import UserError
from peagle.evaluation.endpoint import CHAT, COMPLETIONS, EndpointBackend
from peagle.evaluation.http_client import Reply

ROUTES = {"completions": COMPLETIONS, "chat": CHAT}
# Fields that change nothing where a server samples by the model alone, but for the names of tokens.
# A server that refuses one does not get it.
_NEUTRAL_FIELDS = {
    "return_tokens_as_token_ids": True,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_TOPS = (20, 5)  # likeliest tokens of a position: vLLM's limit and ours, OpenAI's


@dataclass(frozen=True, slots=True)
class ServedPrompt:
    """A prompt of one route: text or token ids for "completions", messages for "chat"."""

    id: str
    route: str
    content: str | list[int] | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """The whole answer to a prompt, with the log-probabilities of its tokens."""

    prompt: ServedPrompt
    tokens: tuple[ScoredToken, ...]
    text: str
    finish_reason: str
    usage: Usage = field(default_factory=Usage)
    has_reasoning: bool = False  # `text` begins with reasoning that the server separates

    @property
    def names(self) -> list[str]:
        """Return the server's names of the tokens."""
        return [one.token for one in self.tokens]

    @property
    def has_ended(self) -> bool:
        """Return whether the model ended the answer itself."""
        return self.finish_reason == "stop"


class ScoringServer:
    """A server whose answers have log-probabilities; `template` has more fields of chats.

    Attributes:
        routes: "completions" and "chat", as far as the server has them with log-probabilities.
        num_top: number of likeliest tokens that it gives at a position, 20 or 5.
        has_echo: it gives the log-probabilities of a prompt too, which it then computes as a whole,
            without the prefix cache (ours and vLLM).
        draws: it takes temperatures above 0.
        notes: a line for each thing that the server lacks.

    Raises:
        UserError: the server has no such route, or gives no log-probabilities.
    """

    def __init__(self, backend: EndpointBackend, template: Mapping[str, Any] | None = None) -> None:
        self.backend = backend
        self.name = backend.name
        self.notes: list[str] = []
        self._template = dict(template or {})
        self._fields: dict[str, Any] = {}
        self._prompt_ids: dict[str, list[int] | None] = {}
        hi = {"completions": "Hi", "chat": [{"role": "user", "content": "Hi"}]}
        prompts = [ServedPrompt("a first request", route, hi[route]) for route in ROUTES]
        replies = [self._probe(prompt) for prompt in prompts]
        found = [one for one, reply in zip(prompts, replies, strict=True) if reply.status == 200]
        if not found:
            raise UserError(
                f"{self.name} answers neither completions ({_words(replies[0])}) nor chat "
                f"completions ({_words(replies[1])}) of {backend.model!r}; expected one of them. "
                f"Correct {backend.option} or --model."
            )
        self._fields = self._accepted_fields(found[0])
        self.num_top, self.routes = self._find_logprobs(found)
        drawn = self._probe(found[0], temperature=1.0)
        self.draws = drawn.status == 200
        if not self.draws:
            self.notes.append(
                f"the server refuses temperature 1 ({_words(drawn)}): sampled tokens are not tested"
            )
        self.has_echo = "completions" in self.routes and self._find_echo(found[0])
        if not self.has_echo:
            self.notes.append("the server echoes no prompt: no answer is scored anew as a prompt")

    def _probe(self, prompt: ServedPrompt, **fields: Any) -> Reply:
        body = self._body(prompt, {"max_tokens": 1, **fields})
        (reply,) = self.backend.ask(ROUTES[prompt.route], [body])
        return reply

    def _accepted_fields(self, prompt: ServedPrompt) -> dict[str, Any]:
        if self._probe(prompt, **_NEUTRAL_FIELDS).status == 200:
            return _NEUTRAL_FIELDS
        fields = _NEUTRAL_FIELDS.items()
        return {n: v for n, v in fields if self._probe(prompt, **{n: v}).status == 200}

    def _find_logprobs(self, prompts: Sequence[ServedPrompt]) -> tuple[int, list[str]]:
        said = ""
        for num_top in _TOPS:
            routes, most = [], 0
            for prompt in prompts:
                reply = self._probe(prompt, **_logprob_fields(prompt, num_top))
                said = said or _words(reply)
                tokens = self._read(prompt, reply).tokens if reply.status == 200 else ()
                if (found := max((len(one.top) for one in tokens), default=0)) > 1:
                    routes.append(prompt.route)
                most = max(most, found)
            if routes:
                return num_top if most >= num_top else _TOPS[-1], routes
        raise UserError(
            f"{self.name} gives no log-probabilities of {self.backend.model!r} ({said}); expected "
            f"the {_TOPS[-1]} likeliest tokens of each position, which a certificate compares. "
            f"Serve it with them (vLLM: --max-logprobs), or correct {self.backend.option}."
        )

    def _find_echo(self, prompt: ServedPrompt) -> bool:
        fields = {**_logprob_fields(prompt, self.num_top), "echo": True}
        reply = self._probe(replace(prompt, content="Hi there, again"), **fields)
        if reply.status != 200:
            return False
        try:
            answer = self._read(prompt, reply)
        except UserError:  # an echo without log-probabilities
            return False
        count = answer.usage.num_prompt_tokens
        return len(answer.tokens) == count + 1 > 2 and len(answer.tokens[1].top) > 1

    # ---- questions ----

    def ask(
        self,
        prompts: Sequence[ServedPrompt],
        fields: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        concurrency: int = 1,
        *,
        num_top: int | None = None,
        k: int | None = None,
    ) -> list[ServedAnswer]:
        """Return the answers to prompts of one route.

        `fields` are those of every request, or of each. `num_top` None takes all the likeliest
        tokens that the server gives, `k` None its own K.

        Raises:
            UserError: as `EndpointBackend.ask`, or an answer is missing or not scored.
        """
        each = [fields] * len(prompts) if isinstance(fields, Mapping) else fields
        top = self.num_top if num_top is None else num_top
        drafts = {} if k is None else {"speculation": {"num_speculative_tokens": k}}
        bodies = [
            self._body(prompt, {**_logprob_fields(prompt, top), **drafts, **own})
            for prompt, own in zip(prompts, each, strict=True)
        ]
        path = ROUTES[prompts[0].route] if prompts else ""
        replies = self.backend.ask(path, bodies, concurrency)
        answers = [self._read(*pair) for pair in zip(prompts, replies, strict=True)]
        for answer in answers:
            if answer.text and not answer.tokens:
                raise UserError(
                    f"{self.name} answered {answer.prompt.id} with text and no log-probabilities. "
                    f"Correct {self.backend.option}."
                )
        return answers

    def takes(self, prompt: ServedPrompt, max_tokens: int) -> bool:
        """Return whether the server takes a prompt, which may be too long."""
        return self._probe(prompt, max_tokens=max_tokens).status == 200

    def prefix(self, answer: ServedAnswer, length: int) -> ServedPrompt | None:
        """Return a prompt with the first tokens of its answer; None if it cannot be asked for."""
        prompt, tokens = answer.prompt, answer.tokens[:length]
        if "completions" not in self.routes:
            return None
        if all(one.token_id is not None for one in answer.tokens):
            ids = self._ids_of(prompt)
            # An answer whose tokens are not all listed has parts that are not known.
            unlisted = (answer.usage.num_tokens or 0) - len(answer.tokens)
            if ids is None or len(ids) != answer.usage.num_prompt_tokens or unlisted > 1:
                return None
            more = [one.token_id for one in tokens if one.token_id is not None]
            return ServedPrompt(prompt.id, "completions", ids + more)
        text = "".join(one.token for one in tokens)
        # Names that are not the text, like those of parts of a character, would be read as others.
        is_text = isinstance(prompt.content, str) and answer.text.startswith(text)
        is_text = is_text and "\ufffd" not in text
        content = f"{prompt.content}{text}"
        return ServedPrompt(prompt.id, "completions", content) if is_text else None

    def next_token(
        self,
        answer: ServedAnswer,
        length: int,
        *,
        temperature: float = 0.0,
        k: int | None = None,
        echo: bool = False,
    ) -> ServedAnswer | None:
        """Return the answer of one token to a prefix, behind the prefix itself with `echo`.

        None means that the server cannot be asked, or read the prefix as other tokens.
        """
        prefix = self.prefix(answer, length)
        if prefix is None or (echo and not self.has_echo):
            return None
        fields = {"max_tokens": 1, "temperature": temperature, **({"echo": True} if echo else {})}
        (found,) = self.ask([prefix], fields, k=k)
        expected = answer.usage.num_prompt_tokens + length
        if found.usage.num_prompt_tokens != expected:
            return None
        return found if len(found.tokens) == (expected + 1 if echo else 1) else None

    def _ids_of(self, prompt: ServedPrompt) -> list[int] | None:
        """Return the token ids of a prompt, if the server tells them."""
        if isinstance(prompt.content, list) and all(isinstance(i, int) for i in prompt.content):
            return [i for i in prompt.content if isinstance(i, int)]
        if prompt.id not in self._prompt_ids:
            body = {"model": self.backend.model, "prompt": prompt.content}
            if prompt.route == "chat":
                body = {"model": self.backend.model, "messages": prompt.content, **self._template}
            (reply,) = self.backend.ask("/tokenize", [body])
            try:
                ids = json.loads(reply.body)["tokens"] if reply.status == 200 else None
            except (ValueError, TypeError, KeyError):
                ids = None
            self._prompt_ids[prompt.id] = ids
        return self._prompt_ids[prompt.id]

    def _body(self, prompt: ServedPrompt, fields: Mapping[str, Any]) -> dict[str, Any]:
        is_chat = prompt.route == "chat"
        return {
            "model": self.backend.model,
            "messages" if is_chat else "prompt": prompt.content,
            **(self._template if is_chat else {}),
            "temperature": 0.0,
            "top_p": 1.0,
            **self._fields,
            **self.backend.privacy_fields,
            **fields,
        }

    def _read(self, prompt: ServedPrompt, reply: Reply) -> ServedAnswer:
        if reply.status != 200:
            raise UserError(
                f"{self.name} did not answer {prompt.id} ({_words(reply)}); expected status 200. "
                "Choose other prompts (--set), or read the server's log."
            )
        try:
            event = read_whole(reply.body)
            if event.error or not event.choices:
                raise ForeignAnswer(reply.body, is_object=True)
            (listed, *_) = event.body["choices"]
            tokens = scored_tokens(listed)
        except ValueError as error:
            raise UserError(
                f"{self.name} answered {prompt.id} with {str(error)!r}; expected a completion with "
                f"log-probabilities in OpenAI's form. Correct {self.backend.option}."
            ) from None
        choice = event.choices[0]
        usage = event.usage or Usage()
        return ServedAnswer(
            prompt,
            tuple(tokens),
            choice.reasoning + choice.text,
            choice.finish_reason,
            usage,
            bool(choice.reasoning),
        )


def _logprob_fields(prompt: ServedPrompt, num_top: int) -> dict[str, Any]:
    if prompt.route == "chat":
        return {"logprobs": True, "top_logprobs": num_top}
    return {"logprobs": num_top}


def _words(reply: Reply) -> str:
    """Return what the server said, with the status."""
    return f"{reply.status}: {error_message(reply.body) if reply.status != 200 else 'an answer'}"
