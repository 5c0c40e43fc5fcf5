"""The turns of a conversation: the next prompt after every kind of output, and the checks of messages."""

import threading

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as RawTokenizer

from trioengine import ModelError, RequestRejected
from trioengine.core.types import token_ids
from trioengine.testing import toy_model
from trioengine.testing.toy_model import END_OF_TEXT, IM_END, IM_START
from trioengine.testing.toy_template import CHAT_TEMPLATE
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.conversation import Conversation, check_length, newest_turn
from trioengine.text.tokenizer import Tokenizer

TOY = toy_model()
CHAT = ChatTokenizer(TOY.tokenizer, TOY.chat_template)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def answered(conversation, prompt, output, text=None):
    prepared = conversation.prepare(prompt)
    text = CHAT.decode(output) if text is None else text
    conversation.commit(prepared, token_ids(output), text)
    return text


ENDS = {
    "by its end token": [*b"fine", IM_END],
    "by length": [*b"fine"],
    "by another end token": [*b"fine", END_OF_TEXT],
    "at once": [IM_END],
    "in the middle of a character": [*b"fine", 0xC3],
}


@pytest.mark.parametrize("output", ENDS.values(), ids=ENDS)
def test_the_next_prompt_is_one_rendering_of_all(output):
    """Every token of the toy is a byte, so ids that are kept and ids of the whole rendering are the same."""
    conversation = Conversation(CHAT)
    text = answered(conversation, "how are you?", output, CHAT.decode(output).removesuffix("\ufffd"))
    messages = [user("how are you?"), assistant(text), user("and now?")]
    assert conversation.prepare("and now?").token_ids.tolist() == CHAT.apply_chat_template(messages)
    assert conversation.history == messages[:2]


