"""Answers that follow schemas are valid by them, as another library judges; and grammars beyond the limits."""

import json
import random
import re

import pytest
from helpers.json_schemas import make_schema
from jsonschema import Draft202012Validator

from trioengine import Grammar, RequestRejected
from trioengine.testing.toy_model import END_OF_TEXT, IM_END, toy_compile

SCHEMAS = 300
ANSWERS = 3  # of each schema
PATIENCE = 150  # tokens; then an answer hurries to its end
MAX_TOKENS = 1500
ENDING = [IM_END, END_OF_TEXT, *b'"}]']


def allowed_tokens(mask):
    return [number * 8 + bit for number, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def write_answer(matcher, rng):
    """Return an answer of random tokens, or None if it becomes too long."""
    output = []
    while not matcher.is_complete and len(output) < MAX_TOKENS:
        tokens = allowed_tokens(matcher.allowed())
        ending = [token for token in ENDING if token in tokens]
        hurry = len(output) > PATIENCE or rng.random() < 0.25
        output.append(ending[0] if ending and hurry else rng.choice(tokens))
        matcher.advance(output)
    if not matcher.is_complete:
        return None
    return bytes(token for token in output if token < 256).decode()


def test_answers_are_valid_by_their_schemas():
    finished, refused = 0, []
    for seed in range(SCHEMAS):
        schema = make_schema(seed)
        Draft202012Validator.check_schema(schema)
        try:
            grammar = Grammar.json_schema(schema)
            matchers = [toy_compile(grammar) for _ in range(ANSWERS)]
        except RequestRejected as exc:
            refused.append(f"{seed}: {exc.message}")
            assert exc.code == "invalid_grammar" and re.search(r"[a-z]+ [a-z]+", exc.message)
            continue
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for number, matcher in enumerate(matchers):
            text = write_answer(matcher, random.Random(f"{seed} {number}"))
            if text is not None:
                finished += 1
                errors = [error.message for error in validator.iter_errors(json.loads(text))]
                assert not errors, f"schema {seed} {json.dumps(schema)}: {text!r}: {errors}"
    print(finished, len(refused), *refused, sep="\n")
