"""Conversations with images: their token ids, the places of their tiles, and refusals."""

import pytest
from helpers.vision_chat import (
    END,
    IMAGE_TOKEN,
    PROCESSING,
    REFERENCE,
    SMOLVLM,
    TOKENIZER,
    assistant,
    chat_tokenizer,
    image,
    text,
    user,
)
from hypothesis import given
from hypothesis import strategies as st

from trioengine.core.errors import ModelError, RequestRejected
from trioengine.core.image import VISION_MODEL, ImageProcessing
from trioengine.core.types import token_ids
from trioengine.text.chat_tokenizer import TileSpan
from trioengine.text.conversation import Conversation, check_length

CHATS = {name: chat_tokenizer(template) for name, template in REFERENCE["templates"].items()}
CHAT = CHATS["smolvlm"]
PRINTS_ALL = "{% for m in messages %}{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}"
LOOPS_END = "{% endfor %}{% endfor %}"


def parts(content):
    if isinstance(content, str):
        return content
    return [text(part) if isinstance(part, str) else image(*part).part for part in content]


def check_places(prepared):
    """The tiles of the images are the runs of image tokens, and there are no other image tokens."""
    ids = prepared.token_ids.tolist()
    spans = [span for placed in prepared.images for span in placed.spans]
    inside = [index for span in spans for index in range(span.start, span.start + span.length)]
    assert inside == [index for index, token_id in enumerate(ids) if token_id == IMAGE_TOKEN]
    for placed in prepared.images:
        info = placed.image.info
        assert len(placed.spans) == PROCESSING.num_tiles(info.width, info.height)
        assert {span.length for span in placed.spans} == {PROCESSING.tokens_per_tile}


@pytest.mark.parametrize("case", REFERENCE["conversations"])
@pytest.mark.parametrize("template", CHATS)
def test_token_ids_are_those_of_transformers(template, case):
    conversation = REFERENCE["conversations"][case]
    messages = [{"role": message["role"], "content": parts(message["content"])} for message in conversation]
    prepared = Conversation(CHATS[template]).prepare(messages)
    assert prepared.token_ids.tolist() == REFERENCE["ids"][template][case]
    assert CHATS[template].apply_chat_template(messages) == REFERENCE["ids"][template][case]
    given = [part["image"] for message in messages for part in message["content"] if "image" in part]
    assert [placed.image for placed in prepared.images] == given
    check_places(prepared)


def test_places_are_named():
    first, second, third = image(), image(64, 16), image(16, 8)
    conversation = Conversation(CHAT, [user("a", "b", first), assistant("c")])
    prepared = conversation.prepare([user("d"), assistant("e"), user(second, "f", third)])
    assert [(placed.image, placed.name) for placed in prepared.images] == [
        (first, "history[0].content[2]"),
        (second, "prompt[2].content[0]"),
        (third, "prompt[2].content[2]"),
    ]
    assert prepared.images[0].spans[0] == TileSpan(len(TOKENIZER.encode("<|im_start|>User: ab")) + 2, 3)
    check_places(prepared)


# ---- contents and handles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_an_image_token_in_a_text_is_text(chat):
    """Beside an image, without one, and in a field that the template does not print."""
    written = "<image> <fake_token_around_image><global-img><image>"
    for message in [user(written), user(written, image(), written), {**user(image()), "name": "<image>"}]:
        prepared = Conversation(chat).prepare([message])
        check_places(prepared)
        texts = [part["text"] for part in message["content"] if part["type"] == "text"]
        assert chat.decode(prepared.token_ids, skip_special_tokens=False).count(written) == len(texts)
    ids = Conversation(chat).prepare(written).token_ids.tolist()
    assert IMAGE_TOKEN not in ids
    assert Conversation(chat).prepare([{"role": "user", "content": written}]).token_ids.tolist() == ids


def test_templates_see_no_handle():
    """Of an image they see the type alone."""
    source = PRINTS_ALL + "{{ p }}{{ p.image }}{{ p.handle }}" + LOOPS_END
    prepared = Conversation(chat_tokenizer(source)).prepare([user(image(9, 9), "a")])
    shown = CHAT.decode(prepared.token_ids)
    assert shown.endswith("{'type': 'image'}a{'type': 'text', 'text': 'a'}")


def test_contents_of_any_sequence():
    """Messages that are not checked: a tuple of parts is a list of them."""
    messages = [user("a", image(9, 9))]
    tuples = [{**messages[0], "content": tuple(messages[0]["content"])}]
    assert CHAT.apply_chat_template(tuples) == CHAT.apply_chat_template(messages)
    shown = chat_tokenizer(PRINTS_ALL + "{{ p.image }}" + LOOPS_END).apply_chat_template(tuples)
    assert "Image" not in CHAT.decode(shown)