def test_a_turn_is_tokenized_for_the_next_prompt(monkeypatch):
    decoded = []
    decode = CHAT.decode
    monkeypatch.setattr(CHAT, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    conversation = Conversation(CHAT)
    prepared = conversation.prepare("how are you?")
    output = token_ids([*b"fine"])
    conversation.commit(prepared, output, "fine")
    output.extend([*b", and you?"])  # the caller's ids are not kept
    assert conversation.history == [user("how are you?"), assistant("fine")]
    assert not decoded
    first, second = conversation.prepare("and now?"), conversation.prepare("and now?")
    assert decoded == [len(b"fine")]
    assert first.token_ids == second.token_ids
    assert first.token_ids.tolist() == CHAT.apply_chat_template([*conversation.history, user("and now?")])


INSIDE = {
    "an end token": [*b"fine", IM_END, *b"and"],
    "two, and one at the end": [*b"fine", IM_END, IM_END, *b"and", IM_END],
    "two at the end": [*b"fine", IM_END, IM_END],
    "another one": [*b"fi", IM_START, *b"ne"],
    "at its beginning": [IM_END, *b"fine"],
    "nothing else": [IM_END, END_OF_TEXT, IM_END],
}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("output", INSIDE.values(), ids=INSIDE)
def test_special_tokens_inside_an_answer_are_no_part_of_the_next_prompt(output, skip):
    """They are of no effect in `history` either: hidden, they are not in its text, and shown they are ordinary text."""
    conversation = Conversation(CHAT)
    answered(conversation, "hi", [*b"hello", IM_END])
    answered(conversation, "how are you?", output, CHAT.decode(output, skip_special_tokens=skip))
    expected = Conversation(CHAT, conversation.history).prepare("and now?").token_ids.tolist()
    assert conversation.prepare("and now?").token_ids.tolist() == expected
    answered(conversation, "and now?", [*b"well", IM_END])
    expected = Conversation(CHAT, conversation.history).prepare("then?").token_ids.tolist()
    assert conversation.prepare("then?").token_ids.tolist() == expected


def test_a_real_tokenizer_gives_the_same_prompt_again(smollm2):
    """Where the text around an end token would be other tokens without it."""
    from trioengine.hub.model_info import read_model

    model = read_model(smollm2)
    chat = ChatTokenizer(model.tokenizer, model.chat_template)
    output = chat.encode("The capi<|im_end|>tal is Paris.<|im_end|>\n<|im_start|>user\nAnd?")
    for skip in (True, False):
        conversation = Conversation(chat)
        text = chat.decode(output, skip_special_tokens=skip)
        conversation.commit(conversation.prepare("hi"), token_ids(output), text)
        again = Conversation(chat, conversation.history)
        assert conversation.prepare("more").token_ids == again.prepare("more").token_ids


def test_generated_ids_are_kept_though_the_tokenizer_would_choose_others(smollm2):
    from trioengine.hub.model_info import read_model

    model = read_model(smollm2)
    chat = ChatTokenizer(model.tokenizer, model.chat_template)
    conversation = Conversation(chat)
    letters = [id for letter in "hello" for id in chat.encode(letter)]
    prepared = conversation.prepare("hi")
    conversation.commit(prepared, token_ids(letters), "hello")
    following = conversation.prepare("more").token_ids.tolist()
    assert following[: len(prepared.token_ids) + 5] == [*prepared.token_ids, *letters]
    closing = chat.encode("<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert following[len(prepared.token_ids) + 5 :] == closing


def test_a_stop_string_within_a_token_leaves_the_text_that_was_seen(smollm2):
    from trioengine.hub.model_info import read_model

    model = read_model(smollm2)
    chat = ChatTokenizer(model.tokenizer, model.chat_template)
    conversation = Conversation(chat)
    output = chat.encode("The capital is Paris indeed")
    conversation.commit(conversation.prepare("hi"), token_ids(output), "The capital is Par")
    following = conversation.prepare("more").token_ids.tolist()
    text = chat.decode(following, skip_special_tokens=False)
    assert "assistant\nThe capital is Par<|im_end|>\n<|im_start|>user\nmore" in text
    head = len(conversation.prepare("x").token_ids)
    assert output[:3] == following[following.index(output[0]) :][:3]
    assert head < len(following) + 20


def test_a_template_that_changes_earlier_turns_is_tokenized_whole():
    source = "{% for m in messages %}[{{ m.role }}:{{ m.content | trim }}]{% endfor %}{{ messages | length }}"
    chat = ChatTokenizer(TOY.tokenizer, ChatTemplate(source))
    conversation = Conversation(chat)
    conversation.commit(conversation.prepare("one"), token_ids([*b" two "]), " two ")
    expected = chat.encode("[user:one][assistant:two][user:three]3")
    assert conversation.prepare("three").token_ids.tolist() == expected


def test_prepare_changes_nothing_and_contents_are_checked():
    conversation = Conversation(CHAT, [user("a"), assistant("b")])
    before = conversation.history
    for bad, where in [
        ([user("x"), {"role": "user"}], r"prompt\[1\]\.content"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"prompt\[0\]\.content\[0\]"),
        ([{"content": "x"}], r"prompt\[0\]\.role"),
        ([user("x"), "y"], r"prompt\[1\]"),
        ("", "empty"),
        ([], "empty"),
        ([1], "chat messages"),
    ]:
        with pytest.raises(RequestRejected, match=where):
            conversation.prepare(bad)
    conversation.prepare([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}])
    assert conversation.history == before
    with pytest.raises(RequestRejected, match="history must be"):
        conversation.replace("text")
    assert conversation.history == before
    conversation.replace([])
    assert conversation.prepare([IM_START]).token_ids.tolist() == [IM_START]


def test_special_strings_in_answers_and_prompts_stay_text():
    conversation = Conversation(CHAT)
    answered(conversation, "<|im_end|>", [*b"<|im_start|>", IM_END])
    ids = conversation.prepare("x").token_ids.tolist()
    assert (ids.count(IM_START), ids.count(IM_END)) == (4, 3)


def test_templates_that_refuse_or_break():
    raising = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    broken = ChatTemplate("{{ messages[7].content.x() }}")
    for template, why in [(raising, "roles must alternate"), (broken, "cannot render")]:
        with pytest.raises(RequestRejected, match=why):
            Conversation(ChatTokenizer(TOY.tokenizer, template)).prepare("x")
    with pytest.raises(RequestRejected, match="no chat template"):
        Conversation(ChatTokenizer(TOY.tokenizer, None)).prepare("x")
    with pytest.raises(RequestRejected, match="nothing"):
        Conversation(ChatTokenizer(TOY.tokenizer, ChatTemplate(""))).prepare("x")
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_the_template_cannot_reach_out_and_can_write_json():
    with pytest.raises(RequestRejected, match="cannot render"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render([], add_generation_prompt=True)
    with pytest.raises(RequestRejected, match="cannot render"):
        ChatTemplate("{{ messages.append(1) }}").render([], add_generation_prompt=True)
    rendered = ChatTemplate("{{ bos_token }}{{ messages | tojson }}", bos_token="<s>").render(
        [user("é")], add_generation_prompt=True
    )
    assert rendered == '<s>[{"role": "user", "content": "é"}]'
    assert "im_start" in CHAT_TEMPLATE


def test_names_and_arguments_never_become_special_either():
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.name }}{{ m.calls[0].arguments | tojson }}{% endfor %}"
    )
    conversation = Conversation(ChatTokenizer(TOY.tokenizer, template))
    arguments = {"<|im_end|>": "<|im_start|>"}
    message = {**user("x"), "name": "a<|im_end|>", "calls": [{"arguments": arguments, "index": 3}]}
    ids = conversation.prepare([message]).token_ids.tolist()
    assert [id for id in ids if id >= 256] == [IM_START]
    assert CHAT.decode(ids, skip_special_tokens=False) == '<|im_start|>a<|im_end|>{"<|im_end|>": "<|im_start|>"}'


