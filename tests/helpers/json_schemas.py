"""Makes JSON schemas as applications have them, by a seed; of some the compiler supports not every keyword."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERNS = (
    "^[a-z]{2,5}$",
    "^[A-Z]{2}-[0-9]{1,3}$",
    "^(yes|no|maybe)$",
    "^\\d{3}(-\\d{2})?$",
    "^#[0-9a-fA-F]{6}$",
    'say "[a-c]+"',
    "é|ü",
    "^v[0-9]+\\.[0-9]+$",
    "^[^/]*$",
)
WORDS = ("id", "name", "size", "größe", "tags", "kind", "a b", 'quo"te', "x/y", "back\\slash", "", "type", "$ref")
VALUES: tuple[Any, ...] = ("red", "dark blue", "ä\n", "", 0, -7, 2.5, 1e3, True, False, None, [1, "a"], {"k": [None]})
FEW = 3


def make_schema(seed: int) -> Schema:
    """Return the schema of a seed: an object at the top in most, definitions in some."""
    return _Maker(random.Random(seed)).top()


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defs: dict[str, Schema] = {}

    def top(self) -> Schema:
        rng = self._rng
        names = [f"d{number}" for number in range(rng.choice((0, 0, 1, 3)))]
        for name in names:
            self._defs[name] = {}  # so that definitions can refer to all of them
        for name in names:
            self._defs[name] = self._object(2)
        schema = self._object(3) if rng.random() < 0.7 else self._any(3)
        return {**schema, "$defs": self._defs} if names else schema

    def _any(self, depth: int) -> Schema:
        rng = self._rng
        simple = (self._string, self._number, self._integer, self._enum, self._const, self._plain)
        nested = (self._object, self._object, self._array, self._union, self._reference, self._all_of, self._nullable)
        return rng.choice(nested)(depth - 1) if depth > 0 and rng.random() < 0.6 else rng.choice(simple)()

    def _plain(self) -> Schema:
        return {"type": self._rng.choice(("boolean", "null", "string", ["integer", "null"], ["string", "boolean"]))}

    def _string(self) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "string"}
        kind = rng.randrange(4)
        if kind == 0:
            schema["format"] = rng.choice(FORMATS)
        elif kind == 1:
            schema["pattern"] = rng.choice(PATTERNS)
        elif kind == 2:
            schema["minLength"] = rng.randrange(4)
            schema["maxLength"] = schema["minLength"] + rng.randrange(6)
        return schema

    def _number(self) -> Schema:
        rng = self._rng
        low = round(rng.uniform(-1000, 1000), rng.randrange(4))
        schema: Schema = {"type": "number", rng.choice(("minimum", "exclusiveMinimum")): low}
        if rng.random() < 0.7:
            schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((0.5, 1, 10, 12345.678))
        return schema

    def _integer(self) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "integer"}
        if rng.random() < 0.4:
            schema["multipleOf"] = rng.choice((2, 5, 7, 100))
        elif rng.random() < 0.8:
            schema["minimum"] = rng.randrange(-5000, 5000)
            schema["maximum"] = schema["minimum"] + rng.choice((0, 1, 9, 120, 100_000))
        return schema

    def _enum(self) -> Schema:
        rng = self._rng
        if rng.random() < 0.3:
            return {"enum": [f"{rng.choice('abcxyz')}-{number}" for number in range(rng.choice((50, 400)))]}
        return {"enum": rng.sample(VALUES, rng.randrange(1, len(VALUES)))}

    def _const(self) -> Schema:
        return {"const": self._rng.choice(VALUES)}

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(WORDS, rng.randrange(FEW + 2))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        schema["required"] = [name for name in names if rng.random() < 0.6]
        extra = rng.randrange(5)
        if extra < 3:
            schema["additionalProperties"] = False
        elif extra == 3:
            schema["additionalProperties"] = self._any(0)
            if rng.random() < 0.3:
                schema["minProperties"] = 1
        if rng.random() < 0.1:
            schema["patternProperties"] = {"^x-[a-z]{1,3}$": self._any(0)}
        return schema

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        schema: Schema = {"type": "array", "items": self._any(depth)}
        if rng.random() < 0.3:
            schema["prefixItems"] = [self._any(0) for _ in range(rng.randrange(1, FEW))]
        if rng.random() < 0.5:
            schema["minItems"] = rng.randrange(FEW)
            schema["maxItems"] = schema["minItems"] + rng.randrange(FEW)
        if rng.random() < 0.05:
            schema["uniqueItems"] = True
        return schema

    def _union(self, depth: int) -> Schema:
        rng = self._rng
        if rng.random() < 0.5:
            return {"anyOf": [self._any(depth) for _ in range(rng.randrange(1, FEW + 1))]}
        kinds = rng.sample(("circle", "square", "line"), rng.randrange(1, FEW + 1))
        return {"oneOf": [self._tagged(kind, depth) for kind in kinds]}

    def _tagged(self, kind: str, depth: int) -> Schema:
        properties = {"kind": {"const": kind}, "value": self._any(depth)}
        return {"type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}

    def _reference(self, depth: int) -> Schema:
        return {"$ref": f"#/$defs/{self._rng.choice(list(self._defs))}"} if self._defs else self._any(depth)

    def _all_of(self, depth: int) -> Schema:
        first, second = self._object(depth), self._object(depth)
        first.pop("additionalProperties", None)
        second.pop("additionalProperties", None)
        return {"allOf": [first, second]}

    def _nullable(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth), {"type": "null"}]}
