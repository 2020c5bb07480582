"""How one request is sampled."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import InitVar, asdict, dataclass
from typing import Any

from peagle.config.checks import (
    BOOLEAN,
    FieldCheck,
    check_fields,
    is_int,
    is_number,
    number_check,
    require,
    require_neutral,
    whole,
)
from peagle.config.speculative import MAX_SPECULATIVE_TOKENS
from peagle.config.structured import StructuredOutput
from peagle.errors import UserError, require_characters, short_repr

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MAX_OUTPUTS = 64

_MASS = number_check(lambda p: 0 < p <= 1, "a number above 0 and at most 1 (1 keeps every token)")
_PENALTY = number_check(lambda p: -2 <= p <= 2, "a number from -2 to 2 (0 changes nothing)")
_CHECKS = {
    "max_tokens": whole(1),
    "min_tokens": whole(0),
    "top_k": whole(0, note=" (0 keeps every token)"),
    "n": whole(1, MAX_OUTPUTS),
    "seed": whole(-MAX_SEED - 1, MAX_SEED, optional=True),
    "logprobs": whole(0, MAX_LOGPROBS, optional=True),
    "prompt_logprobs": whole(0, MAX_LOGPROBS, optional=True),
    "num_speculative_tokens": whole(
        0, MAX_SPECULATIVE_TOKENS, note=" (0 drafts nothing)", optional=True
    ),
    "ignore_eos": BOOLEAN,
    "prompt_lookup": BOOLEAN,
    "correction": FieldCheck(
        lambda name: name is None or isinstance(name, str), "the name of a correction, or none"
    ),
    "temperature": number_check(lambda t: t >= 0, "a number of at least 0 (0 is greedy)"),
    "top_p": _MASS,
    "typical_p": _MASS,
    "min_p": number_check(lambda p: 0 <= p <= 1, "a number from 0 to 1 (0 keeps every token)"),
    "repetition_penalty": number_check(lambda p: p > 0, "a number above 0 (1 changes nothing)"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}
# Arguments of vLLM's SamplingParams that are taken with these values only, and why.
_NEUTRAL: dict[str, tuple[object, str]] = {
    "best_of": (None, "no output is left out. Set n, and choose among the outputs."),
    "include_stop_str_in_output": (False, "the text ends before the stop string."),
    "detokenize": (True, "every output has its text."),
    "skip_special_tokens": (True, "special tokens have no text; token_ids has them."),
    "spaces_between_special_tokens": (True, "special tokens have no text."),
    "truncate_prompt_tokens": (None, "shorten the prompt itself."),
    "logits_processors": (None, "write the rule as logit_bias, bad_words or structured_output."),
    "extra_args": (None, "there are none."),
    "flat_logprobs": (False, "log-probabilities have one form."),
}


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The structure of an output, in the names of vLLM's class of this name.

    Attributes:
        json: a JSON schema, as a mapping or as JSON text.
        regex: an expression that matches the whole output.
        choice: the texts that the output may be.
        grammar: a grammar in GBNF notation.
        json_object: any JSON object.
        disable_any_whitespace: JSON without blanks between its parts.
        disable_fallback: without an effect, as there is one implementation.
        disable_additional_properties, whitespace_pattern, structural_tag: refused.

    Raises:
        UserError: as `StructuredOutput.from_vllm`.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        self.structured_output()

    def structured_output(self) -> StructuredOutput:
        """Return the constraint in the form that requests carry."""
        return StructuredOutput.from_vllm(asdict(self))


@dataclass(slots=True)
class SamplingParams:
    """How one request is sampled, and what ends or constrains its output.

    A value may be assigned later too; the next request that takes these parameters checks it.

    Order of effect: `logit_bias`, then the forbidden tokens (`structured_output`,
    `allowed_token_ids`, `bad_words`, `min_tokens`), penalties, `min_p`, `typical_p`, temperature,
    `top_k`, `top_p`.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        min_tokens: number of tokens before a stop id may come.
        temperature: 0 is greedy decoding; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probabilities sum to top_p.
        min_p: keep tokens of at least min_p times the highest probability; 0 keeps all.
        typical_p: keep the tokens whose surprise is closest to the entropy, up to this mass
            (locally typical sampling); 1 keeps all.
        repetition_penalty: divides the logits (multiplies negative ones) of tokens in prompt or
            output; 1 changes nothing.
        presence_penalty: taken from the logits of tokens in the output; from -2 to 2.
        frequency_penalty: the same, times how often they are there; from -2 to 2.
        logit_bias: added to the logits of token ids; -inf forbids. A mapping, kept as pairs.
        bad_words: texts, or lists of token ids, that may not appear in the output.
        allowed_token_ids: the only token ids that may be generated; None allows all.
        structured_output: the shape that the output must have.
        n: outputs of the one prompt; output i > 0 draws with a seed derived from `seed` and i.
        seed: the same seed gives the same output as decoding without drafts, for any K, head
            and batch: exactly in float64 on a CPU, in narrower types but for near-ties. Drafts that
            are drawn ("probabilistic") change it with K and head, not with the batch. None draws a
            fresh seed from the engine's. From -2**63 to 2**63 - 1; a negative one stands for
            itself plus 2**63.
        logprobs: give log-probabilities of the output tokens and of this many most likely ones at
            each position, by the target's raw logits; 0 gives the output tokens' alone.
        prompt_logprobs: the same for the prompt's tokens.
        stop: strings that end the output and are left out of its text, at most 64; one string
            stands for a list of one.
        stop_token_ids: token ids that end the output, beside the model's own end-of-text ids.
        ignore_eos: generate on past the model's own end-of-text ids.
        num_speculative_tokens: K of this request, at most the engine's; 0 decodes it without
            drafts, None takes the engine's.
        prompt_lookup: let the text draft too, where the engine looks drafts up in it: copies of the
            text in the trees of a head, or "ngram". False: the head alone drafts, as for a request
            whose num_speculative_tokens is below the engine's.
        correction: name of the correction of its drafts, one of `SpeculativeConfig.corrections`;
            None takes that of the head.
        prediction: what the output may be, a text or token ids: copies of it join the trees from
            the first token on, or "ngram" drafts them. The output is the same without it.
        marker_token_ids: special tokens whose names are part of the text, each behind
            `peagle.markers.SIGN`; other special tokens have no text.

    Further arguments are those of vLLM. `structured_outputs`, or by its older name
    `guided_decoding`, takes StructuredOutputsParams or a mapping of its fields and becomes
    `structured_output`. The others are accepted with the values that they have here by default.
    None stands for the default of `stop`, `stop_token_ids`, `bad_words`, `logit_bias` and
    `prediction`.

    Raises:
        UserError: a value is out of range, or two contradict each other; the message names them.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    structured_output: StructuredOutput | None = None
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None
    prompt_lookup: bool = True
    correction: str | None = None
    prediction: str | tuple[int, ...] = ()
    marker_token_ids: tuple[int, ...] = ()
    structured_outputs: InitVar[StructuredOutputsParams | Mapping[str, Any] | None] = None
    guided_decoding: InitVar[StructuredOutputsParams | Mapping[str, Any] | None] = None
    best_of: InitVar[Any] = None
    include_stop_str_in_output: InitVar[Any] = False
    detokenize: InitVar[Any] = True
    skip_special_tokens: InitVar[Any] = True
    spaces_between_special_tokens: InitVar[Any] = True
    truncate_prompt_tokens: InitVar[Any] = None
    logits_processors: InitVar[Any] = None
    extra_args: InitVar[Any] = None
    flat_logprobs: InitVar[Any] = False

    def __post_init__(self, structured_outputs: Any, guided_decoding: Any, *neutral: Any) -> None:
        for (name, (value, reason)), given in zip(_NEUTRAL.items(), neutral, strict=True):
            if name != "best_of" or given != self.n:
                require_neutral(name, given, value, reason)
        for name in ("stop", "stop_token_ids", "bad_words", "logit_bias", "prediction"):
            if getattr(self, name) is None:
                setattr(self, name, ())
        if is_int(self.top_k) and self.top_k == -1:
            self.top_k = 0
        self._read_structure("structured_outputs", structured_outputs)
        self._read_structure("guided_decoding", guided_decoding)
        check_fields(self, _CHECKS)
        if self.seed is not None and self.seed < 0:
            self.seed += MAX_SEED + 1
        self._check_tokens()
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        require(isinstance(stop, Sequence | Set), "stop", stop, "a string or a list of strings")
        self.stop = tuple(stop)
        for one in self.stop:
            require(isinstance(one, str) and bool(one), "stop", one, "strings that are not empty")
        found, most = f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}"
        remedy = "Look for others in the finished text."
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", found, most, remedy)
        self._check_together()

    def _read_structure(self, name: str, given: Any) -> None:
        """Set `structured_output` by an argument of vLLM's."""
        if given is None:
            return
        if self.structured_output is not None:
            raise UserError(
                f"{name} was given beside another constraint on the output; leave one of the two "
                "out."
            )
        ok = isinstance(given, StructuredOutputsParams | Mapping)
        require(ok, name, given, "StructuredOutputsParams, or a mapping of its fields")
        self.structured_output = (
            given.structured_output()
            if isinstance(given, StructuredOutputsParams)
            else StructuredOutput.from_vllm(given, f"{name}.")
        )

    def _check_tokens(self) -> None:
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids)
        self.marker_token_ids = _ids("marker_token_ids", self.marker_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            expected = "at least one token id, or none"
            allowed = self.allowed_token_ids
            require(bool(allowed), "allowed_token_ids", allowed, expected)
        bias: Any = self.logit_bias
        require(isinstance(bias, Mapping | Sequence), "logit_bias", bias, "a mapping of token ids")
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        self.logit_bias = tuple(_bias(pair) for pair in pairs)
        words: Any = self.bad_words
        ok = isinstance(words, Sequence) and not isinstance(words, str)
        require(ok, "bad_words", words, "a list of texts or of lists of token ids")
        self.bad_words = tuple(_word(word) for word in words)
        if isinstance(self.prediction, str):
            require_characters("prediction", self.prediction)
        else:
            self.prediction = _ids("prediction", self.prediction, "a text or a list of token ids")

    def _check_together(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}: no output has "
                "both. Raise max_tokens or lower min_tokens."
            )
        if self.n > 1 and self.is_greedy:
            raise UserError(
                f"n is {self.n} and temperature 0: greedy outputs are all the same. Set a "
                "temperature, or leave n out."
            )
        if self.prediction and not self.prompt_lookup:
            raise UserError("prediction was given and prompt_lookup is false; leave one out.")
        structured = self.structured_output
        if structured is None:
            return
        ok = isinstance(structured, StructuredOutput)
        require(ok, "structured_output", structured, "a StructuredOutput")
        # Each of them can take away what the grammar requires next.
        for name, without in (("allowed_token_ids", None), ("bad_words", ()), ("min_tokens", 0)):
            if getattr(self, name) != without:
                given = short_repr(getattr(self, name))
                raise UserError(
                    f"structured_output and {name} {given} were both given: a "
                    "grammar says alone which tokens may come. Leave one of the two out."
                )
        if self.ignore_eos:
            raise UserError(
                "structured_output and ignore_eos were both given: nothing may follow a finished "
                "structure. Leave one of the two out."
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _ids(name: str, values: Any, expected: str = "a list of token ids") -> tuple[int, ...]:
    ok = isinstance(values, Sequence | Set) and not isinstance(values, str | bytes)
    require(ok, name, values, expected)
    ids: tuple[Any, ...] = tuple(values)
    for token in ids:
        require(is_int(token) and token >= 0, name, token, "token ids of at least 0")
    return ids


def _bias(pair: Any) -> tuple[int, float]:
    ok = isinstance(pair, list | tuple) and len(pair) == 2
    require(ok, "logit_bias", pair, "pairs of a token id and a number")
    token, value = pair
    require(is_int(token) and token >= 0, "logit_bias", token, "token ids of at least 0")
    ok = is_number(value) or value == -math.inf
    require(ok, "logit_bias", value, "finite numbers, or -inf to forbid a token")
    return token, float(value)


def _word(word: Any) -> str | tuple[int, ...]:
    if isinstance(word, str):
        require(bool(word), "bad_words", word, "texts that are not empty")
        require_characters("bad_words", word)
        return word
    ids = _ids("bad_words", word)
    require(bool(ids), "bad_words", word, "lists of at least one token id")
    return ids
