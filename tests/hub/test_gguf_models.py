"""GGUF models, the real one first; each field that can be wrong is named."""

import math
import os
import re
import struct
from dataclasses import replace

import pytest

from trioengine.core.errors import ModelError
from trioengine.hub.checkpoint import GGUF_ARCHITECTURES, read_gguf
from trioengine.hub.known_models import GEMMA3, SMOLLM2
from trioengine.hub.model_info import ModelFormat, ModelInfo, read_model, with_chat_template


def test_smollm2(smollm2):
    model = read_model(smollm2)
    assert (model.path, model.format, model.model_type) == (smollm2, ModelFormat.GGUF, "llama")
    assert (model.context_length, model.vocab_size, model.eos_token_ids) == (8192, 49152, (2,))
    assert model.tokenizer.encode("<|im_start|>user\nHello<|im_end|>") == [1, 4093, 198, 19556, 2]
    rendered = model.chat_template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_pulled_file_that_is_damaged_has_a_remedy(smollm2, tmp_path, monkeypatch):
    whole = smollm2.read_bytes()
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path))
    pulled, other = tmp_path / SMOLLM2.location, tmp_path / "other.gguf"
    pulled.parent.mkdir()
    for size in (0, 100, len(whole) - 1):
        for path in (pulled, other):
            path.write_bytes(whole[:size])
        remedy = "; remove it and run `trioengine pull smollm2-135m-instruct`"
        with pytest.raises(ModelError, match=f"{re.escape(str(pulled))}: .*{remedy}$"):
            read_model(pulled)
        with pytest.raises(ModelError) as caught:
            read_model(other)
        assert remedy not in str(caught.value)


SUPPORTED = ", ".join(GGUF_ARCHITECTURES)
COUNT = "must be an integer from 1 to 2147483647"
TOKENS = ["a", "b", "ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 2,
    "llama.feed_forward_length": 3,
    "llama.block_count": 1,
    "llama.attention.head_count": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 3, 1],
    "tokenizer.ggml.bos_token_id": 4,
    "tokenizer.ggml.eos_token_id": 5,
    "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}",
}


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def typed(content):
    """(number of the type, bytes) of a value."""
    if isinstance(content, str):
        return 8, string(content)
    if isinstance(content, list):
        kind = typed(content[0])[0] if content else 4
        return 9, struct.pack("<IQ", kind, len(content)) + b"".join(typed(one)[1] for one in content)
    return (4, struct.pack("<I", content)) if isinstance(content, int) else (6, struct.pack("<f", content))


def shapes(rows):
    """The tensors of METADATA, by name."""
    names = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    layer = [(2,), (2, 2), (2, 2), (2, 2), (2, 2), (2,), (3, 2), (3, 2), (2, 3)]
    blocks = {f"blk.0.{name}.weight": shape for name, shape in zip(names, layer, strict=True)}
    return {"token_embd.weight": (rows, 2), "output_norm.weight": (2,), **blocks}


def write_gguf(path, changes, tensors=None):
    """METADATA with changes (None leaves a key out), and tensors of zeros."""
    metadata = {key: content for key, content in (METADATA | changes).items() if content is not None}
    entries = b""
    for key, content in metadata.items():
        kind, data = typed(content)
        entries += string(key) + struct.pack("<I", kind) + data
    tensors, infos, end = shapes(7) if tensors is None else tensors, b"", 0
    for name, shape in tensors.items():
        infos += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, end)
        end += (4 * math.prod(shape) + 31) // 32 * 32
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)) + entries + infos
    path.write_bytes(head)
    os.truncate(path, (len(head) + 31) // 32 * 32 + end)
    return path


def gguf_model(tmp_path, changes=None, tensors=None):
    return read_model(write_gguf(tmp_path / "some.gguf", changes or {}, tensors))


def test_a_gguf_file(tmp_path):
    model = gguf_model(tmp_path)
    tokenizer, template = model.tokenizer, model.chat_template
    shown = replace(model, bos_token="", eos_token="")
    assert shown == ModelInfo(tmp_path / "some.gguf", ModelFormat.GGUF, "llama", 64, 7, (5, 3), template, tokenizer)
    assert model.bos_token == "<|im_start|>"
    assert tokenizer.encode("ab<|im_end|>b") == [2, 5, 1]
    assert template.render([{"content": "x"}], add_generation_prompt=False) == "<|im_start|>x<|im_end|>"


def test_a_model_without_a_chat_template(tmp_path):
    assert gguf_model(tmp_path, {"tokenizer.chat_template": None}).chat_template is None


@pytest.fixture
def pulled(tmp_path, monkeypatch):
    """Write a file to the place where the file of Gemma 3 270M is after a pull."""
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path))
    path = tmp_path / GEMMA3.location
    path.parent.mkdir()
    return lambda changes: write_gguf(path, changes)


SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": " Hi\n"}
ANSWER = {"role": "assistant", "content": " Hello "}
RESULT = {"role": "tool", "content": "42"}
ASKED, BRIEFLY = "<start_of_turn>user\nHi<end_of_turn>\n", "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
ANSWERED, BEGUN = "<start_of_turn>model\nHello<end_of_turn>\n", "<start_of_turn>model\n"


@pytest.mark.parametrize(
    ("messages", "turns"),
    [
        ([QUESTION], ASKED),
        ([SYSTEM, QUESTION], BRIEFLY),
        ([SYSTEM, QUESTION, ANSWER, QUESTION], BRIEFLY + ANSWERED + ASKED),
        ([QUESTION, ANSWER, RESULT], ASKED + ANSWERED + "<start_of_turn>user\n42<end_of_turn>\n"),
    ],
)
def test_gemmas_turns_are_the_chat_template_of_a_pulled_file_without_one(pulled, messages, turns):
    template = read_model(pulled({"tokenizer.chat_template": None})).chat_template
    closed = f"{TOKENS[METADATA['tokenizer.ggml.bos_token_id']]}{turns}"
    assert template.render(messages, add_generation_prompt=False) == closed
    assert template.render(messages, add_generation_prompt=True) == closed + BEGUN


def test_other_chat_templates_are_preferred_to_that_of_a_known_model(pulled, tmp_path):
    own = read_model(pulled({}))
    assert own.chat_template.source == METADATA["tokenizer.chat_template"]
    (tmp_path / "given.jinja").write_text("given {{ messages[0].content }}")
    given = with_chat_template(read_model(pulled({"tokenizer.chat_template": None})), tmp_path / "given.jinja")
    assert given.chat_template.source == "given {{ messages[0].content }}"


