"""Without Pillow a model of texts runs, and one that sees images says what to install."""

import subprocess
import sys

import pytest
from helpers.torch_driver import load

from trioengine.core.errors import ModelError

PROGRAM = """
import sys
sys.modules["PIL"] = None  # as if it were not there
from trioengine.core.config import WorkerConfig
from trioengine.worker.runner.model_runner import TorchModelRunner
config = WorkerConfig(sys.argv[1], dtype="float32", kv_cache_memory=1 << 20, kernels="torch")
print(TorchModelRunner.load(config, lambda done, total: None).info.model_type)
"""


def test_a_model_of_texts(tiny_llama, tmp_path):
    path = tiny_llama.write(tmp_path / "plain", "plain")
    command = [sys.executable, "-c", PROGRAM, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "llama\n"


def test_a_model_that_sees_images(tiny_smolvlm, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    path = tiny_smolvlm.write(tmp_path / "split", "split")
    with pytest.raises(ModelError) as caught:
        load(path)
    message = "images need Pillow (the extra `vision`), which is not installed: pip install pillow"
    assert str(caught.value) == f"{path}: {message}"
