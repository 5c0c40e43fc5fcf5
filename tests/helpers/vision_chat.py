"""Chat tokenizers of a model with images; make_image_prompts_reference.py has made their small tokenizer."""

import json
from pathlib import Path

from trioengine.core.image import Image, ImageFormat, ImageInfo, ImageProcessing
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.tokenizer import Tokenizer

REFERENCE = json.loads(Path(__file__).parents[1].joinpath("data/image_prompts_reference.json").read_text())
TOKENIZER = Tokenizer.from_json(REFERENCE["tokenizer"])
IMAGE_TOKEN, END = TOKENIZER.special_tokens["<image>"], TOKENIZER.special_tokens["<end_of_utterance>"]
HALVES = (0.5, 0.5, 0.5)
PROCESSING = ImageProcessing(
    "<image>",
    IMAGE_TOKEN,
    REFERENCE["tokens_per_tile"],
    REFERENCE["tile_size"],
    REFERENCE["longest_edge"],
    True,
    HALVES,
    HALVES,
)
SMOLVLM, EITHER = REFERENCE["templates"]["smolvlm"], REFERENCE["templates"]["strings and parts"]


def chat_tokenizer(template=SMOLVLM, images=PROCESSING):
    return ChatTokenizer(TOKENIZER, ChatTemplate(template), images)


def image(width=8, height=8):
    return Image(ImageInfo(ImageFormat.PNG, width, height), handle=object())


def text(content):
    return {"type": "text", "text": content}


def user(*parts):
    """A user's message of strings and images."""
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part.part for part in parts]}


def assistant(content):
    return {"role": "assistant", "content": content}