def test_invalid_text_is_named():
    for prompt, where in [
        ("a\ud800b", r"prompt\[0\]\.content is not valid Unicode"),
        ([{**user("x"), "name": ["\udfff"]}], r"prompt\[0\]\.name\[0\] is not valid"),
    ]:
        with pytest.raises(RequestRejected, match=where):
            Conversation(CHAT).prepare(prompt)


CYCLE: list = []
CYCLE.append(CYCLE)
NO_JSON = [
    (CYCLE, "is nested too deeply"),
    ([[CYCLE, CYCLE], CYCLE], "is nested too deeply"),
    (threading.Lock(), "must be a JSON value, got lock"),
    ({"a": open}, r"prompt\[0\]\.x\.a must be a JSON value"),
    ([b"ab"], r"prompt\[0\]\.x\[0\] must be a JSON value, got bytes"),
    ({1: 2}, "has a key that is not a string: 1"),
    ({"\udfff": 2}, "not valid Unicode"),
]


@pytest.mark.parametrize(("value", "why"), NO_JSON, ids=range(len(NO_JSON)))
def test_values_that_json_does_not_have_are_refused(value, why):
    with pytest.raises(RequestRejected, match=why):
        Conversation(CHAT).prepare([{**user("a"), "x": value}])


def test_messages_are_copied_in_and_out():
    message = {**user("a"), "x": ({"y": [1, 2.5, None, True]},)}
    conversation = Conversation(CHAT, [message])
    expected = [{**user("a"), "x": [{"y": [1, 2.5, None, True]}]}]
    message["x"][0]["y"].append(3)
    assert conversation.history == expected
    conversation.history[0]["x"][0]["y"].append(3)
    assert conversation.history == expected


@pytest.mark.parametrize("prompt", [b"x" * 9999, bytearray(9999), memoryview(b"x" * 9999), {1, 2}, 5, None, object()])
def test_a_prompt_of_no_known_type_is_refused_whatever_its_length(prompt):
    for given in (prompt, newest_turn(prompt)):
        with pytest.raises(RequestRejected, match=f"token ids, got {type(prompt).__name__}"):
            check_length(given, 512, CHAT)


def test_a_prompt_that_is_too_long_by_its_length():
    for prompt in ("x" * 9999, [user("x" * 9999)], [1] * 513, [user("")] * 513):
        with pytest.raises(RequestRejected, match="the context is 512"):
            check_length(prompt, 512, CHAT)
    check_length("x" * 513, 512, CHAT)
    check_length([user("")] * 512, 512, CHAT)


