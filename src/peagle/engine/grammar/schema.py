"""JSON schemas for the grammar compiler: checked, and reduced to the parts that the grammar needs.

An output that breaks the schema would be worse than a refusal, so each keyword of JSON Schema draft
2020-12 that restricts values is enforced or refused by its path (`#/properties/age`). Annotations
and keywords that the draft does not know are ignored, as the draft demands.

Some rules are stricter than the draft: properties come in the order of the schema, and only named
ones unless `additionalProperties` allows others; `pattern` matches the whole string; a schema
without `type` admits the types that its keywords are about; integers have 64 bits, or 9 digits
beside `multipleOf`. An object may repeat a key that the schema does not name.
"""

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from itertools import combinations
from typing import Any

from peagle.engine.grammar.ebnf import Rules
from peagle.engine.grammar.formats import FORMATS
from peagle.engine.grammar.numbers import INT64
from peagle.engine.grammar.regex import translate
from peagle.errors import UserError

MAX_DEPTH = 64
MAX_PROPERTIES = 1000
# The grammar has a rule for each remainder and each number of digits.
MAX_MULTIPLE = 1024
MAX_OF_MULTIPLES = 10**9 - 1

_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPE_KEYS = {
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    ),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": (),
    "null": (),
}
_TYPED_KEYS = {keyword for keywords in _TYPE_KEYS.values() for keyword in keywords}
_WHOLE_KEYWORDS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_REFUSED_KEYWORDS = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "additionalItems"),
    *("$dynamicRef", "$recursiveRef", "extends", "disallow"),
)
_WITHOUT_RULES = ("password",)  # formats for display, which restrict nothing
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")


def prepare_schema(source: str, rules: Rules) -> tuple[Any, dict[str, Any]]:
    """Return the schema with only the keywords that restrict values, and its parts by path.

    Args:
        rules: takes the rules of its patterns, which are returned as EBNF expressions.

    Raises:
        UserError: a keyword, or a combination, cannot be enforced or is not valid; the message has
            its path.
    """
    source.encode()  # surrogates raise a ValueError
    schema = json.loads(source, parse_constant=_refuse_constant)
    preparation = _Preparation(rules)
    prepared = preparation.schema(schema, "#")
    for place, target in preparation.references:
        if target not in preparation.seen:
            raise UserError(
                f'$ref at {place} is {target!r}; expected "#" or the path of a part of this '
                "schema, such as #/$defs/name."
            )
    for place, parts in preparation.one_of:
        pairs = combinations(parts, 2)
        if not all(_disjoint(a, b, preparation.seen) for a, b in pairs):
            raise UserError(
                f"oneOf at {place}: the alternatives may overlap, and that no more than one fits "
                "cannot be enforced; use anyOf."
            )
    return prepared, preparation.prepared


def _refuse_constant(name: str) -> None:
    raise UserError(f"the schema has a number {name}; expected one that JSON can write.")


