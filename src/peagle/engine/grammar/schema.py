"""JSON schemas for the grammar compiler: checked, and rewritten to what it really enforces.

xgrammar ignores keywords that it cannot express, and some combinations of those it can. An output
that breaks the schema would be worse than a refusal, so each such place is refused by its path
(`#/properties/age`). What stays open: `format` is enforced for the common formats and ignored for
unknown ones, as the standard has it; an object may repeat a key that the schema does not name.
Three rules are stricter than the standard: properties come in the order of the schema, only named
ones unless `additionalProperties` says otherwise, and `pattern` matches the whole string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from peagle.engine.grammar.regex import any_characters, translate
from peagle.errors import UserError

MAX_DEPTH = 64
MAX_PROPERTIES = 1000

_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_TYPE = {
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
_TYPED = {keyword for keywords in _OF_TYPE.values() for keyword in keywords}
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_REFUSED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "additionalItems"),
    *("$dynamicRef", "$recursiveRef", "extends", "disallow"),
)
_COUNTS = ("minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength")
# Their grammars let a bare quote into the string.
_BROKEN_FORMATS = ("json-pointer", "relative-json-pointer")


def prepare_schema(source: str) -> str:
    """The schema as JSON text that xgrammar enforces in full.

    Raises:
        UserError: a keyword, or a combination, cannot be enforced or is not valid; the message has
            its path.
    """
    schema = json.loads(source, parse_constant=_refuse_constant)
    preparation = _Preparation()
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
    return json.dumps(prepared, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise UserError(f"the schema has a number {name}; expected one that JSON can write.")


class _Preparation:
    """Attributes: the schemas seen, by path; references and `oneOf`s with where they stand."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.references: list[tuple[str, str]] = []
        self.one_of: list[tuple[str, list[Any]]] = []

    def schema(self, schema: Any, path: str, depth: int = 0) -> Any:
        """One schema, prepared."""
        if depth > MAX_DEPTH:
            raise UserError(f"{path[:60]}... is more than {MAX_DEPTH} levels deep; flatten it.")
        self.seen[path] = schema
        if schema is True:
            return True
        if schema is False:
            raise UserError(f"{path} is false: nothing fits it; leave the part out.")
        if not isinstance(schema, Mapping):
            raise UserError(f"{path} is {schema!r}; expected a schema: a JSON object.")
        for keyword in _REFUSED:
            if keyword in schema and (keyword != "uniqueItems" or schema[keyword]):
                raise UserError(f"{keyword} at {path} cannot be enforced; leave it out.")
        definitions = {
            key: self.schemas(schema[key], f"{path}/{key}", depth)
            for key in ("$defs", "definitions")
            if key in schema
        }
        whole = [key for key in _WHOLE if key in schema]
        if whole:
            return definitions | self.whole(schema, whole, path, depth)
        return definitions | self.typed(schema, path, depth)

    def schemas(self, values: Any, path: str, depth: int) -> dict[str, Any]:
        """A mapping of names to schemas."""
        if not isinstance(values, Mapping):
            raise UserError(f"{path} is {values!r}; expected a JSON object of schemas.")
        if len(values) > MAX_PROPERTIES:
            raise UserError(f"{path} has {len(values)} entries; expected {MAX_PROPERTIES} at most.")
        return {name: self.schema(v, f"{path}/{name}", depth + 1) for name, v in values.items()}

    def list_of(self, values: Any, path: str, depth: int) -> list[Any]:
        """A list of schemas, not empty."""
        if not isinstance(values, list) or not values:
            raise UserError(f"{path} is {values!r}; expected a list of at least one schema.")
        return [self.schema(v, f"{path}/{i}", depth + 1) for i, v in enumerate(values)]

    def whole(self, schema: Mapping[str, Any], whole: list[str], path: str, depth: int) -> Any:
        """A schema that a reference, a list of values or alternatives make up."""
        (keyword, *more) = whole
        value = schema[keyword]
        beside = [*more, *(k for k in schema if k in _TYPED)]
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
            return {keyword: _values(schema, keyword, path)}
        parts = self.list_of(value, f"{path}/{keyword}", depth)
        if keyword == "allOf" and len(parts) > 1:
            raise UserError(f"allOf at {path} has {len(parts)} parts; merge them into one schema.")
        if keyword == "oneOf":
            self.one_of.append((path, value))
        return {"anyOf": parts} if keyword != "allOf" else {"allOf": parts}

    def typed(self, schema: Mapping[str, Any], path: str, depth: int) -> Any:
        """A schema by type; without one, the types that its keywords are about."""
        types = schema.get("type", [t for t in _OF_TYPE if set(_OF_TYPE[t]) & set(schema)])
        if types == ["number", "integer"]:
            types = "number"
        if types == [] and "type" not in schema:
            return {}
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not types or not all(map(_is_type, types)):
            raise UserError(f"type at {path} is {types!r}; expected {', '.join(_OF_TYPE)}.")
        result: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
        result |= {k: schema[k] for t in types for k in _OF_TYPE[t] if k in schema}
        for key in set(_COUNTS) & set(result):
            if type(result[key]) is not int or result[key] < 0:
                raise UserError(f"{key} at {path} is {result[key]!r}; expected a whole number.")
        if "multipleOf" in result and types != ["integer"]:
            raise UserError(f"multipleOf at {path} can be enforced with type integer only.")
        if "multipleOf" in result and len(set(_NUMBER) & set(result)) > 1:
            raise UserError(f"multipleOf at {path} cannot be enforced beside a range.")
        if "string" in types:
            _prepare_string(result, path)
        if "array" in types:
            self.prepare_array(result, path, depth)
        if "object" in types:
            self.prepare_object(result, path, depth)
        return result

    def prepare_array(self, result: dict[str, Any], path: str, depth: int) -> None:
        """Prepare the schemas within, in place."""
        if "prefixItems" in result:
            result["prefixItems"] = self.list_of(
                result["prefixItems"], f"{path}/prefixItems", depth
            )
        elif "items" not in result and "unevaluatedItems" not in result:
            result["items"] = True  # xgrammar would allow the empty array only
        for key in ("items", "unevaluatedItems"):
            if result.get(key, False) is not False:
                result[key] = self.schema(result[key], f"{path}/{key}", depth + 1)

    def prepare_object(self, result: dict[str, Any], path: str, depth: int) -> None:
        """Prepare the schemas within, in place."""
        properties = result.get("properties", {})
        if "properties" in result:
            result["properties"] = self.schemas(properties, f"{path}/properties", depth)
        for key in ("additionalProperties", "unevaluatedProperties"):
            if result.get(key, False) is not False:
                result[key] = self.schema(result[key], f"{path}/{key}", depth + 1)
        required = result.get("required", [])
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise UserError(f"required at {path} is {required!r}; expected a list of names.")
        missing = [name for name in required if name not in properties]
        if missing:
            raise UserError(f"required at {path} names {missing[0]!r}; add it to the properties.")
        for key in ("patternProperties", "propertyNames"):
            others = ("properties", "patternProperties", "propertyNames", "additionalProperties")
            if key in result and any(result.get(k, False) for k in others if k != key):
                raise UserError(f"{key} at {path} cannot be enforced beside other properties.")
        if "patternProperties" in result:
            place = f"{path}/patternProperties"
            patterns = self.schemas(result["patternProperties"], place, depth)
            if len(patterns) > 1:
                raise UserError(f"{place} has {len(patterns)} patterns; one can be enforced.")
            result["patternProperties"] = {_pattern(p, place): s for p, s in patterns.items()}
        if "propertyNames" in result:
            names = self.schema(result["propertyNames"], f"{path}/propertyNames", depth + 1)
            if not isinstance(names, dict) or not (
                "enum" in names or names.get("type") == "string"
            ):
                raise UserError(f"propertyNames at {path}: expected a schema of strings.")
            result["propertyNames"] = names


