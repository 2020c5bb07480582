"""The grammar of the JSON texts that fit a schema.

Between two parts of an array or object comes nothing, one blank, or a newline and an indent of up
to four blanks or one tab a level: enough for compact and pretty-printed texts, and no more.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.engine.grammar.characters import literal
from peagle.engine.grammar.ebnf import Rules, any_of, join_parts, repeated
from peagle.engine.grammar.formats import FORMATS
from peagle.engine.grammar.numbers import decimals, integers
from peagle.engine.grammar.regex import json_character, translate
from peagle.errors import UserError

# Indents differ, so each level has rules of its own; deeper levels than this share them.
MAX_LEVEL = 4
_DEEPEST = 10  # levels whose indent the shared rules allow
_PLAIN = r"[ !#-\[\]-\uD7FF\uE000-\U0010FFFF]"
# With this look-ahead xgrammar decides at compile time about tokens that begin with blanks.
_AFTER_GAP = r'(=["\-0-9\[\]{}tfn])'
_LONG_NAME = 64
_BLANK = literal(" ")
_HEX = "[0-9A-Fa-f]"
# A surrogate may only come as a pair.
_UNICODE_ESCAPE = (
    f'"\\\\u" ([0-9A-Ca-cEeFf] {_HEX}{{3,3}} | [Dd] [0-7] {_HEX}{{2,2}}'
    f' | [Dd] [89ABab] {_HEX}{{2,2}} "\\\\u" [Dd] [C-Fc-f] {_HEX}{{2,2}})'
)


def json_grammar(schema: Any, parts: Mapping[str, Any], rules: Rules, *, compact: bool) -> str:
    """Return the grammar of a schema that `prepare_schema` returned; `compact` allows no layout.

    Args:
        rules: the rules that `prepare_schema` began.

    Raises:
        UserError: no text fits a part, or there are too many rules.
    """
    return rules.grammar({"root": _JsonWriter(parts, rules, compact).value(schema, 0)})


class _JsonWriter:
    """Its methods return expressions; `level` counts the arrays and objects around a value."""

    def __init__(self, parts: Mapping[str, Any], rules: Rules, compact: bool) -> None:
        self.rules = rules
        self._parts = parts
        self._compact = compact
        self._named: dict[tuple[str, int], str] = {}
        self._numbers: dict[tuple[Any, ...], str] = {}
        escape = self.rules.add(any_of(['"\\\\" ["\\\\/bfnrt]', _UNICODE_ESCAPE]))
        self._character = self.rules.add(f"{_PLAIN} | {escape}")
        # Recursion is many times faster than `*` here: xgrammar sees whole tokens within one rule.
        self._characters = self.rules.reserve()
        self.rules.define(
            self._characters, f'"" | {_PLAIN} {self._characters} | {escape} {self._characters}'
        )

    def value(self, schema: Any, level: int) -> str:
        """Return a value that fits the schema."""
        if schema is True or not schema.keys() - {"$defs", "definitions"}:
            return self._once("", True, level)
        if "$ref" in schema:
            return self._once(schema["$ref"], self._parts[schema["$ref"]], level)
        if "anyOf" in schema:
            return any_of([self.value(part, level) for part in schema["anyOf"]])
        if "enum" in schema:
            return any_of([self.constant(value, level) for value in schema["enum"]])
        return any_of([self.typed(name, schema, level) for name in schema["type"]])

    def _once(self, name: str, schema: Any, level: int) -> str:
        """Return the rule of a schema that may contain itself."""
        key = (name, min(level, MAX_LEVEL))
        if key not in self._named:
            self._named[key] = rule = self.rules.reserve()
            if schema is True:
                anything = {"type": ["object", "array", "string", "number", "boolean", "null"]}
                schema = {**anything, "items": True, "additionalProperties": True}
            self.rules.define(rule, self.value(schema, level))
        return self._named[key]

    def typed(self, name: str, schema: Mapping[str, Any], level: int) -> str:
        """Return a value of one type."""
        match name:
            case "object":
                return self.object(schema, level)
            case "array":
                return self.array(schema, level)
            case "string":
                return self.string(schema)
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
        return self.number(name, schema.get(name, (None, None, 1)), schema)

    def number(self, name: str, bounds: tuple[Any, Any, int], schema: Mapping[str, Any]) -> str:
        """Return a number of type integer or number between bounds."""
        if (name, *bounds) not in self._numbers:
            low, high, multiple = bounds
            if name == "number":
                found = decimals(self.rules, low, high)
            else:
                found = integers(self.rules, low, high, multiple)
            if found is None:
                raise UserError(f"no number fits the bounds at {schema['path']}.")
            self._numbers[name, *bounds] = self.rules.add(found)
        return self._numbers[name, *bounds]

    def string(self, schema: Mapping[str, Any]) -> str:
        """Return a string that fits the schema."""
        if "pattern" in schema:
            inside = schema["pattern"]
        elif "format" in schema:
            pattern = FORMATS[schema["format"]]
            inside = self.rules.add(translate(pattern, self.rules, json_string=True))
        elif schema.keys() & {"minLength", "maxLength"}:
            counts = schema.get("minLength", 0), schema.get("maxLength")
            inside = repeated(self._character, *counts, self.rules)
        else:
            inside = self._characters
        return self.rules.add(join_parts('"\\""', inside, '"\\""'))

    def constant(self, value: Any, level: int) -> str:
        """Return exactly this value, with any layout."""
        if isinstance(value, list):
            return self._enclosed("[]", [self.constant(v, level + 1) for v in value], level)
        if isinstance(value, dict):
            pairs = [self._pair(_quoted(k), self.constant(v, level + 1)) for k, v in value.items()]
            return self._enclosed("{}", pairs, level)
        return _quoted(value)

    def array(self, schema: Mapping[str, Any], level: int) -> str:
        """Return an array: the items of `prefixItems` in their order, then more of one kind."""
        heads = [self.value(item, level + 1) for item in schema.get("prefixItems", ())]
        more = schema.get("items", False)
        more = self.value(more, level + 1) if more is not False else None
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not heads and more and most != 0:
            heads = [more]
        comma = join_parts('","', self.gap(level + 1))
        rest = '""'
        if more and (most is None or most > len(heads)):
            bounds = max(0, least - len(heads)), None if most is None else most - len(heads)
            rest = repeated(join_parts(comma, more), *bounds, self.rules)
        elif least > len(heads):
            raise UserError(f"no array fits minItems {least} at {schema['path']}.")
        for i in reversed(range(len(heads) if most is None else min(len(heads), most))):
            item = join_parts(comma if i else self.gap(level + 1), heads[i], rest)
            rest = self.rules.add(any_of([item, *(['""'] if i >= least else [])]))
        return join_parts('"["', rest, self.gap(level), '"]"')

    def object(self, schema: Mapping[str, Any], level: int) -> str:
        """Return an object: the named properties in their order, then others."""
        named = schema.get("properties", {})
        required = schema.get("required", ())
        others = self._others(schema, level)
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        # The number of properties so far decides what may follow, up to the largest bound.
        counts = range(max(1, min(len(named), max(least, most or 0))) + 1)
        comma = join_parts('","', self.gap(level + 1))
        ends = [n >= least for n in counts]
        mores = [
            self._more(others, comma, least - n, None if most is None else most - n) for n in counts
        ]
        for name, inner in reversed(named.items()):
            pair = self.rules.add(self._pair(_quoted(name), self.value(inner, level + 1)))
            rests = [_rest(comma, more, end) for more, end in zip(mores, ends)]
            skipped, mores = mores, []
            for n in counts:
                options = [skipped[n]] if name not in required else []
                if (most is None or n < most) and (rest := rests[min(n + 1, counts[-1])]):
                    options.append(join_parts(pair, rest))
                options = [option for option in options if option is not None]
                mores.append(self.rules.add(any_of(options)) if options else None)
            ends = [end and name not in required for end in ends]
        inside = _rest(self.gap(level + 1), mores[0], ends[0])
        if inside is None:
            raise UserError(
                f"minProperties at {schema['path']} cannot be enforced: properties that are not "
                "named may repeat one name; name them, or leave it out."
            )
        return join_parts('"{"', inside, self.gap(level), '"}"')

    def _others(self, schema: Mapping[str, Any], level: int) -> str | None:
        """Return a property that the schema does not name; None if none is allowed."""
        if "patternProperties" in schema:
            ((pattern, inner),) = schema["patternProperties"].items()
            return self._pair(f'"\\"" {pattern} "\\""', self.value(inner, level + 1))
        if "propertyNames" in schema:
            return self._pair(
                self.value(schema["propertyNames"], level), self.value(True, level + 1)
            )
        inner = schema.get("additionalProperties", False)
        if inner is False:
            return None
        key = self._other_name(list(schema.get("properties", ())))
        return self._pair(key, self.value(inner, level + 1))

    def _more(self, others: str | None, comma: str, least: int, most: int | None) -> str | None:
        """Return one or more other properties; None if none may come or equal names miscount."""
        if others is None or (most is not None and most < 1) or least > 1:  # names may be equal
            return None
        further = None if most is None else most - 1
        further = repeated(join_parts(comma, others), 0, further, self.rules)
        return self.rules.add(join_parts(others, further))

    def _other_name(self, names: list[str]) -> str:
        """Return a quoted name other than these; without \\u spellings no name can be hidden."""
        if not names:
            return self.rules.add(f'"\\"" {self._characters} "\\""')
        anything = self.rules.reserve()
        self.rules.define(anything, f'"" | {json_character()} {anything}')
        # Each beginning of a name gets a rule for the rest, from the longest to the shortest.
        # Names that begin like a very long one are left out altogether.
        beginnings = sorted(
            {name[:i] for name in names for i in range(min(len(name), _LONG_NAME) + 1)}, key=len
        )
        rules: dict[str, str] = {}
        after: dict[str, list[str]] = {beginning: [] for beginning in beginnings}
        for beginning in reversed(beginnings):
            letters = after[beginning]
            options = [join_parts(json_character(but=letters), anything)]
            options += [
                join_parts(literal(json.dumps(c, ensure_ascii=False)[1:-1]), rules[beginning + c])
                for c in letters
                if len(beginning) + 1 < _LONG_NAME
            ]
            if beginning not in names:
                options.append('""')
            rules[beginning] = self.rules.add(any_of(options))
            if beginning:
                after[beginning[:-1]].append(beginning[-1])
        return self.rules.add(f'"\\"" {rules[""]} "\\""')

    def _enclosed(self, brackets: str, values: Sequence[str], level: int) -> str:
        separator = join_parts('","', self.gap(level + 1))
        inside = [part for value in values for part in (separator, value)][1:]
        opening = self.gap(level + 1) if values else ""
        parts = [literal(brackets[0]), opening, *inside, self.gap(level), literal(brackets[1])]
        return join_parts(*parts)

    def _pair(self, name: str, value: str) -> str:
        blank = "" if self._compact else f"({_BLANK})?"
        return join_parts(name, self.rules.add(join_parts(blank, '":"', blank, value)))

    def gap(self, level: int) -> str:
        """Return the layout allowed between two parts."""
        if self._compact:
            return ""
        level = level if level <= MAX_LEVEL else _DEEPEST
        indent = f'({_BLANK}{{0,{4 * level}}} | "\\t"{{1,{level}}})' if level else ""
        options = any_of(['""', _BLANK, join_parts('"\\n"', indent)])
        return self.rules.add(f"{options} {_AFTER_GAP}")


def _rest(separator: str, more: str | None, end: bool) -> str | None:
    """Return more after a separator, nothing, or either; None if both are impossible."""
    options = [] if more is None else [join_parts(separator, more)]
    if end:
        options.append('""')
    return any_of(options) if options else None


def _quoted(value: Any) -> str:
    """Return a name or a scalar in its JSON form."""
    return literal(json.dumps(value, ensure_ascii=False))
