"""Loads a model and runs the scheduler's steps on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.worker.layers.attention import TorchAttention
from trioengine.worker.loop import OnProgress
from trioengine.worker.models.llama import LlamaModel, optional_tensors, wanted_tensors
from trioengine.worker.runner.batch import make_batch
from trioengine.worker.runner.kv_cache import KVCache, count_blocks
from trioengine.worker.runner.sampler import sample
from trioengine.worker.scheduling.output import SampledToken, SchedulerOutput
from trioengine.worker.weights import Checkpoint, open_checkpoint
from trioengine.worker.weights.checkpoint import check_tensors
from trioengine.worker.weights.reader import WeightReader


@dataclass(frozen=True, slots=True)
class TorchModelRunner:
    """A loaded model with its KV cache; to be used by one thread."""

    model: LlamaModel
    cache: KVCache
    model_type: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int  # tokens; never more than the KV cache holds
    kv_blocks_total: int
    block_size: int

    @staticmethod
    def load(config: WorkerConfig, on_progress: OnProgress) -> TorchModelRunner:
        """Load the model; ModelError says what cannot be found, read or run."""
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        checkpoint = open_checkpoint(config.model_path)
        try:
            return _load(config, checkpoint, dtype, device, on_progress)
        finally:
            checkpoint.close()

    def execute(self, output: SchedulerOutput) -> list[SampledToken]:
        """Compute a step: one entry for each scheduled sequence with `samples`, in their order."""
        with torch.inference_mode():
            self.cache.copy_blocks(output.copies)
            batch = make_batch(output, self.block_size, self.model.device)
            attention = TorchAttention(batch, self.cache, self.model.config.num_heads)
            logits = self.model.forward(batch, attention)
            return sample(logits, [entry.sequence for entry in output.scheduled if entry.samples])


def choose_device(name: str) -> torch.device:
    """`auto`: CUDA where there is one. ModelError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        message = f"device {name}: there are {torch.cuda.device_count()} CUDA devices"
        raise ModelError(f"{message}; use --device cpu or auto")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA and where the CPU multiplies it (AVX512-BF16, AMX), else float32."""
    if name == "auto":
        fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    return torch.float32 if name == "float32" else torch.bfloat16


def _load(
    config: WorkerConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, on_progress: OnProgress
) -> TorchModelRunner:
    model = checkpoint.config
    wanted, optional = wanted_tensors(model), optional_tensors(model)
    check_tensors(checkpoint, wanted, optional)
    num_blocks = count_blocks(config, model, dtype, device)
    limits = (model.max_position_embeddings, num_blocks * config.block_size, config.max_model_len)
    max_model_len = min(limit for limit in limits if limit is not None)
    with torch.inference_mode():
        weights = WeightReader(checkpoint, wanted, dtype, device, on_progress)
        loaded = LlamaModel(model, weights, max_model_len)
        cache = KVCache.allocate(model, num_blocks, config.block_size, dtype, device)
    return TorchModelRunner(
        model=loaded,
        cache=cache,
        model_type=model.model_type,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        kv_blocks_total=num_blocks,
        block_size=config.block_size,
    )