CALLS_TEMPLATE = """{% for message in messages %}{{ message.content }}
{%- for call in message.tool_calls or [] %}({{ call.function | tojson }}){% endfor %}{% endfor %}"""


def called(name="", **arguments):
    call = {"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


HEAVY = {
    "a name": called("x" * 9999),
    "an argument": called(x="x" * 9999),
    "the name of an argument": called(**{"x" * 9999: 1}),
    "many arguments": called(**{f"{number:09}": "" for number in range(999)}),
}


@pytest.mark.parametrize("message", HEAVY.values(), ids=HEAVY.keys())
def test_calls_count_for_the_length_where_the_template_prints_them(message):
    with pytest.raises(RequestRejected, match="the context is 512"):
        check_length([user("a"), message], 512, ChatTokenizer(TOY.tokenizer, ChatTemplate(CALLS_TEMPLATE)))
    check_length([user("a"), message], 512, CHAT)  # its template prints the content alone
    assert Conversation(CHAT).work([message]) >= 8192
    assert Conversation(CHAT, [message]).work("") >= 8192


OTHERS = {
    "reasoning": {**assistant("a"), "reasoning_content": "x" * 9999},
    "a user's name": {**user("a"), "name": "x" * 9999},
    "a user's calls": {**called("x" * 9999), "role": "user"},
    "calls of another form": {**assistant("a"), "tool_calls": [{"function": {"arguments": "x" * 9999}}, "x" * 9999]},
}


@pytest.mark.parametrize("message", OTHERS.values(), ids=OTHERS.keys())
def test_fields_that_a_template_may_leave_out_count_as_work_alone(message):
    check_length([message], 512, ChatTokenizer(TOY.tokenizer, ChatTemplate(CALLS_TEMPLATE)))
    assert Conversation(CHAT).work([message]) >= 9999


def test_values_that_are_not_checked_yet_are_measured_as_well():
    endless: list = []
    endless += [endless, endless]
    for value in (endless, [0] * 10**6, {5: b"x"}, object()):
        message = {**user("a"), "tool_calls": value}
        check_length([message], 512, ChatTokenizer(TOY.tokenizer, ChatTemplate(CALLS_TEMPLATE)))
        assert Conversation(CHAT).work([message]) > 16


def test_messages_without_text_count_as_work():
    empty = Conversation(CHAT)
    assert empty.work([user("")] * 1000) >= 10_000
    assert Conversation(CHAT, [user("")] * 1000).work("") >= 10_000
    assert empty.work("abc") == empty.work([1, 2, 3]) == 3


def test_token_ids_may_have_holes():
    raw = RawTokenizer(models.BPE(vocab={"a": 0, "b": 300}, merges=[]))
    conversation = Conversation(ChatTokenizer(Tokenizer(raw), None))
    assert conversation.prepare([300, 0]).token_ids.tolist() == [300, 0]
    with pytest.raises(RequestRejected, match="from 0 to 300"):
        conversation.prepare([301])


@pytest.mark.parametrize("special", [True, False])
def test_a_prompt_with_a_token_that_the_model_has_not(special):
    """An ordinary added token is one wherever it stands; a special one only where the template has it."""
    raw = RawTokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    raw.add_tokens([AddedToken("<pad>", special=special, normalized=False)])
    template = ChatTemplate("{{ messages[0].content }}{% if messages[1] %}<pad>{% endif %}")
    chat = ChatTokenizer(Tokenizer(raw, vocab_size=2), template)
    conversation = Conversation(chat)
    assert conversation.prepare("ab").token_ids.tolist() == [0, 1]
    for prompt in [[user("a"), user("b")], *([] if special else ["a<pad>"])]:
        with pytest.raises(RequestRejected, match="prompt: token 2 is beyond the model's vocabulary of 2") as caught:
            conversation.prepare(prompt)
        assert (caught.value.code, caught.value.param) == ("invalid_value", "prompt")
    with pytest.raises(RequestRejected, match=r"prompt\[1\] must be a token id from 0 to 1, got 2"):
        conversation.prepare([1, 2])
    assert chat.encode("<pad>") == [2]
