"""Write image_prompts_reference.json: the token ids of conversations with images, by transformers' Idefics3Processor.

The tokenizer is a small one, made here, that joins two newlines, as SmolVLM's does; the last row's tokens are missing,
so that an image of four rows has ordinary text in its place. Needs transformers and pillow, which are no test
dependencies. Usage: python make_image_prompts_reference.py
"""

import json
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3 import Idefics3ImageProcessorPil, Idefics3Processor

TILE, EDGE, TOKENS, VOCAB_SIZE = 8, 32, 3, 340
SPECIAL = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"]
SPECIAL += [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 5)]
TEMPLATES = {
    "smolvlm": "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    "strings and parts": "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}
# An image is [width, height].
CONVERSATIONS = {
    "an image and a question": [{"role": "user", "content": [[8, 8], "What is this?"]}],
    "a question and an image": [{"role": "user", "content": ["What is this?\n", [100, 60]]}],
    "no text": [{"role": "user", "content": [[20, 50]]}],
    "every part twice": [{"role": "user", "content": [[9, 9], [9, 9], "What", " differs?"]}],
    "newlines at the border": [{"role": "user", "content": ["a\n", [30, 30], "\nb\n\n", [5, 1], "\n\n"]}],
    "two turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [[64, 16], "Describe  it."]},
        {"role": "assistant", "content": "A red line,\n\nquite long: 64 pixels"},
        {"role": "user", "content": "And now?"},
    ],
    "an image in each turn": [
        {"role": "user", "content": ["first", [16, 64]]},
        {"role": "assistant", "content": "é😀"},
        {"role": "user", "content": ["second", [1, 1], "or", [640, 480], "?"]},
    ],
    "no images": [{"role": "user", "content": "Hello, world!"}],
}
CORPUS = [text for text in json.dumps(CONVERSATIONS).split('"') if len(text) > 2] + [
    "\n\n",
    "a\n\nb\n\n",
    "\n\n\n\n",
] * 9


def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=sorted(alphabet)))
    made.add_special_tokens(SPECIAL)
    return made


def parts(content):
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]


def ids(processor, template, conversation):
    messages = [{"role": message["role"], "content": parts(message["content"])} for message in conversation]
    text = processor.apply_chat_template(messages, chat_template=template, add_generation_prompt=True)
    sizes = [part for message in conversation for part in message["content"] if isinstance(part, list)]
    images = [Image.new("RGB", tuple(size)) for size in sizes]
    return processor(text=text, images=[images] if images else None)["input_ids"][0]


def main():
    made = tokenizer()
    image_processor = Idefics3ImageProcessorPil(size={"longest_edge": EDGE}, max_image_size={"longest_edge": TILE})
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    processor = Idefics3Processor(image_processor, fast, image_seq_len=TOKENS)
    found = {
        name: {case: ids(processor, template, conversation) for case, conversation in CONVERSATIONS.items()}
        for name, template in TEMPLATES.items()
    }
    reference = {
        "tile_size": TILE,
        "longest_edge": EDGE,
        "tokens_per_tile": TOKENS,
        "templates": TEMPLATES,
        "conversations": CONVERSATIONS,
        "ids": found,
        "tokenizer": made.to_str(),
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in reference.items()]
    Path(__file__).with_name("image_prompts_reference.json").write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
