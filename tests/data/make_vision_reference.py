"""Write vision_reference.json: transformers' tiles, embeddings and greedy answers of the tiny SmolVLM checkpoints.

In float32. Needs torch, safetensors, pillow and transformers, of which the last is no test dependency.
Usage: python make_vision_reference.py
"""

import base64
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.idefics3 import Idefics3ImageProcessorPil, Idefics3Processor

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import tiny_smolvlm

NUM_TOKENS = 24


def encoded(values):
    return base64.b64encode(values.numpy().astype("<f4").tobytes()).decode()


def answer(model, inputs):
    ids, gaps = inputs["input_ids"], []
    images = {name: inputs[name] for name in ("pixel_values", "pixel_attention_mask") if name in inputs}
    for _ in range(NUM_TOKENS):
        logits = model(ids, attention_mask=torch.ones_like(ids), **images).logits[0, -1]
        best = logits.topk(2).values
        gaps.append(float(best[0] - best[1]))
        ids = torch.cat((ids, logits.argmax()[None, None]), dim=1)
    return ids[0, inputs["input_ids"].shape[1] :].tolist(), round(min(gaps), 6)


def case(model, processor, sizes):
    content = [*({"type": "image"} for _ in sizes), {"type": "text", "text": tiny_smolvlm.QUESTION}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [Image.frombytes("RGB", size, tiny_smolvlm.picture(*size)) for size in sizes]
    inputs = processor(text=prompt, images=images or None, return_tensors="pt")
    output, gap = answer(model, inputs)
    result = {"prompt": prompt, "input_ids": inputs["input_ids"][0].tolist(), "output": output, "min_gap": gap}
    if images:
        plain = processor.image_processor(images, do_rescale=False, do_normalize=False, return_tensors="np")
        tiles = plain["pixel_values"][0].astype(np.uint8)
        result["tiles"] = hashlib.sha256(tiles.tobytes()).hexdigest()
    if len(images) == 1:
        pixels = inputs["pixel_values"], inputs["pixel_attention_mask"]
        result["features"] = encoded(torch.cat(list(model.model.get_image_features(*pixels).pooler_output)))
    return result


def main():
    reference = {}
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        for variant in tiny_smolvlm.VARIANTS:
            path = tiny_smolvlm.write(Path(directory) / variant, variant)
            model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
            processor = Idefics3Processor(
                Idefics3ImageProcessorPil.from_pretrained(path),
                AutoTokenizer.from_pretrained(path),
                chat_template=tiny_smolvlm.TEMPLATE,
                image_seq_len=tiny_smolvlm.files(variant)["processor_config.json"]["image_seq_len"],
            )
            reference[variant] = {name: case(model, processor, sizes) for name, sizes in tiny_smolvlm.CASES.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(cases)}".replace('}, "', '},\n  "') for name, cases in reference.items()]
    Path(__file__).with_name("vision_reference.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
