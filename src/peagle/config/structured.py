"""The structure of an output: JSON, a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from peagle.config.checks import did_you_mean, require
from peagle.errors import UserError

StructureKind = Literal["json", "json_schema", "regex", "ebnf"]
KINDS: tuple[StructureKind, ...] = ("json", "json_schema", "regex", "ebnf")

VLLM_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
_VLLM_SWITCHES = ("disable_any_whitespace", "disable_fallback")
_VLLM_REFUSED = {
    "whitespace_pattern": "the blanks in JSON follow one fixed rule. Leave it out, or set "
    "disable_any_whitespace for JSON without blanks.",
    "disable_additional_properties": 'write "additionalProperties": false into the schema.',
    "structural_tag": "write a grammar of the whole output.",
}


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the whole output of a request.

    Attributes:
        kind: "json" (any JSON object), "json_schema", "regex" (the whole output matches) or
            "ebnf" (a grammar in GBNF notation, rule `root`).
        source: the schema as JSON text or a mapping, the expression, or the grammar; "" for
            "json". Schemas are kept as compact JSON text.
        compact: JSON without blanks between its parts: shorter, and no room to ramble.

    Raises:
        UserError: the kind is unknown, a source is missing or superfluous, or a schema is not JSON.
            Whether it compiles shows when a request is made.
    """

    kind: StructureKind
    source: str = ""
    compact: bool = False

    def __post_init__(self) -> None:
        require(
            self.kind in KINDS, "structured output kind", self.kind, "one of " + ", ".join(KINDS)
        )
        source: Any = self.source
        if self.kind == "json_schema":
            source = _schema(source)
        require(isinstance(source, str), self.kind, source, "text")
        if self.kind == "json":
            require(not source, "source", source, 'none with kind "json"')
        else:
            require(bool(source), self.kind, source, "text that is not empty")
        is_json, compact = self.kind.startswith("json"), self.compact
        ok = isinstance(compact, bool) and (is_json or not compact)
        require(ok, "compact", compact, "true or false, true for JSON only")
        object.__setattr__(self, "source", source)

    @classmethod
    def json_object(cls, *, compact: bool = False) -> StructuredOutput:
        """Allow any JSON object."""
        return cls("json", compact=compact)

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any] | bool, *, compact: bool = False
    ) -> StructuredOutput:
        """Allow JSON that fits a schema."""
        return cls("json_schema", schema, compact)  # type: ignore[arg-type]

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """Allow text that a regular expression matches from its first to its last character."""
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, grammar: str) -> StructuredOutput:
        """Allow text that a grammar in GBNF notation derives from its rule `root`."""
        return cls("ebnf", grammar)

    @classmethod
    def from_vllm(cls, given: Mapping[str, Any], prefix: str = "") -> StructuredOutput:
        """Read a constraint in the names of vLLM's `StructuredOutputsParams`.

        Args:
            given: exactly one of "json" (a schema), "regex", "choice" (the texts that the output
                may be), "grammar" and "json_object", and vLLM's switches. A name whose value is
                None or False counts as left out.
            prefix: the text that messages put before a name, as "guided_" or "structured_outputs.".

        Raises:
            UserError: no constraint or several are given, a value has the wrong type, or a name
                is unknown or not supported.
        """
        given = {k: v for k, v in given.items() if v is not None and v is not False}
        known = [prefix + name for name in (*VLLM_CONSTRAINTS, *_VLLM_SWITCHES)]
        for name in given:
            if name in _VLLM_REFUSED:
                raise UserError(f"{prefix}{name} is not supported: {_VLLM_REFUSED[name]}")
            if prefix + name not in known:
                raise UserError(
                    f"{prefix}{name:.200} is unknown; expected one of {', '.join(known)}."
                    + did_you_mean(prefix + name, known)
                )
        kinds = [name for name in VLLM_CONSTRAINTS if name in given]
        if len(kinds) != 1:
            one_of, found = (
                ", ".join(prefix + kind for kind in group) for group in (VLLM_CONSTRAINTS, kinds)
            )
            raise UserError(f"Expected exactly one of {one_of}; found {found or 'none'}.")
        for name in ("json_object", *_VLLM_SWITCHES):
            require(given.get(name, True) is True, prefix + name, given.get(name), "true or false")
        (kind,) = kinds
        source = given[kind]
        compact = "disable_any_whitespace" in given
        if kind == "json_object":
            return cls.json_object(compact=compact)
        if kind == "json":
            ok = isinstance(source, str | Mapping)
            require(ok, prefix + kind, source, "a JSON schema, as an object or as JSON text")
            return cls.json_schema(source, compact=compact)
        if kind == "choice":
            ok = isinstance(source, list | tuple) and len(source) > 0
            ok = ok and all(isinstance(text, str) and text for text in source)
            require(ok, prefix + kind, source, "a list of texts, none of them empty")
            return cls.regex("|".join(map(re.escape, source)))
        require(isinstance(source, str) and source != "", prefix + kind, source, "text")
        return cls.regex(source) if kind == "regex" else cls.ebnf(source)


def _schema(schema: object) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise UserError(f"json_schema is not JSON: {error}.") from None
        except RecursionError:
            raise UserError("json_schema is nested too deeply; flatten it.") from None
    require(isinstance(schema, Mapping | bool), "json_schema", schema, "a JSON object")
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"json_schema cannot be written as JSON: {error}.") from None
