"""A tokenizer may mark the tags of reasoning and tool calls as special tokens: they stay in the text of an answer."""

import json

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from trioengine import SamplingParams
from trioengine.core.types import token_ids
from trioengine.testing.toy_tokenizer import IM_END, tokenizer_json
from trioengine.text.output import OutputText
from trioengine.text.reasoning import REASONING_FORMS, AnswerForm, AnswerParser, Reasoning
from trioengine.text.tokenizer import Tokenizer
from trioengine.text.tool_calls import HERMES, CallArguments, CallBegin

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
ANSWER = '<think>why<|im_end|></think>so\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
FORM = AnswerForm(HERMES, REASONING_FORMS["qwen3"])


def byte_level():
    source = json.loads(tokenizer_json())
    like = source["added_tokens"][0]
    source["added_tokens"] += [{**like, "id": 259 + at, "content": tag} for at, tag in enumerate(TAGS)]
    return Tokenizer.from_json(json.dumps(source))


def with_byte_fallback():
    vocabulary = {character: index for index, character in enumerate(sorted({*map(chr, range(32, 127)), "\n"}))}
    raw = RawTokenizer(models.BPE(vocabulary, []))
    raw.add_special_tokens([AddedToken(tag, special=True) for tag in (*TAGS, "<|im_end|>")])
    raw.decoder = decoders.Fuse()
    return Tokenizer(raw)


@pytest.fixture(params=[byte_level, with_byte_fallback])
def tokenizer(request):
    return request.param()


@pytest.mark.parametrize("step", [1, 3, 99])
def test_an_answer_is_split_at_special_tags(tokenizer, step):
    ids = tokenizer.encode(ANSWER)
    assert len(tokenizer.special_ids & {*ids}) == 5
    output = OutputText(tokenizer, SamplingParams(), [IM_END])
    parser, parts = AnswerParser(FORM), []
    for start in range(0, len(ids), step):
        output.feed(token_ids(ids[start : start + step]))
        parts += parser.feed("".join(output.texts))
        output.texts.clear()
    output.flush()
    parts += [*parser.feed(output.text), *parser.finish()]
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == "why"
    assert "".join(part for part in parts if isinstance(part, str)).strip() == "so"
    assert [part for part in parts if isinstance(part, CallBegin)] == [CallBegin("f")]
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == "{}"


def test_other_special_tokens_are_left_out(tokenizer):
    ids = tokenizer.encode(ANSWER)
    assert tokenizer.decode(ids) == ANSWER.replace("<|im_end|>", "")
    assert tokenizer.decode(ids, skip_special_tokens=False) == ANSWER
    assert tokenizer.decode(ids * 200) == ANSWER.replace("<|im_end|>", "") * 200
