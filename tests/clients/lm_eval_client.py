"""lm-evaluation-harness on two tasks of its own: loglikelihoods and generated texts, by `local-completions`."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from report import BASE_URL, FOLDER, MODEL, TOKENIZER, report

TASKS = Path(FOLDER) / "tasks"
LOCAL = {"tokenizer_backend": "huggingface", "tokenizer": TOKENIZER}  # the tokenizer's files
REMOTE = {"tokenizer_backend": "remote"}  # the server's /tokenizer_info and /tokenize


def evaluate(task, *, metric, at_least, model="local-completions", batch_size=2, arguments=(), **model_options):
    """Run the command `lm_eval`, and check the task's metric."""
    route = "chat/completions" if "chat" in model else "completions"
    options = {"model": MODEL, "base_url": f"{BASE_URL}/v1/{route}", "num_concurrent": 2, "max_retries": 1}
    output = Path(FOLDER) / f"results-{len(list(Path(FOLDER).iterdir()))}"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", task, "--include_path", str(TASKS)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in (options | model_options).items())]
    command += ["--batch_size", str(batch_size), "--output_path", str(output), *arguments]
    done = subprocess.run(command, cwd=TASKS, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        refused = re.search(r"API request failed! (.*)", done.stderr)
        raise AssertionError(refused[1] if refused else " ".join(done.stderr.split())[-300:])
    (results,) = output.rglob("results_*.json")
    found = json.loads(results.read_text())["results"][task][metric]
    assert found >= at_least, f"{metric} is {found}"


choices = partial(evaluate, "local_choices", metric="acc,none", at_least=0.75)
texts = partial(evaluate, "local_texts", metric="exact_match,stripped", at_least=0.66)
shutil.copytree(Path(__file__).parent / "lm_eval_tasks", TASKS)
report(
    {
        "generate_until": partial(texts, **LOCAL),
        "generate_until, texts": partial(texts, **LOCAL, tokenized_requests=False),
        "loglikelihood": partial(choices, **LOCAL),
        "loglikelihood, texts": partial(choices, **LOCAL, tokenized_requests=False),
        "generate_until, remote tokenizer": partial(texts, **REMOTE),
        "loglikelihood, remote tokenizer": partial(choices, **REMOTE),
        "generate_until, local-chat-completions": partial(
            texts, model="local-chat-completions", at_least=0, batch_size=1, arguments=("--apply_chat_template",)
        ),
    }
)
