"""Directories with a vision model: the properties that are read, and the errors for unusable files."""

import json
import math

import pytest
from helpers import tiny_smolvlm

from trioengine.core.errors import ModelError
from trioengine.core.image import ImageProcessing
from trioengine.hub.idefics3_config import VisionConfig, config_from_hf
from trioengine.hub.model_config import Fields
from trioengine.hub.model_info import read_model

HALF = (0.5, 0.5, 0.5)


@pytest.fixture
def directory(tmp_path):
    return tiny_smolvlm.write(tmp_path, "split")


def change(path, changes, *inside):
    """Set fields of a JSON file, or of an object inside of it; None removes a field."""
    content = json.loads(path.read_text())
    fields = content
    for name in inside:
        fields = fields[name]
    fields.update(changes)
    for name in [name for name, value in changes.items() if value is None]:
        del fields[name]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("model_type", ["idefics3", "smolvlm"])
def test_the_configuration_of_a_vision_model(directory, model_type):
    change(directory / "config.json", {"model_type": model_type})
    model = read_model(directory)
    assert (model.model_type, model.context_length, model.vocab_size) == (model_type, 1024, 320)
    assert model.eos_token_ids == (259,)
    assert model.images == ImageProcessing(
        "<image>", 261, 16, 32, 96, True, HALF, HALF, rescale_factor=0.00392156862745098, resample=1
    )


def test_a_processor_with_all_fields_in_one_file(directory):
    """Newer models have this file; its fields count, not those in the older file."""
    preprocessor = json.loads((directory / "preprocessor_config.json").read_text())
    expected = read_model(directory).images
    change(directory / "processor_config.json", {"image_processor": preprocessor})
    change(directory / "preprocessor_config.json", {"size": {"longest_edge": 32}})
    assert read_model(directory).images == expected
    (directory / "preprocessor_config.json").unlink()
    assert read_model(directory).images == expected


def test_absent_fields_have_the_defaults_of_transformers(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text("{}")
    fields = {
        "model_type": "idefics3",
        "text_config": {"vocab_size": 128259, "num_attention_heads": None},
        "vision_config": {"image_size": 364, "patch_size": 14},
    }
    config = config_from_hf(Fields(tmp_path / "config.json", fields), 1000)
    assert config.vision == VisionConfig(1152, 3072, 12, 16, 364, 14, 1e-6)
    assert (config.text.hidden_size, config.text.num_heads, config.text.num_kv_heads) == (4096, 32, 32)
    assert (config.scale_factor, config.images.image_token_id) == (2, 128257)
    assert config.images == ImageProcessing("<image>", 128257, 169, 364, 1456, True, HALF, HALF)


# As published: the fields that the model depends on, and some that it does not.
SMOLVLM_256M = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49190,
    "model_type": "idefics3",
    "scale_factor": 4,
    "text_config": {
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pixel_shuffle_factor": 4,
        "qk_layer_norms": False,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "use_resampler": False,
        "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "use_cache": False,
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "model_type": "idefics3",
        "num_attention_heads": 12,
        "patch_size": 16,
        "size": {"longest_edge": 2048},
        "tie_word_embeddings": False,
        "use_base_siglip": False,
    },
    "vocab_size": 49280,
}
SMOLVLM2_500M = SMOLVLM_256M | {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "text_config": SMOLVLM_256M["text_config"]
    | {
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_attention_heads": 15,
        "num_hidden_layers": 32,
        "num_key_value_heads": 5,
    },
    "vision_config": SMOLVLM_256M["vision_config"] | {"model_type": "smolvlm_vision"},
}
SMOLVLM_2B = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_seq_len": 81,
    "image_token_id": 49153,
    "model_type": "idefics3",
    "scale_factor": 3,
    "text_config": {
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 16384,
        "model_type": "llama",
        "num_hidden_layers": 24,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 273768.0,
        "vocab_size": 49155,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "max_image_size": {"longest_edge": 384},
        "model_type": "idefics3",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}
