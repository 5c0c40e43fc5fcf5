"""Write gemma3_llama_cpp.json: llama.cpp's token ids and greedy answers of Gemma 3 270M, for test_gemma3_greedy.py.

Needs xllamacpp, which is no test dependency. Usage: python make_gemma3_llama_cpp.py gemma-3-270m-q4_k_m.gguf
"""

import json
import sys
import urllib.request
from pathlib import Path

import xllamacpp

OUTPUT_TOKENS = 48
TEXTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three primary colours are",
    "Dear Sir or Madam,\n",
    "In 1969, Neil Armstrong",
    "import numpy as np\n",
    "The recipe needs two eggs,",
    "Die Hauptstadt von Deutschland ist",
    "El perro corre por",
    "1, 1, 2, 3, 5, 8,",
    "Q: What is 2+2?\nA:",
    "She opened the door and",
    "<html>\n<head>",
    "日本の首都は",
    "Photosynthesis is the process",
    "<start_of_turn>user\nName the capital of France.<end_of_turn>\n<start_of_turn>model\n",
    "To be, or not to be,",
    "The history of the steam engine begins long before the industrial revolution. " * 45,  # longer than the window
]


def main(gguf: Path) -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.warmup = str(gguf), 4096, False
    server = xllamacpp.Server(parameters)

    def ids(text: str) -> list[int]:
        body = json.dumps({"content": text, "add_special": True}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", body)
        return list(json.load(urllib.request.urlopen(request))["tokens"])

    def answer(prompt: list[int]) -> list[int]:
        greedy = {"temperature": 0, "top_k": 1, "ignore_eos": True, "cache_prompt": False}
        result = server.handle_completions({"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "n_probs": 2, **greedy})
        return [entry["id"] for entry in result["choices"][0]["logprobs"]["content"]]

    cases = [{"text": text, "prompt": (prompt := ids(text)), "output": answer(prompt)} for text in TEXTS]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    Path(__file__).with_name("gemma3_llama_cpp.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
