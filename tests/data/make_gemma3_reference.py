"""Write gemma3_reference.json: transformers' greedy answers of Gemma 3 270M in float32, for test_gemma3_greedy.py.

The prompts are in gemma3_llama_cpp.json. Needs torch, safetensors, trioengine, and transformers, which is no test
dependency. Usage: python make_gemma3_reference.py gemma-3-270m-q4_k_m.gguf
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.random_checkpoint import write_checkpoint
from make_reference import greedy

from trioengine.hub.gemma3_config import Gemma3Config
from trioengine.worker.weights import open_checkpoint

OUTPUT_TOKENS = 48


def config_json(config: Gemma3Config) -> dict[str, object]:
    return {
        "model_type": config.model_type,
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": config.local_rope_theta,
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar),
        "sliding_window": config.windows[0],
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def main(gguf: Path) -> None:
    prompts = [case["prompt"] for case in json.loads(Path(__file__).with_name("gemma3_llama_cpp.json").read_text())]
    checkpoint = open_checkpoint(str(gguf))
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        tensors = {name: checkpoint.read(name, torch.float32) for name in checkpoint.tensors}
        path = write_checkpoint(Path(directory), {"config.json": config_json(checkpoint.config)}, tensors)
        model, loading = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        assert not any(loading.values()), loading
        cases = [greedy(model.eval(), prompt, OUTPUT_TOKENS) for prompt in prompts]
    print("smallest gap:", min(case["min_gap"] for case in cases))
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    Path(__file__).with_name("gemma3_reference.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
