"""The sampling defaults of a model, from generation_config.json or the metadata of a GGUF file."""

import json

import pytest

from trioengine.core.errors import ModelError
from trioengine.hub.generation_config import sampling_defaults
from trioengine.hub.model_config import Fields


def fields(tmp_path, **values):
    return Fields(tmp_path / "generation_config.json", values)


def test_the_models_own_defaults(tmp_path):
    own = fields(tmp_path, temperature=0.2, top_k=20, top_p=None, max_new_tokens=9, do_sample=True, eos_token_id=2)
    assert sampling_defaults(own, "auto") == {"temperature": 0.2, "top_k": 20, "max_tokens": 9}
    assert sampling_defaults(own, "none") == {}
    assert sampling_defaults(None, "auto") == {}


def test_the_defaults_of_a_gguf_file(tmp_path):
    metadata = {"general.sampling.temp": 0.5, "general.sampling.penalty_repeat": 1.5, "general.name": "x"}
    assert sampling_defaults(Fields(tmp_path / "a.gguf", metadata), "auto") == {
        "temperature": 0.5,
        "repetition_penalty": 1.5,
    }


def test_another_file_or_directory(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"min_p": 0.5}))
    for path in (tmp_path, tmp_path / "generation_config.json"):
        assert sampling_defaults(fields(tmp_path, temperature=0.2), str(path)) == {"min_p": 0.5}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"temperature": -1}, "temperature must be a number from 0 to 100, got -1"),
        ({"top_p": "0.9"}, "top_p must be a number from 0 to 1, got '0.9'"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer from 1 to 2147483647, got 0"),
    ],
)
def test_a_bad_value_is_refused_by_file_and_key(tmp_path, values, problem):
    with pytest.raises(ModelError) as caught:
        sampling_defaults(fields(tmp_path, **values), "auto")
    path = tmp_path / "generation_config.json"
    assert str(caught.value) == f"{path}: {problem}; generation_config=none ignores it"
    assert sampling_defaults(fields(tmp_path, **values), "none") == {}


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="generation_config must be auto, none, or an existing path"):
        sampling_defaults(None, str(tmp_path / "missing"))