def _prepare_string(result: dict[str, Any], path: str) -> None:
    """Lengths become a pattern: xgrammar's own let control characters through."""
    if "pattern" in result:
        result["pattern"] = _pattern(result["pattern"], path)
    least, most = result.pop("minLength", 0), result.pop("maxLength", None)
    if (least, most) != (0, None):
        if "pattern" in result or "format" in result:
            raise UserError(
                f"minLength and maxLength at {path} cannot be enforced beside pattern or format; "
                "count within the pattern."
            )
        if most is not None and most < least:
            raise UserError(f"maxLength at {path} is {most}; expected at least minLength, {least}.")
        result["pattern"] = any_characters(least, most)
    elif "pattern" in result and "format" in result:
        raise UserError(f"format beside pattern at {path} cannot be enforced; leave one out.")
    if result.get("format") in _BROKEN_FORMATS:
        del result["format"]


def _pattern(pattern: Any, path: str) -> str:
    if not isinstance(pattern, str):
        raise UserError(f"pattern at {path} is {pattern!r}; expected text.")
    try:
        return translate(pattern, json_string=True)
    except UserError as error:
        raise UserError(f"pattern {pattern!r} at {path}: {error}") from None


def _values(schema: Mapping[str, Any], keyword: str, path: str) -> Any:
    """The values of `const` or `enum`, of the type beside it if there is one."""
    values = schema["enum"] if keyword == "enum" else [schema["const"]]
    if not isinstance(values, list) or not values:
        raise UserError(f"enum at {path} is {values!r}; expected a list of at least one value.")
    types = schema.get("type", list(_OF_TYPE))
    for value in values:
        if not _types_of(value) & set([types] if isinstance(types, str) else types):
            raise UserError(f"{keyword} at {path} has {value!r}; expected a value of type {types}.")
    return schema[keyword]


def _types_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    kinds = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {kinds[type(value)]}


def _is_type(name: object) -> bool:
    return isinstance(name, str) and name in _OF_TYPE


def _disjoint(left: Any, right: Any, seen: Mapping[str, Any], depth: int = 0) -> bool:
    """Whether no value fits both, by values, types or a required property (a discriminator)."""
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
    types = schema.get("type", "object" if "properties" in schema else list(_OF_TYPE))
    found = {types} if isinstance(types, str) else set(types)
    return found | {"integer"} if "number" in found else found