def test_images_are_in_contents_alone():
    for message in [{**user("a"), "x": image()}, {**user("a"), "x": [image().part]}]:
        with pytest.raises(RequestRejected, match=r"prompt\[0\]\.x.* must be a JSON value, got Image"):
            Conversation(CHAT).prepare([message])


def test_a_generated_image_token_is_no_image():
    """It is not in the next prompt; neither is one that ended the answer."""
    for output in ([*TOKENIZER.encode("a"), IMAGE_TOKEN, END], [*TOKENIZER.encode("a"), IMAGE_TOKEN]):
        conversation = Conversation(CHATS["strings and parts"])
        prompt = [user(image(9, 9), "what?")]
        conversation.commit(conversation.prepare(prompt), token_ids(output), "a")
        following = conversation.prepare([user("and", image())])
        check_places(following)
        again = Conversation(CHATS["strings and parts"], [*prompt, assistant("a")]).prepare([user("and", image())])
        assert following.token_ids == again.token_ids


# ---- history, turns and lengths -----------------------------------------------------------------------------------


def test_history_has_the_callers_images():
    first = image()
    conversation = Conversation(CHAT, [user("a", first), assistant("b")])
    assert conversation.history == [user("a", first), assistant("b")]
    conversation.history[0]["content"][1]["image"] = None
    conversation.history[0]["content"].clear()
    assert conversation.history[0]["content"][1]["image"] is first
    assert Conversation(CHAT, [user("a", "b"), assistant("c")]).history[0]["content"] == "ab"
    restored = Conversation(CHAT, conversation.history)
    assert restored.prepare("c").images == conversation.prepare("c").images


EDGES = st.integers(1, 99)


def answered(conversation, prompt, answer):
    prepared = conversation.prepare(prompt)
    conversation.commit(prepared, token_ids([*TOKENIZER.encode(answer), END]), answer)
    return prepared


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@given(st.data())
def test_an_extended_prompt_is_the_whole_one(chat, data):
    """Turn by turn the ids are equal to the whole conversation's. SmolVLM's template puts a space before an output."""
    contents = st.lists(
        st.one_of(
            st.sampled_from(["", "a", "\n", "\n\n", "<image>", "é"]), st.builds(image, *[st.integers(1, 99)] * 2)
        ),
        min_size=1,
        max_size=4,
    )
    conversation, messages = Conversation(chat), []
    for content in data.draw(st.lists(contents, min_size=1, max_size=4)):
        messages.append(user(*content))
        prepared = answered(conversation, messages[-1:], "abc")
        assert prepared.token_ids.tolist() == chat.apply_chat_template(messages)
        check_places(prepared)
        assert [placed.image for placed in prepared.images] == all_images(messages)
        messages.append(assistant("abc"))


def all_images(messages):
    return [part["image"] for message in messages for part in message["content"] if "image" in part]


def test_only_the_extension_is_tokenized(monkeypatch):
    chat = CHATS["strings and parts"]
    conversation = Conversation(chat)
    answered(conversation, [user(image(99, 99), "a")], "b")
    lengths = []
    encode = chat.encode_rendering
    monkeypatch.setattr(chat, "encode_rendering", lambda rendering: lengths.append(len(rendering)) or encode(rendering))
    prepared = conversation.prepare([user("c")])
    assert lengths == [len("\n<|im_start|>user\nc<end_of_utterance>\n<|im_start|>assistant\n")]
    assert len(prepared.images) == 1
    check_places(prepared)


def test_images_of_the_same_size_are_not_mixed_up():
    """A dropped turn leaves the ids of another one, whose text and sizes are the same."""
    chat = CHATS["strings and parts"]
    first, second, third = image(), image(), image()
    conversation = Conversation(chat, [user(first), assistant("a")])
    answered(conversation, [user(second)], "a")
    whole = len(conversation.prepare([user(third)]).token_ids)
    prepared = conversation.prepare([user(third)], whole - 1)
    assert prepared.dropped_turns == 1
    names = ["history[2].content[0]", "prompt[0].content[0]"]
    assert [(placed.image, placed.name) for placed in prepared.images] == [*zip([second, third], names, strict=True)]
    check_places(prepared)
    conversation.commit(prepared, token_ids([END]), "")
    assert all_images(conversation.history) == [second, third]


def test_large_images_are_refused_before_anything_is_tokenized(monkeypatch):
    monkeypatch.setattr(CHAT, "encode_rendering", None)
    num_tokens = PROCESSING.num_tiles(99, 99) * PROCESSING.tokens_per_tile
    prompt = [user(image(99, 99), image(99, 99))]
    check_length(prompt, 2 * num_tokens, CHAT)
    message = f"prompt: at least {2 * num_tokens} tokens, the context is {2 * num_tokens - 1}"
    with pytest.raises(RequestRejected, match=message):
        check_length(prompt, 2 * num_tokens - 1, CHAT)
    check_length([user("a"), "no message", {"content": [5, None]}, {}], 9, CHAT)


