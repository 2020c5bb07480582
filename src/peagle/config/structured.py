"""What shape an output must have: JSON, a JSON schema, a regular expression or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from peagle.config.checks import require
from peagle.errors import UserError

StructureKind = Literal["json", "json_schema", "regex", "ebnf"]
KINDS: tuple[StructureKind, ...] = ("json", "json_schema", "regex", "ebnf")


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
        """Any JSON object."""
        return cls("json", compact=compact)

    @classmethod
    def json_schema(
        cls, schema: str | Mapping[str, Any] | bool, *, compact: bool = False
    ) -> StructuredOutput:
        """JSON that fits a schema."""
        return cls("json_schema", schema, compact)  # type: ignore[arg-type]

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """Text that a regular expression matches from its first to its last character."""
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, grammar: str) -> StructuredOutput:
        """Text that a grammar in GBNF notation derives from its rule `root`."""
        return cls("ebnf", grammar)


def _schema(schema: object) -> str:
    """A schema as JSON text."""
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
