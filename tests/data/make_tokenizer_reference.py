"""Write tokenizer_reference.json: transformers' token ids of SmolLM2-135M-Instruct for many texts and conversations.

Needs transformers and gguf, which are no test dependencies. The conversion from GGUF in transformers leaves the
splitting of digits out; here it is put back as SmolLM2's own tokenizer.json has it: every digit alone, then GPT-2's
splitting. Usage: python make_tokenizer_reference.py SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import sys
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

TEXTS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "Hello, world!",
    "hello world",
    "HELLO",
    "don't can't we'll I'm you've they'd it's",
    "0",
    "7",
    "42",
    "123456789",
    "3.14159",
    "1,000,000",
    "2024-11-21T04:05:06Z",
    "x1y22z333",
    "  12  34",
    "10%",
    "٣٤٥",
    "½ ² Ⅷ",
    "😀",
    "👨‍👩‍👧‍👦 family",
    "🇫🇷🇯🇵",
    "ok👍🏽ok",
    "❤️",
    "🤷🏻‍♀️ 123 🎉🎉",
    "你好，世界！",
    "今日は良い天気ですね。",
    "안녕하세요 세계",
    "漢字かな交じり文 123 テスト",
    "สวัสดีชาวโลก",
    "Привет, мир!",
    "مرحبا بالعالم",
    "שלום עולם",
    "naïve café résumé",
    "e\u0301 é",
    "ﬁ ligature",
    "Ωμέγα",
    "\u00a0nbsp\u2003em",
    "zero\u200bwidth",
    "def f(x):\n    return x ** 2\n",
    'for (int i = 0; i < 10; ++i) {\n\tprintf("%d\\n", i);\n}',
    "SELECT * FROM t WHERE a >= 1;",
    "<html>\n  <body class='x'>&amp;</body>\n</html>",
    "a_b_c __init__ camelCase HTTPServer2",
    "https://example.org/a?b=c&d=1#e",
    '{"key": [1, 2.5, null, true]}',
    "$\\frac{a}{b}$",
    "C:\\Users\\x",
    "#!/bin/sh\nset -e\n",
    " " * 7,
    " " * 64,
    "a" + " " * 33 + "b",
    "\n" * 5,
    "\t\t\tx",
    "line\r\nline\r\n",
    " \n \n ",
    "trailing   ",
    "x" * 100,
    "-" * 40,
    "…—–“”‘’",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "say <|im_end|> please",
    "<|im_start|>system\nobey<|im_end|>\n",
    "<repo_name>x<file_sep>",
    "<|im_end",
    "|im_end|>",
    "<| im_end |>",
    "<|IM_END|>",
    "\x00\x01\x7f",
    "\ufffd",
    "a\u0300\u0301\u0302",
]
CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 345?"}],
    [
        {"role": "user", "content": "你好 😀"},
        {"role": "assistant", "content": "Hi!\n\n- one\n- two"},
        {"role": "user", "content": "  code:\n```py\nx = 1\n```  "},
    ],
    [{"role": "user", "content": ""}],
]


def main(gguf: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    ordinary = json.loads(tokenizer.backend_tokenizer.to_str())
    ordinary["added_tokens"] = []  # the same, for which nothing is special
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(json.dumps(ordinary))
    reference = {
        "texts": [
            {
                "text": text,
                "ids": tokenizer.encode(text, add_special_tokens=False),
                "ordinary": plain.encode(text, add_special_tokens=False).ids,
            }
            for text in TEXTS
        ],
        "conversations": [
            {
                "messages": messages,
                "ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
            }
            for messages in CONVERSATIONS
        ],
    }
    Path(__file__).with_name("tokenizer_reference.json").write_text(json.dumps(reference, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
