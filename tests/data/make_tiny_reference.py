"""Write tiny_reference.json: transformers' greedy answers and scores of the tiny checkpoints, in float32.

Needs torch, safetensors and transformers, which is no test dependency.
Usage: python make_tiny_reference.py
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import tiny_llama


def main() -> None:
    reference = {}
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        for variant in tiny_llama.VARIANTS:
            path = tiny_llama.write(Path(directory) / variant, variant)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            ids, gaps = list(tiny_llama.PROMPT), []
            for _ in range(48):
                logits = model(torch.tensor([ids])).logits[0, -1]
                best = logits.topk(2).values
                gaps.append(float(best[0] - best[1]))
                ids.append(int(logits.argmax()))
            output = ids[len(tiny_llama.PROMPT) :]
            scores = model(torch.tensor([tiny_llama.PROMPT])).logits[0].float().log_softmax(-1)
            reference[variant] = {
                "output": output,
                "logprob": float(scores[-1, output[0]]),
                "min_gap": round(min(gaps), 6),
                "prompt_logprobs": [
                    round(float(scores[at, token]), 6) for at, token in enumerate(tiny_llama.PROMPT[1:])
                ],
                "best_logprobs": [round(float(best), 6) for best in scores[:-1].max(-1).values],
            }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in reference.items())
    Path(__file__).with_name("tiny_reference.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