class _Preparation:
    """Collects schemas by path, given and prepared; references and `oneOf`s with their paths."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.seen: dict[str, Any] = {}
        self.prepared: dict[str, Any] = {}
        self.references: list[tuple[str, str]] = []
        self.one_of: list[tuple[str, list[Any]]] = []

    def schema(self, schema: Any, path: str, depth: int = 0) -> Any:
        """Return one schema, prepared."""
        prepared = self.prepared[path] = self._checked(schema, path, depth)
        return prepared

    def _checked(self, schema: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UserError(f"{path[:60]}... is more than {MAX_DEPTH} levels deep; flatten it.")
        self.seen[path] = schema
        if schema is True:
            return True
        if schema is False:
            raise UserError(f"{path} is false: nothing fits it; leave the part out.")
        if not isinstance(schema, Mapping):
            raise UserError(f"{path} is {schema!r}; expected a schema: a JSON object.")
        for keyword in _REFUSED_KEYWORDS:
            if keyword in schema and (keyword != "uniqueItems" or schema[keyword]):
                raise UserError(f"{keyword} at {path} cannot be enforced; leave it out.")
        for key in ("$defs", "definitions"):
            if key in schema:
                self.schemas(schema[key], f"{path}/{key}", depth)
        whole = [key for key in _WHOLE_KEYWORDS if key in schema]
        if whole:
            return self.whole(schema, whole, path, depth)
        return self.typed(schema, path, depth)

    def schemas(self, values: Any, path: str, depth: int) -> dict[str, Any]:
        """Return the prepared schemas of a mapping from names."""
        if not isinstance(values, Mapping):
            raise UserError(f"{path} is {values!r}; expected a JSON object of schemas.")
        if len(values) > MAX_PROPERTIES:
            raise UserError(f"{path} has {len(values)} entries; expected {MAX_PROPERTIES} at most.")
        return {name: self.schema(v, f"{path}/{name}", depth + 1) for name, v in values.items()}

    def list_of(self, values: Any, path: str, depth: int) -> list[Any]:
        """Return the prepared schemas of a list, which is not empty."""
        if not isinstance(values, list) or not values:
            raise UserError(f"{path} is {values!r}; expected a list of at least one schema.")
        return [self.schema(v, f"{path}/{i}", depth + 1) for i, v in enumerate(values)]

    def whole(self, schema: Mapping[str, Any], whole: list[str], path: str, depth: int) -> Any:
        """Return a prepared schema made of a reference, a list of values or alternatives."""
        (keyword, *more) = whole
        value = schema[keyword]
        beside = [*more, *(k for k in schema if k in _TYPED_KEYS)]
        if "type" in schema and keyword not in ("const", "enum"):
            beside.append("type")
        if beside:
            raise UserError(
                f"{', '.join(beside)} beside {keyword} at {path} cannot be enforced; write all of "
                f"it into the {'parts' if keyword[-2:] == 'Of' else 'schema or the values'}."
            )
        if keyword == "$ref":
            if not isinstance(value, str) or not (value == "#" or value.startswith("#/")):
                raise UserError(f'$ref at {path} is {value!r}; expected "#" or "#/...".')
            self.references.append((path, value))
            return {"$ref": value}
        if keyword in ("const", "enum"):
            return {"enum": _values(schema, keyword, path)}
        parts = self.list_of(value, f"{path}/{keyword}", depth)
        if keyword == "allOf" and len(parts) > 1:
            raise UserError(f"allOf at {path} has {len(parts)} parts; merge them into one schema.")
        if keyword == "oneOf":
            self.one_of.append((path, value))
        return {"anyOf": parts}

    def typed(self, schema: Mapping[str, Any], path: str, depth: int) -> Any:
        """Return a prepared schema by type; without `type`, by the types of its keywords."""
        types = schema.get("type", [t for t in _TYPE_KEYS if set(_TYPE_KEYS[t]) & set(schema)])
        if types == [] and "type" not in schema:
            return True
        types = [types] if isinstance(types, str) else types
        is_listed = isinstance(types, list) and types and all(isinstance(t, str) for t in types)
        if not is_listed or not set(types) <= _TYPE_KEYS.keys():
            raise UserError(f"type at {path} is {types!r}; expected {', '.join(_TYPE_KEYS)}.")
        if "number" in types:
            types = [name for name in types if name != "integer"]
        result: dict[str, Any] = {"type": types, "path": path}
        result |= {k: schema[k] for t in types for k in _TYPE_KEYS[t] if k in schema}
        _check_counts(result, path)
        for kind in ("number", "integer"):
            if kind in types:
                result[kind] = _bounds(result, kind, path)
        if "string" in types:
            _check_string(result, path, self.rules)
        if "array" in types:
            self.prepare_array(result, path, depth)
        if "object" in types:
            self.prepare_object(result, path, depth)
        return result

    def prepare_array(self, result: dict[str, Any], path: str, depth: int) -> None:
        """Prepare the schemas of an array in place."""
        if "prefixItems" in result:
            result["prefixItems"] = self.list_of(
                result["prefixItems"], f"{path}/prefixItems", depth
            )
        for key in ("items", "unevaluatedItems"):
            if result.get(key, False) is not False:
                result[key] = self.schema(result[key], f"{path}/{key}", depth + 1)
        others = result.get("unevaluatedItems", "prefixItems" not in result)
        result.setdefault("items", others)

    def prepare_object(self, result: dict[str, Any], path: str, depth: int) -> None:
        """Prepare the schemas of an object in place."""
        given = dict(result)
        properties = result.get("properties", {})
        if "properties" in result:
            result["properties"] = self.schemas(properties, f"{path}/properties", depth)
        for key in ("additionalProperties", "unevaluatedProperties"):
            if result.get(key, False) is not False:
                result[key] = self.schema(result[key], f"{path}/{key}", depth + 1)
        others = result.get("unevaluatedProperties", "properties" not in result)
        result.setdefault("additionalProperties", others)
        required = result.get("required", [])
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise UserError(f"required at {path} is {required!r}; expected a list of names.")
        missing = [name for name in required if name not in properties]
        if missing:
            raise UserError(f"required at {path} names {missing[0]!r}; add it to the properties.")
        for key in ("patternProperties", "propertyNames"):
            others = [
                *("properties", "patternProperties", "propertyNames"),
                *("additionalProperties", "unevaluatedProperties"),
            ]
            if key in result and any(given.get(k, False) for k in others if k != key):
                raise UserError(f"{key} at {path} cannot be enforced beside other properties.")
        if "patternProperties" in result:
            place = f"{path}/patternProperties"
            patterns = self.schemas(result["patternProperties"], place, depth)
            if len(patterns) > 1:
                raise UserError(f"{place} has {len(patterns)} patterns; one can be enforced.")
            result["patternProperties"] = {
                _pattern(pattern, place, self.rules): inner for pattern, inner in patterns.items()
            }
        if "propertyNames" in result:
            names = self.schema(result["propertyNames"], f"{path}/propertyNames", depth + 1)
            if not _is_of_strings(names):
                raise UserError(f"propertyNames at {path}: expected a schema of strings.")
            result["propertyNames"] = names


def _is_of_strings(schema: Any) -> bool:
    return isinstance(schema, Mapping) and (
        schema.get("type") == ["string"]
        or all(isinstance(value, str) for value in schema.get("enum", [None]))
    )


def _bounds(schema: Mapping[str, Any], kind: str, path: str) -> tuple[Any, Any, int]:
    """Return the least and the greatest number, None without one, and their divisor."""
    for key in _NUMBER:
        value = schema.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{key} at {path} must be a number; it is {value!r}.")
        if kind == "integer" and value != int(value):
            raise UserError(f"{key} at {path} is {value!r}; expected a whole number.")
        if kind == "integer" and not INT64[0] <= value <= INT64[1]:
            raise UserError(f"{key} at {path} is {value!r}, which exceeds 64 bits.")
    multiple = schema.get("multipleOf", 1)
    if kind == "number" and "multipleOf" in schema:
        raise UserError(f"multipleOf at {path} can be enforced with type integer only.")
    if not 1 <= multiple <= MAX_MULTIPLE:
        raise UserError(
            f"multipleOf at {path} is {multiple!r}; a whole number from 1 to {MAX_MULTIPLE} can be "
            "enforced."
        )
    lows = [_bound(schema[k], kind, k[0] == "e") for k in _NUMBER[:3:2] if k in schema]
    highs = [_bound(schema[k], kind, -(k[0] == "e")) for k in _NUMBER[1:4:2] if k in schema]
    if kind == "integer":
        lows.append(INT64[0] if multiple == 1 else -MAX_OF_MULTIPLES)
        highs.append(INT64[1] if multiple == 1 else MAX_OF_MULTIPLES)
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise UserError(
            f"the bounds at {path} have a minimum greater than maximum: {low} and {high}."
        )
    return low, high, int(multiple)


def _bound(value: float, kind: str, beyond: int) -> Any:
    """Return the bound, or the nearest other number above (`beyond` 1) or below (-1) it."""
    if kind == "integer":
        return int(value) + beyond
    if beyond:
        value = math.nextafter(value, math.inf * beyond)
    # Readers take the nearest double for a text, and doubles of this size are whole.
    return Decimal(value) if abs(value) >= 2**53 else Decimal(repr(value))


def _check_counts(result: dict[str, Any], path: str) -> None:
    """Turn the counts of a schema into whole numbers in place; refuse other values."""
    for key in set(_COUNTS) & set(result):
        if isinstance(result[key], float) and result[key].is_integer():
            result[key] = int(result[key])  # JSON Schema takes 129.0 for 129
        if type(result[key]) is not int or result[key] < 0:
            raise UserError(f"{key} at {path} is {result[key]!r}; expected a whole number.")
    for least, most in zip(_COUNTS[::2], _COUNTS[1::2]):
        if result.get(least, 0) > result.get(most, result.get(least, 0)):
            raise UserError(
                f"{most} at {path} is {result[most]}; expected at least {least}, {result[least]}."
            )


def _check_string(schema: dict[str, Any], path: str, rules: Rules) -> None:
    """Check the keywords of a string, and prepare its pattern in place."""
    given = [k for k in ("pattern", "format") if k in schema]
    if given and (schema.get("minLength", 0) or "maxLength" in schema):
        raise UserError(
            f"minLength and maxLength at {path} cannot be enforced beside pattern or format; "
            "count within the pattern."
        )
    if len(given) > 1:
        raise UserError(f"format beside pattern at {path} cannot be enforced; leave one out.")
    if "pattern" in schema:
        schema["pattern"] = _pattern(schema["pattern"], path, rules)
    if schema.get("format") in _WITHOUT_RULES:
        del schema["format"]
    if "format" in schema and schema["format"] not in FORMATS:
        raise UserError(
            f"format at {path} is {schema['format']!r}, which cannot be enforced; expected "
            f"{', '.join(FORMATS)}, or none."
        )


def _pattern(pattern: Any, path: str, rules: Rules) -> str:
    if not isinstance(pattern, str):
        raise UserError(f"pattern at {path} is {pattern!r}; expected text.")
    try:
        return translate(pattern, rules, json_string=True)
    except UserError as error:
        raise UserError(f"pattern {pattern!r} at {path}: {error}") from None


def _values(schema: Mapping[str, Any], keyword: str, path: str) -> Any:
    """Return the values of `const` or `enum`; refuse a value of another type than `type`."""
    values = schema["enum"] if keyword == "enum" else [schema["const"]]
    if not isinstance(values, list) or not values:
        raise UserError(f"enum at {path} is {values!r}; expected a list of at least one value.")
    types = schema.get("type", list(_TYPE_KEYS))
    for value in values:
        if not _types_of(value) & set([types] if isinstance(types, str) else types):
            raise UserError(f"{keyword} at {path} has {value!r}; expected a value of type {types}.")
    return values


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def _disjoint(left: Any, right: Any, seen: Mapping[str, Any], depth: int = 0) -> bool:
    """Return whether no value fits both, by values, types or a required discriminator property."""
    left, right = _resolved(left, seen), _resolved(right, seen)
    if not isinstance(left, Mapping) or not isinstance(right, Mapping) or depth > MAX_DEPTH:
        return False
    values = [_listed(left), _listed(right)]
    if values[0] is not None and values[1] is not None:
        return not any(a == b for a in values[0] for b in values[1])
    types = [_possible_types(left), _possible_types(right)]
    if not types[0] & types[1]:
        return True
    if types[0] | types[1] != {"object"}:
        return False
    shared = set(left.get("required", ())) & set(right.get("required", ()))
    return any(
        _disjoint(left["properties"][name], right["properties"][name], seen, depth + 1)
        for name in shared
    )


def _resolved(schema: Any, seen: Mapping[str, Any]) -> Any:
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        schema = seen[schema["$ref"]]
    return True  # references in a circle


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _possible_types(schema: Mapping[str, Any]) -> set[str]:
    listed = _listed(schema)
    if listed is not None:
        return set().union(*(_types_of(value) for value in listed))
    types = schema.get("type", "object" if "properties" in schema else list(_TYPE_KEYS))
    found = {types} if isinstance(types, str) else set(types)
    return found | {"integer"} if "number" in found else found