def test_a_vocabulary_padded_in_the_embedding(tmp_path):
    assert gguf_model(tmp_path, tensors=shapes(8)).vocab_size == 8
    assert gguf_model(tmp_path, tensors=shapes(7 + 4096)).vocab_size == 7 + 4096


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (5, 3)),
        ({"tokenizer.ggml.unknown_token_id": 3}, (5,)),  # as in SmolLM2
        ({"tokenizer.ggml.eot_token_id": 6, "tokenizer.ggml.eom_token_id": 2}, (5, 6, 2, 3)),
        ({"tokenizer.ggml.eos_token_id": 3}, (3, 5)),
        ({"tokenizer.ggml.eos_token_id": None}, (5, 3)),
        ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.token_type": [1] * 7}, (2,)),  # <|im_end|> is ordinary text
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.token_type": None}, ()),
    ],
)
def test_the_end_tokens(tmp_path, changes, expected):
    assert gguf_model(tmp_path, changes).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split.count": 3}, "split.count: a model split into several files is not supported"),
        ({"general.architecture": None}, f"general.architecture None is not supported; supported: {SUPPORTED}"),
        ({"general.architecture": 3}, f"general.architecture 3 is not supported; supported: {SUPPORTED}"),
        (
            {"general.architecture": "mamba", "llama.context_length": None, "tokenizer.ggml.model": "none"},
            f"general.architecture 'mamba' is not supported; supported: {SUPPORTED}",
        ),
        ({"llama.context_length": None}, f"llama.context_length {COUNT}, got None"),
        ({"llama.context_length": 0}, f"llama.context_length {COUNT}, got 0"),
        ({"llama.context_length": 0.5}, f"llama.context_length {COUNT}, got 0.5"),
        ({"llama.attention.head_count": [1]}, f"llama.attention.head_count {COUNT}, got <array of length 1>"),
        ({"llama.attention.head_count": "1"}, f"llama.attention.head_count {COUNT}, got '1'"),
        ({"llama.attention.head_count_kv": 2}, "llama.attention.head_count_kv must divide the number of heads, 1"),
        ({"llama.attention.key_length": 3}, "llama.attention.key_length must be even, got 3"),
        ({"llama.block_count": 2**31 - 1}, "llama.block_count must be at most the number of tensors, 11"),
        ({"llama.block_count": 2**31}, f"llama.block_count {COUNT}, got 2147483648"),
        ({"llama.rope.dimension_count": 1}, "llama.rope.dimension_count must be the size of a head, 2, got 1"),
        ({"llama.rope.freq_base": "x"}, "llama.rope.freq_base must be a number above 0"),
        ({"llama.rope.freq_base": math.inf}, "llama.rope.freq_base must be a number above 0"),
        (
            {"llama.rope.scaling.type": "su"},
            "rope scaling 'su' is not supported in GGUF files; supported: none, linear",
        ),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported in GGUF files"),
        ({"llama.rope.scaling.factor": -1.0}, "llama.rope.scaling.factor must be a number above 0"),
        ({"llama.rope.scaling.factor": "4"}, "llama.rope.scaling.factor must be a number above 0"),
        ({"llama.rope.scale_linear": math.nan}, "llama.rope.scale_linear must be a number above 0"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert', which is not supported"),
        ({"tokenizer.ggml.pre": "other"}, "tokenizer.ggml.pre is 'other', which is not supported"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "tokenizer.ggml.pre is <array of length 1>, which is not supported"),
        ({"tokenizer.ggml.pre": "x" * 9999}, "tokenizer.ggml.pre is 'xxx"),
        ({"tokenizer.ggml.model": "x" * 9999}, "tokenizer.ggml.model is 'xxx"),
        ({"tokenizer.ggml.pre": "\x1b[2J" * 99}, r"tokenizer.ggml.pre is '\x1b[2J\x1b[2J"),
        ({"general.architecture": "x" * 9999}, "general.architecture 'xxx"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges has "),
        ({"tokenizer.ggml.token_type": 3}, "tokenizer.ggml.token_type is not a list"),
        ({"tokenizer.ggml.eos_token_id": 7}, "tokenizer.ggml.eos_token_id must be a token id below 7, got 7"),
        ({"tokenizer.ggml.eos_token_id": "</s>"}, "tokenizer.ggml.eos_token_id must be a token id below 7"),
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template must be a string of at most 1 MiB, got 3"),
        ({"tokenizer.chat_template": "{% if"}, "the chat template does not compile"),
        ({"tokenizer.chat_template": "{{ " + "(" * 3000 + ")" * 3000 + " }}"}, "the chat template does not compile"),
        ({"tokenizer.chat_template": "{{ " + "-" * 5000 + "1 }}"}, "the chat template does not compile"),
        ({"tokenizer.chat_template": "{% include " + "x" * 9999}, "the chat template does not compile"),
    ],
)
def test_a_bad_gguf_key_is_named(tmp_path, changes, message):
    with pytest.raises(ModelError) as caught:
        gguf_model(tmp_path, changes)
    assert str(caught.value).startswith(f"{tmp_path / 'some.gguf'}: {message}")
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("rows", [6, 7 + 4097, 1 << 28])
def test_an_embedding_that_does_not_fit_the_vocabulary(tmp_path, rows):
    """A file with holes may have any size."""
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.tokens has 7 tokens, token_embd\.weight {rows}$"):
        gguf_model(tmp_path, tensors=shapes(rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.0.attn_q.bias": (2,)}, "missing tensors: 'model.layers.0.self_attn.k_proj.bias', "),
        ({"model.norm.weight": (2,)}, "tensors 'output_norm.weight' and 'model.norm.weight' are the same one"),
        ({"blk.0.attn_sinks\x07": (1,)}, r"unexpected tensors: 'blk.0.attn_sinks\x07'"),
        ({"token_embd.weight": (7,)}, "tensor token_embd.weight is missing or not a matrix"),
    ],
)
def test_tensors_that_do_not_fit_the_model(tmp_path, changes, message):
    with pytest.raises(ModelError) as caught:
        gguf_model(tmp_path, tensors=shapes(7) | changes)
    assert str(caught.value).startswith(f"{tmp_path / 'some.gguf'}: {message}")


