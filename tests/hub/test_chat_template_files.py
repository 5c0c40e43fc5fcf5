"""A chat template in a file, in place of the model's."""

import pytest

from trioengine import EngineConfig, ModelError
from trioengine.hub.model_info import with_chat_template
from trioengine.testing import simulated_engine
from trioengine.testing.toy_model import toy_model


async def test_the_template_of_a_file_renders_conversations(autojump_clock, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    async with simulated_engine(EngineConfig(model="toy", max_num_seqs=8, chat_template=str(path))) as (engine, _):
        ids = engine.tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
        assert engine.tokenizer.decode(ids) == "<hello>"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% if %}", "the chat template does not compile"),
        ("{{ raise_exception('no') }}", "the chat template does not render a message"),
        ("{{ messages[0].content.x.y }}", "the chat template does not render a message: 'str object' has no"),
        (None, "No such file"),
    ],
)
def test_an_unusable_template_is_refused_by_its_file(tmp_path, source, problem):
    path = tmp_path / "template.jinja"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ModelError) as caught:
        with_chat_template(toy_model(), path)
    assert str(path) in str(caught.value) and problem in str(caught.value)


def test_a_template_gets_the_time(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("{{ strftime_now('%Y') }}")
    assert with_chat_template(toy_model(), path).chat_template.source == path.read_text()


def test_a_template_that_takes_lists_of_parts(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(
        "{{ messages[0].content[0]['text'] + '' if messages[0].content[0] is mapping else raise_exception('') }}"
    )
    assert with_chat_template(toy_model(), path).chat_template.source == path.read_text()
