"""The command line `llm`, with the server as an extra model of OpenAI's API."""

import json
import os
import subprocess
import sys
from pathlib import Path

from report import BASE_URL, FOLDER, MODEL, report

USER = Path(FOLDER) / "llm"
QUESTION = "Name the capital of France."
MODELS = f"""
- model_id: local
  model_name: {MODEL}
  api_base: {BASE_URL}/v1
  supports_tools: true
  supports_schema: true
- model_id: text
  model_name: {MODEL}
  api_base: {BASE_URL}/v1
  completion: true
"""
TOOL = "def weather(city: str) -> str:\n    return 'clear'\n"


def llm(*arguments, given=None):
    """Run the command and return its output. Raises AssertionError with its errors if it fails."""
    variables = os.environ | {"LLM_USER_PATH": str(USER)}
    command = [sys.executable, "-m", "llm", *arguments]
    done = subprocess.run(command, env=variables, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr.strip() or done.stdout.strip()
    return done.stdout


GREEDY = ("-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "48")


def models():
    assert "local" in llm("models", "list")


def prompt():
    assert "Paris" in llm("prompt", *GREEDY, "--no-stream", QUESTION)


def streamed():
    assert "Paris" in llm("prompt", *GREEDY, QUESTION)


def system_prompt():
    assert llm("prompt", *GREEDY, "-s", "Answer in one word.", QUESTION).strip()


def continued():
    """The conversation of the last call goes on."""
    assert llm("prompt", "-c", "-o", "temperature", "0", "-o", "max_tokens", "16", "And of Italy?").strip()


def chat():
    assert "Paris" in llm("chat", *GREEDY, given=f"{QUESTION}\nexit\n")


def schema():
    assert json.loads(llm("prompt", *GREEDY, "--schema", "city, country", QUESTION)).keys() == {"city", "country"}


def tools():
    """The model may call the tool or not."""
    assert llm("prompt", *GREEDY, "--functions", TOOL, "How is the weather in Rome?").strip()


def text_completion():
    assert "5" in llm("prompt", "-m", "text", "-o", "temperature", "0", "-o", "max_tokens", "8", "1, 2, 3, 4,")


USER.mkdir()
(USER / "extra-openai-models.yaml").write_text(MODELS)
report(
    {
        "models": models,
        "prompt": prompt,
        "streamed": streamed,
        "system prompt": system_prompt,
        "continued": continued,
        "chat": chat,
        "schema": schema,
        "tools offered": tools,
        "text completion": text_completion,
    }
)