def with_experts(**changes):
    """METADATA and tensors of an OLMoE with three experts; changed shapes by the stems of names."""
    keys = {f"olmoe.{key.removeprefix('llama.')}": value for key, value in METADATA.items() if key.startswith("llama.")}
    counts = {"general.architecture": "olmoe", "olmoe.expert_count": 3, "olmoe.expert_used_count": 2}
    dense = {name: shape for name, shape in shapes(7).items() if ".ffn_" not in name or "norm" in name}
    stacks = {"ffn_gate_exps": (3, 3, 2), "ffn_up_exps": (3, 3, 2), "ffn_down_exps": (3, 2, 3), "ffn_gate_inp": (3, 2)}
    layer = {"attn_q_norm": (2,), "attn_k_norm": (2,), **stacks, **changes}
    return keys | counts, dense | {f"blk.0.{name}.weight": shape for name, shape in layer.items()}


def test_stacks_of_experts(tmp_path):
    """Each expert has tensors of its own, which lie in the stack one after the other."""
    path = write_gguf(tmp_path / "some.gguf", *with_experts())
    with memoryview(path.read_bytes()) as buffer:
        tensors = read_gguf(buffer, path).tensors
    parts = [tensors[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] for expert in range(3)]
    assert {(part.stored_name, part.shape, part.nbytes) for part in parts} == {
        ("blk.0.ffn_down_exps.weight", (2, 3), 24)
    }
    assert [part.offset - parts[0].offset for part in parts] == [0, 24, 48]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ffn_up_exps": (3, 6)}, "tensor 'blk.0.ffn_up_exps.weight' has 2 dimensions, not 3"),
        ({"ffn_up_exps": (2, 3, 2)}, "missing tensors: 'model.layers.0.mlp.experts.2.up_proj.weight'"),
        ({"ffn_up_exps": (4, 3, 2)}, "unexpected tensors: 'model.layers.0.mlp.experts.3.up_proj.weight'"),
        ({"ffn_up_exps": (1 << 28, 1, 1)}, "the model has more than 100000 tensors"),
        ({"ffn_gate_up_exps": (3, 6, 2)}, "unexpected tensors: 'blk.0.ffn_gate_up_exps.weight'"),
        ({"ffn_up_shexp": (3, 2)}, "unexpected tensors: 'blk.0.ffn_up_shexp.weight'"),
    ],
)
def test_stacks_that_do_not_fit_the_model(tmp_path, changes, message):
    with pytest.raises(ModelError) as caught:
        gguf_model(tmp_path, *with_experts(**changes))
    assert str(caught.value).startswith(f"{tmp_path / 'some.gguf'}: {message}")


def test_files_of_another_format(tmp_path):
    path = tmp_path / "some.gguf"
    with pytest.raises(ModelError, match=r"some\.gguf: No such file"):
        read_model(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"some\.gguf: the file is empty"):
        read_model(path)
    path.write_bytes(b"PK\3\4")
    with pytest.raises(ModelError, match=r"some\.gguf: not a GGUF file"):
        read_model(path)