def test_turns_with_images_that_cannot_fit_are_not_tokenized(monkeypatch):
    lengths = []
    encode = CHAT.encode_rendering
    monkeypatch.setattr(CHAT, "encode_rendering", lambda rendering: lengths.append(len(rendering)) or encode(rendering))
    conversation = Conversation(CHAT, [message for _ in range(9) for message in (user(image(99, 99)), assistant("a"))])
    prepared = conversation.prepare([user("b")], 40)
    assert (prepared.dropped_turns, prepared.images) == (9, ())
    assert len(lengths) == 1


def test_images_are_work():
    empty = Conversation(CHAT)
    assert empty.work([user(image())]) > 8192 > empty.work([user("a")])
    assert Conversation(CHAT, [user(image())]).work("") > 8192


# ---- refusals -----------------------------------------------------------------------------------------------------

STRINGS = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
NO_IMAGES = {
    f"the model takes no images; {VISION_MODEL} does": chat_tokenizer(SMOLVLM, None),
    "the chat template of the model takes no images": chat_tokenizer(STRINGS),
}
PART = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize("part", [image().part, PART, {"type": "input_image"}, {"type": "image"}])
@pytest.mark.parametrize(("refusal", "chat"), NO_IMAGES.items(), ids=NO_IMAGES)
def test_models_without_images(refusal, chat, part):
    messages = [user("a"), assistant("b"), {"role": "user", "content": [text("c"), part]}]
    with pytest.raises(RequestRejected) as caught:
        Conversation(chat).prepare(messages)
    where = "prompt[2].content[1]"
    assert (caught.value.code, caught.value.param) == ("images_not_supported", where)
    assert caught.value.message == f"{where}: {refusal}"
    assert chat.image_refusal == refusal
    if part.get("image"):
        with pytest.raises(RequestRejected, match=f"messages: {refusal}"):
            chat.apply_chat_template(messages)
    check_length(messages, 3, chat)
    assert "a" in chat.decode(Conversation(chat).prepare([user("a")]).token_ids)


MISPRINTED = {
    "a dropped image": (PRINTS_ALL + "{% if loop.index == 2 %}{% break %}{% endif %}" + LOOPS_END, 2, 3),
    "a repeated image": (PRINTS_ALL + "{{ '<image>' if p.text == 'again' }}" + LOOPS_END, 4, 3),
    "an image of its own": ("{{ '<image>' if messages[1] }}" + PRINTS_ALL + LOOPS_END, 4, 3),
}


@pytest.mark.parametrize(("template", "shown", "count"), MISPRINTED.values(), ids=MISPRINTED)
def test_templates_that_drop_or_repeat_images(template, shown, count):
    chat = chat_tokenizer(template)
    assert chat.image_refusal == ""
    Conversation(chat).prepare([user(image(), "a")])
    with pytest.raises(RequestRejected) as caught:
        Conversation(chat).prepare([user(image(), "again"), assistant("b"), user(image(), "a", image())])
    message = f"messages: the model's chat template shows {shown} images in place of the {count} there are"
    assert (caught.value.code, caught.value.message) == ("template_error", message)


def test_parts_that_are_no_images():
    for part in [PART, {"type": "image"}, {"type": "image", "image": b"PNG"}, {"type": "audio"}, "a", None]:
        with pytest.raises(RequestRejected) as caught:
            Conversation(CHAT).prepare([{"role": "user", "content": [part]}])
        message = "prompt[0].content[0] must be a text part, or an image part with an Image"
        assert (caught.value.message, caught.value.code) == (message, "invalid_value")
    for content in [b"a", None, 5]:
        with pytest.raises(RequestRejected, match="must be a string or a list of parts, got"):
            Conversation(CHAT).prepare([{"role": "user", "content": content}])
    with pytest.raises(RequestRejected, match=r"prompt\[0\]\.content\[1\]\.text is not valid Unicode"):
        Conversation(CHAT).prepare([user(image(), "\ud800")])


def test_image_tokens_are_no_raw_prompt():
    conversation = Conversation(CHAT)
    with pytest.raises(RequestRejected, match=rf"prompt\[1\] is {IMAGE_TOKEN}, the image token"):
        conversation.prepare([END, IMAGE_TOKEN])
    assert conversation.prepare([END]).images == ()


@pytest.mark.parametrize(("token", "token_id"), [("<picture>", IMAGE_TOKEN), ("<image>", END), ("a", 64)])
def test_an_image_token_has_to_be_special(token, token_id):
    images = ImageProcessing(token, token_id, 3, 8, 32, True, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(ModelError, match=f"the image token '{token}' .* is not among the tokenizer's special tokens"):
        chat_tokenizer(SMOLVLM, images)
