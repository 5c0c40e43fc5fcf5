"""The names, paths and hub ids of models, and the errors for other names."""

from pathlib import Path

import pytest

from trioengine.core.errors import ModelError
from trioengine.hub.known_models import GEMMA3, KNOWN_MODELS, SMOLLM2, trioengine_home
from trioengine.hub.pull import locate, pull, resolve

# ---- names and paths -----------------------------------------------------------------------------------------------


def test_the_known_models():
    assert KNOWN_MODELS == {"smollm2-135m-instruct": SMOLLM2, "gemma3-270m": GEMMA3}
    with pytest.raises(ModelError, match="unknown model 'other': known are gemma3-270m, smollm2-135m-instruct"):
        pull("other")


def test_a_known_name_in_any_case_is_its_pulled_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path))
    path = tmp_path / SMOLLM2.location
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert resolve("SmolLM2-135M-Instruct") == pull("SMOLLM2-135m-instruct") == path


def test_the_home_directory(monkeypatch):
    monkeypatch.setenv("TRIOENGINE_HOME", "/models")
    assert trioengine_home() == Path("/models")
    monkeypatch.setenv("TRIOENGINE_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert trioengine_home() == Path("/caches/trioengine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/users/me")
    assert trioengine_home() == Path("/users/me/.cache/trioengine")


def test_files_and_directories(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(file)) == resolve("~/model.gguf") == file
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("missing.gguf", "'missing.gguf': no such file"),
        ("some/missing.gguf", "no such file"),
        ("some/MISSING.GGUF", "no such file"),
        ("./missing", "no such file"),
        ("/missing", "no such file"),
        ("~/missing", "no such file"),
        ("~no-such-user-here/missing", "home"),
        ("a" * 5000, "File name too long"),
        (
            "gpt5",
            r"unknown model 'gpt5': MODEL may be a known name \(gemma3-270m, smollm2-135m-instruct\), a \.gguf file",
        ),
        ("SmolVLM-256M-Instruct", r"hub id \(org/name, as HuggingFaceTB/SmolVLM-256M-Instruct\)"),
        ("a/b/c", "unknown model"),
        ("", "the model's name is empty"),
        ("\0", "unknown model"),
    ],
)
def test_other_names_are_refused(model, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        resolve(model)
    assert len(str(caught.value)) < 600


def test_files_and_directories_of_another_kind(tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(ModelError, match=r"notes\.txt: not a \.gguf file; for safetensors give the directory"):
        resolve(str(tmp_path / "notes.txt"))
    with pytest.raises(ModelError, match=r"the directory has no config\.json"):
        resolve(str(tmp_path))


def test_locate_downloads_nothing(tmp_path):
    assert locate("SmolLM2-135M-Instruct") is None
    assert locate("org/Model-1.5") is None
    (tmp_path / "config.json").write_text("{}")
    assert locate(str(tmp_path)) == tmp_path


# ---- hub ids -------------------------------------------------------------------------------------------------------

RESOLVE_HUB_ID = """
from trioengine.core.errors import ModelError; from trioengine.hub.pull import resolve
try: print(resolve('org/Model-1.5'))
except ModelError as exc: print(exc)
"""

REFUSED = "raise FileNotFoundError('Got: x') from ConnectionRefusedError(111, 'Connection refused')"
ANSWERED = """
    class Answered(Exception):
        response = type("", (), dict(status_code={}))
    raise FileNotFoundError('Got: x') from Answered()"""


def test_a_hub_id_without_the_hubs_client(run_python):
    assert "pip install huggingface_hub" in run_python(RESOLVE_HUB_ID, "-S")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("print(name, *allow_patterns); return directory", "org/Model-1.5 *.json *.safetensors *.jinja tokenizer*"),
        ("raise OSError('no\\nhttps://user@hub/x')", "org/Model-1.5 cannot be fetched from the hub: no\n"),
        ("raise KeyError('at https://u:p@hub/x')", "hub: 'at <address>'\n"),
        ("raise KeyError", "hub: no reason was given\n"),
        ("raise FileNotFoundError", "hub: check the network, and that HF_HUB_OFFLINE is not set\n"),
        (
            "raise FileNotFoundError('Got: no proxy\\nso')",
            "hub: no proxy; check the network, and that HF_HUB_OFFLINE is not set\n",
        ),
        (REFUSED, "hub: it cannot be reached: Connection refused; check the network\n"),
        (ANSWERED.format(404), "hub: model not found, or it requires a login (HTTP 404)\n"),
        (ANSWERED.format(401), "hub: model not found, or it requires a login (HTTP 401)\n"),
        (ANSWERED.format(403), "hub: the login has no access to it (HTTP 403)\n"),
        (ANSWERED.format(500), "hub: HTTP 500\n"),
        ("return directory + '/none'", "the directory has no config.json"),
    ],
)
def test_a_hub_id_goes_through_the_hubs_client(tmp_path, run_python, body, said):
    """A client of three lines stands in for huggingface_hub, which the tests' environment need not have."""
    (tmp_path / "config.json").write_text("{}")
    client = f"directory = {str(tmp_path)!r}\ndef snapshot_download(name, *, allow_patterns):\n    {body}\n"
    (tmp_path / "huggingface_hub.py").write_text(client)
    assert said in run_python(f"sys.path.insert(0, {str(tmp_path)!r})\n{RESOLVE_HUB_ID}", "-S")
