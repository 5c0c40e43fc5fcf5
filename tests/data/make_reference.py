"""Write reference.json: transformers' greedy answers of SmolLM2-135M-Instruct in float32, for test_smollm2_greedy.py.

Needs torch, transformers, accelerate and gguf, which are no test dependencies.
Usage: python make_reference.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OUTPUT_TOKENS = 64
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits that are yellow.",
    "What is 17 + 25?",
    "Translate 'good morning' into Spanish and German.",
    "Give me a short recipe for pancakes.",
    "Who wrote Romeo and Juliet, and when?",
    "Write a Python function that reverses a string.",
    "Summarize the story of Cinderella. " * 12,
]
TEXTS = [
    "Once upon a time",
    "The quick brown fox",
    "def fibonacci(n):\n",
    "In 1969, the first human",
    "The",
    "Water boils at",
    "import os\nimport sys\n\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 4,",
    "The history of the steam engine begins long before the industrial revolution. " * 10,
]


def greedy(model, prompt: list[int], output_tokens: int = OUTPUT_TOKENS) -> dict:
    """The greedy continuation, and the smallest gap between the best two logits on the way."""
    ids, cache, output, gaps = torch.tensor([prompt]), None, [], []
    for _ in range(output_tokens):
        result = model(ids, past_key_values=cache, use_cache=True)
        cache, logits = result.past_key_values, result.logits[0, -1]
        best = logits.topk(2).values
        gaps.append(float(best[0] - best[1]))
        output.append(int(logits.argmax()))
        ids = torch.tensor([output[-1:]])
    return {"prompt": prompt, "output": output, "min_gap": round(min(gaps), 6)}


def main(gguf: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    prompts = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    prompts += [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    with torch.inference_mode():
        cases = [greedy(model, prompt) for prompt in prompts]
    print("smallest gap:", min(case["min_gap"] for case in cases))
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    Path(__file__).with_name("reference.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