PREPROCESSOR = {"do_pad": True, "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}}
PUBLISHED = {  # config.json, tile, longest edge, tokens of a tile, parameters of the published weights
    "SmolVLM-256M": (SMOLVLM_256M, 512, 2048, 64, 256_484_928),
    "SmolVLM2-500M": (SMOLVLM2_500M, 512, 2048, 64, 507_482_304),
    "SmolVLM-2.2B": (SMOLVLM_2B, 384, 1536, 81, 2_246_272_880),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(tmp_path, name):
    config_json, tile, edge, tokens, num_parameters = PUBLISHED[name]
    preprocessor = PREPROCESSOR | {"max_image_size": {"longest_edge": tile}, "size": {"longest_edge": edge}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_len": tokens}))
    config = config_from_hf(Fields(tmp_path / "config.json", config_json), 1000)
    assert config.images.tokens_per_tile == tokens
    assert sum(map(math.prod, config.wanted_tensors().values())) == num_parameters


def test_the_chat_template_of_the_processor(directory):
    """A processor's own file comes before the tokenizer's, and chat_template.jinja before both."""
    change(directory / "tokenizer_config.json", {"chat_template": "tokenizer"})
    assert render(directory) != "tokenizer"
    change(directory / "chat_template.json", {"chat_template": "processor"})
    assert render(directory) == "processor"
    (directory / "chat_template.jinja").write_text("jinja")
    assert render(directory) == "jinja"
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.json").unlink()
    assert render(directory) == "tokenizer"
    (directory / "chat_template.json").write_text('{"chat_template": "{% if"}')
    with pytest.raises(ModelError, match=r"chat_template\.json: the chat template does not compile"):
        read_model(directory)


def render(directory):
    content = [{"type": "text", "text": "hello"}]
    template = read_model(directory).chat_template
    return template.render([{"role": "user", "content": content}], add_generation_prompt=False)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tied_head_is_the_whole_model_s(directory, is_tied):
    change(directory / "config.json", {"tie_word_embeddings": True})
    change(directory / "config.json", {"tie_word_embeddings": not is_tied}, "text_config")
    read_model(directory)  # lm_head.weight is there and is not needed


CONFIG, VISION, TEXT = ("config.json",), ("config.json", "vision_config"), ("config.json", "text_config")
PREPROCESSING, PROCESSOR = ("preprocessor_config.json",), ("processor_config.json",)
REFUSED = [
    (CONFIG, {"scale_factor": 3}, "scale_factor must divide the patches of an edge, 8, got 3"),
    (CONFIG, {"image_token_id": 320}, "image_token_id must be a token id below 320, got 320"),
    (CONFIG, {"image_token_id": None}, "image_token_id must be a token id below 320, got 128257"),
    (CONFIG, {"vision_config": 3}, "vision_config must be an object, got 3"),
    (TEXT, {"model_type": "qwen2"}, "text_config.model_type 'qwen2' is not supported; supported: llama"),
    (TEXT, {"hidden_size": "48"}, r"text_config.hidden_size must be an integer from 1 to \d+, got '48'"),
    (TEXT, {"num_hidden_layers": None}, r"missing tensors: 'model\.text_model\.layers\.3\.input_layernorm"),
    (VISION, {"hidden_act": "relu"}, "vision_config.hidden_act 'relu' is not supported; supported: gelu_pytorch_tanh"),
    (VISION, {"num_channels": 1}, "vision_config.num_channels must be 3, got 1"),
    (VISION, {"num_attention_heads": 5}, "vision_config.num_attention_heads must divide hidden_size, 32, got 5"),
    (VISION, {"num_hidden_layers": 10**6}, r"vision_config.num_hidden_layers must be at most the number of tensors"),
    (VISION, {"image_size": 5000}, "vision_config.image_size must be at most 4096, got 5000"),
    (VISION, {"image_size": [32, 32]}, r"vision_config.image_size must be an integer from 1 to \d+, got \[32, 32\]"),
    (VISION, {"patch_size": 33}, "vision_config.patch_size must be at most image_size, 32, got 33"),
    (VISION, {"layer_norm_eps": -1}, "vision_config.layer_norm_eps must be a number above 0"),
    (
        VISION,
        {"hidden_size": 64},
        r"tensor model.connector.* has the shape \[48, 128\], not \[48, 256\]",
    ),
    (PROCESSOR, {"image_seq_len": 64}, "image_seq_len must be the image tokens of a tile, 16, got 64"),
    (PREPROCESSING, {"do_resize": False}, "do_resize must be true, got False"),
    (PREPROCESSING, {"do_normalize": "yes"}, "do_normalize must be true or false, got 'yes'"),
    (PREPROCESSING, {"max_image_size": {}}, "max_image_size.longest_edge must be the vision model's, 32, got 364"),
    (PREPROCESSING, {"size": {"longest_edge": 1025}}, "size.longest_edge must be at most 32 tiles of 32, got 1025"),
    (PREPROCESSING, {"size": {"longest_edge": 0}}, "size.longest_edge must be an integer from 1"),
    (PREPROCESSING, {"image_mean": [0.5, 0.5]}, r"image_mean must be 3 numbers from -1000000.0 to 3.4e\+38, got \[0.5"),
    (PREPROCESSING, {"image_mean": 0.5}, "image_mean must be 3 numbers"),
    (PREPROCESSING, {"image_std": [0.5, 0, 1]}, "image_std must be 3 numbers from 1e-06"),
    (PREPROCESSING, {"image_std": [0.5, "1", 1]}, "image_std must be 3 numbers"),
    (PREPROCESSING, {"rescale_factor": 0}, "rescale_factor must be a number above 0"),
    (PREPROCESSING, {"resample": 6}, "resample must be the number of a filter, below 6, got 6"),
    (PREPROCESSING, {"resample": True}, "resample must be the number of a filter, below 6, got True"),
]


@pytest.mark.parametrize(("place", "changes", "message"), REFUSED, ids=[str(refused[1]) for refused in REFUSED])
def test_unsupported_configurations_are_refused(directory, place, changes, message):
    file, *inside = place
    change(directory / file, changes, *inside)
    with pytest.raises(ModelError, match=message) as caught:
        read_model(directory)
    assert str(directory) in str(caught.value)


def test_a_tokenizer_without_the_image_token(directory):
    change(directory / "config.json", {"image_token_id": 262})
    with pytest.raises(ModelError, match=r"tokenizer\.json: .* <image> must have .* image_token_id, 262, got 261"):
        read_model(directory)


def test_a_directory_without_a_preprocessor(directory):
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"preprocessor_config\.json: No such file"):
        read_model(directory)
