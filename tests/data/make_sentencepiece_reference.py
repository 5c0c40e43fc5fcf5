"""Write sentencepiece_reference.json: llama.cpp's token ids of Gemma 3 for many texts, and the tokens that they need.

The ids of a text depend on the tokens that occur in it only, so these, the special ones and the bytes are a vocabulary
that gives the same ids. Needs xllamacpp, which is no test dependency.
Usage: python make_sentencepiece_reference.py gemma-3-270m-it.gguf
"""

import json
import sys
import urllib.request
from pathlib import Path

import xllamacpp

from trioengine.core.gguf import parse_gguf

TEXTS = [
    " ",
    "  ",
    "a",
    " a",
    "Hello, world!",
    "don't can't we'll",
    "3.14159 1,000,000",
    "2024-11-21T04:05:06Z",
    "٣٤٥ ½ ² Ⅷ",
    "😀 ok👍🏽ok",
    "👨‍👩‍👧‍👦 family",
    "你好，世界！",
    "今日は良い天気ですね。",
    "안녕하세요 세계",
    "สวัสดีชาวโลก",
    "Привет, мир!",
    "مرحبا بالعالم",
    "naïve café e\u0301 é",
    "\u00a0nbsp\u2003em zero\u200bwidth",
    "def f(x):\n    return x ** 2\n",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", i);\n}',
    "<html>\n  <body class='x'>&amp;<b>x</b>\n",
    "a_b_c __init__ camelCase HTTPServer2",
    "https://example.org/a?b=c&d=1#e",
    '{"key": [1, 2.5, null, true]}',
    " " * 7,
    "a" + " " * 33 + "b",
    "\n" * 33,
    "\t\t\tx",
    "line\r\nline\r\n",
    " \n \n ",
    "aaaaaaaaaaaaa",
    "-" * 40,
    "…—–“”‘’",
    "▁ literal ▁▁ blocks",
    "<0x41> is no byte",
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "say <end_of_turn> please, <end_of_turn",
    "<unused12> and <unused123>",
    "\x00\x01\x7f\ufffd",
    "ᚠᛇᚻ 𝔘𝔫𝔦 🜁",
]
BYTE = 6


def main(gguf: Path) -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.port, parameters.warmup = str(gguf), 512, 0, False
    server = xllamacpp.Server(parameters)

    def ids(text: str, *, special: bool) -> list[int]:
        body = json.dumps({"content": text, "add_special": False, "parse_special": special}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", body)
        return list(json.load(urllib.request.urlopen(request))["tokens"])

    texts = [{"text": text, "ids": ids(text, special=True), "ordinary": ids(text, special=False)} for text in TEXTS]
    keys = [f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type")]
    metadata = parse_gguf(gguf.read_bytes(), arrays=keys).metadata
    rows = zip(*(metadata[key] for key in keys), strict=True)
    used = {id for entry in texts for key in ("ids", "ordinary") for id in entry[key]}
    spelled = "\n".join(TEXTS + [text.replace(" ", "▁") for text in TEXTS])
    vocabulary = [
        [id, token, score, kind]
        for id, (token, score, kind) in enumerate(rows)
        if id in used or kind == BYTE or token in spelled
    ]
    text = json.dumps({"vocabulary": vocabulary, "texts": texts}, ensure_ascii=True, separators=(",", ":"))
    Path(__file__).with_name("sentencepiece_reference.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
