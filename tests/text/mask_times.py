"""Time grammars with the tokens of a real model: compiling, and the mask of each token of answers to random schemas.

Usage: python tests/text/mask_times.py [MODEL], with the root and tests in PYTHONPATH. The answers take random tokens
of those that the masks allow; one that grows long hurries to its end. Prints a table in microseconds.
"""

import random
import statistics
import sys
import time

from helpers.json_schemas import make_schema

from trioengine import Grammar, RequestRejected
from trioengine.core.grammar import GrammarFailed
from trioengine.hub.model_info import read_model
from trioengine.hub.pull import resolve
from trioengine.text.grammar import Compiler

SCHEMAS = 300
ANSWERS = 2  # of each schema
PATIENCE = 40  # tokens; then an answer hurries to its end
MAX_TOKENS = 200


def timed(times, function, *args):
    """Call it, and append the microseconds that it took."""
    started = time.perf_counter_ns()
    result = function(*args)
    times.append((time.perf_counter_ns() - started) / 1000)
    return result


def write_answer(matcher, ending, rng, masks):
    """Let an answer follow its grammar, and append the microseconds of each mask."""
    output = []
    while not matcher.is_complete and len(output) < MAX_TOKENS:
        mask = timed(masks, matcher.allowed)
        tokens = [number * 8 + bit for number, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        ends = [token for token in ending if mask[token >> 3] >> (token & 7) & 1] if len(output) > PATIENCE else []
        output.append(ends[0] if ends else rng.choice(tokens))
        matcher.advance(output)


def row(name, times):
    times = sorted(times)
    late = times[len(times) * 99 // 100]
    return f"{name:8} {len(times):6} {statistics.median(times):8.1f} {late:8.1f} {times[-1]:8.1f}"


def main(model="smollm2-135m-instruct"):
    info = read_model(resolve(model))
    compiler = Compiler(info.tokenizer, info.eos_token_ids)
    ending = [info.tokenizer.encode_ordinary(text)[0] for text in ('"', "}", "]")]
    compiles, masks, refused, failed = [], [], 0, 0
    for seed in range(SCHEMAS):
        try:
            grammar = Grammar.json_schema(make_schema(seed))
            matchers = [timed(compiles, compiler.compile, grammar)]
        except RequestRejected:
            refused += 1
            continue
        matchers += [compiler.compile(grammar) for _ in range(ANSWERS - 1)]
        for number, matcher in enumerate(matchers):
            try:
                write_answer(matcher, ending, random.Random(f"{seed} {number}"), masks)
            except GrammarFailed:
                failed += 1
    print(f"{SCHEMAS} schemas, {refused} refused, {failed} answers too complex; {info.tokenizer.vocab_size} tokens")
    print("µs        count   median      99%     most")
    print(row("compile", compiles))
    print(row("mask", masks))


if __name__ == "__main__":
    main(*sys.argv[1:])
