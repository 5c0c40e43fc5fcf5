"""Write transformers' greedy answers and scores of the tiny checkpoints, in float32.

They are tiny_reference.json, of Llama and Qwen2, and decoders_reference.json, of the other architectures. Needs torch,
safetensors, trioengine, and transformers, which is no test dependency.
Usage: python make_tiny_reference.py [VARIANT …]: writes the variants that are missing, and these again.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import tiny_decoders, tiny_llama


def answer(path: Path) -> dict[str, object]:
    """The answer to tiny_llama.PROMPT, and the scores of both."""
    model, loading = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    model.eval()
    ids, gaps = list(tiny_llama.PROMPT), []
    for _ in range(48):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.topk(2).values
        gaps.append(float(best[0] - best[1]))
        ids.append(int(logits.argmax()))
    output = ids[len(tiny_llama.PROMPT) :]
    scores = model(torch.tensor([tiny_llama.PROMPT]), use_cache=False).logits[0].float().log_softmax(-1)
    return {
        "output": output,
        "logprob": float(scores[-1, output[0]]),
        "min_gap": round(min(gaps), 6),
        "prompt_logprobs": [round(float(scores[at, token]), 6) for at, token in enumerate(tiny_llama.PROMPT[1:])],
        "best_logprobs": [round(float(best), 6) for best in scores[:-1].max(-1).values],
    }


def main() -> None:
    again = set(sys.argv[1:])
    for name, module in (("tiny_reference.json", tiny_llama), ("decoders_reference.json", tiny_decoders)):
        path = Path(__file__).with_name(name)
        known = {variant: case for variant, case in json.loads(path.read_text()).items() if variant not in again}
        with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
            for variant in module.VARIANTS:
                if variant not in known:
                    known[variant] = answer(module.write(Path(directory) / variant, variant))
        lines = ",\n".join(f"{json.dumps(variant)}: {json.dumps(known[variant])}" for variant in module.VARIANTS)
        path.write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
