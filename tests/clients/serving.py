"""A `trioengine serve` process, its certificate, and the files of its tokenizer."""

import json
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trioengine.hub.model_info import read_model
from trioengine.hub.pull import resolve

MODEL = "smollm2-135m-instruct"
START_TIMEOUT, END_TIMEOUT = 180.0, 45.0  # seconds


@dataclass(frozen=True)
class Certificate:
    """Files in PEM of a certificate for loopback addresses: the chain, its key, and the authority to trust."""

    chain: Path
    key: Path
    authority: Path

    @classmethod
    def made(cls, python, folder):
        """Make one with the package trustme of another environment."""
        command = [
            str(python),
            "-m",
            "trustme",
            "--quiet",
            "--dir",
            str(folder),
            "--identities",
            "127.0.0.1",
            "localhost",
        ]
        subprocess.run(command, check=True)
        return cls(folder / "server.pem", folder / "server.key", folder / "client.pem")


class Server:
    """A running server: its URL without a path, and the check of its books."""

    def __init__(self, url, authority):
        self.url = url
        self.authority = authority

    def check_invariants(self):
        """Raise if a client left anything behind."""
        context = None if self.authority is None else ssl.create_default_context(cafile=self.authority)
        with urllib.request.urlopen(f"{self.url}/debug/invariants", timeout=30, context=context) as response:
            answer = json.load(response)
        statistics = answer["statistics"]
        if not answer["ok"] or statistics["sessions"] > 0:
            raise RuntimeError(f"the client left something behind: {statistics}")


@contextmanager
def served(log, certificate=None):
    """Run `trioengine serve` with the default model on a free port, yield its Server, and end it."""
    command = [sys.executable, "-m", "trioengine", "serve", MODEL, "--port", "0"]
    if certificate is not None:
        command += ["--ssl-certfile", str(certificate.chain), "--ssl-keyfile", str(certificate.key)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Server(_started(process, log), None if certificate is None else certificate.authority)
        finally:
            _end(process)


def _started(process, log):
    """Return the server's URL when it is ready. Raises RuntimeError if it ends, or is not ready in time."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        text = log.read_text()
        if " ready: " in text:
            return re.search(r"listening on (https?://\S+)", text)[1]
        if process.poll() is not None:
            raise RuntimeError(f"the server did not start: {' '.join(text.split())[-400:]}")
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {START_TIMEOUT:g} s; see {log}")


def _end(process):
    process.terminate()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_tokenizer(folder):
    """Write the default model's tokenizer as transformers reads it, for clients that count tokens themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    info = read_model(resolve(MODEL))
    info.tokenizer._tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": info.context_length, **tokens}
    settings["chat_template"] = info.chat_template.source
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
