"""Where the time of steps goes: requests that come all at once, run by the scheduler and the model in this process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TypeVar

import torch

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.core.power import ALL_TAGS
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.kernels.batch import make_batch
from trioengine.worker.kernels.native_decoder import OPERATIONS
from trioengine.worker.kernels.native_kernels import NativeKernels
from trioengine.worker.kernels.products import Profile, ProfiledPart
from trioengine.worker.process import limits_of
from trioengine.worker.roof import measure_roof
from trioengine.worker.runner.loaded_model import LoadedModel
from trioengine.worker.runner.model_runner import TorchModelRunner
from trioengine.worker.runner.model_spec import ModelSpec
from trioengine.worker.runner.sampling import sample_all
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import SchedulerOutput, Sequence

Result = TypeVar("Result")
_ROOF = 0.5  # seconds that each peak is measured


def profile_steps(config: WorkerConfig, requests: int, prompt_len: int, output_len: int) -> dict[str, object]:
    """Run greedy requests with random prompts, after a few others, and measure the parts of their steps.

    Returns the machine's peaks (`measure_roof`), the numbers of steps and tokens, and for each part its seconds and, of
    a product, its operations and the bytes of its weights. Raises ModelError, KernelsUnavailable where nothing can be
    compiled, and RequestRejected for a prompt and an answer that exceed the context.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    steps = ProfiledSteps(config)
    roof = measure_roof(_ROOF)
    steps.run(min(requests, 4), min(prompt_len, 16), min(output_len, 16))
    steps.profile = Profile()
    steps.num_steps = steps.num_tokens = 0
    began = time.perf_counter()
    steps.run(requests, prompt_len, output_len)
    seconds = time.perf_counter() - began
    return {
        "roof": roof,
        "seconds": seconds,
        "steps": steps.num_steps,
        "tokens": steps.num_tokens,
        "dtype": steps.info.dtype,
        "quantization": steps.info.quantization,
        "parts": {name: asdict(part) for name, part in _disjoint(steps.profile.parts).items()},
    }


def _disjoint(parts: Mapping[str, ProfiledPart]) -> dict[str, ProfiledPart]:
    """Subtract the seconds of the operations inside the model; the rest is `other model`."""
    found = {name: replace(part) for name, part in parts.items()}
    rest = found.pop("model")
    rest.seconds -= sum(found[name].seconds for name in OPERATIONS if name in found)
    return found | {"other model": rest}


class ProfiledSteps:
    """Runs steps as the worker does, part by part; the parts' times are added to `profile`."""

    def __init__(self, config: WorkerConfig) -> None:
        """Load the model. Raises ModelError, also for another device than the CPU."""
        self._spec = spec = ModelSpec.read(config)
        if spec.device.type != "cpu":
            raise ModelError(f"steps are profiled on a CPU, not on {spec.device}; choose the device cpu")
        if spec.model.text.embeds:
            raise ModelError(f"{config.model_path} is an embedding model: its steps are not profiled")
        self._runner = TorchModelRunner(LoadedModel(spec, lambda done, total: None))
        self._runner.wake(ALL_TAGS)
        self._limits = limits_of(replace(config, enable_prefix_caching=False), self._runner.info)
        self.info = self._runner.info
        self.profile = Profile()
        self.num_steps = self.num_tokens = 0

    def run(self, requests: int, prompt_len: int, output_len: int) -> None:
        """Run requests with random prompts to their ends."""
        if isinstance(self._spec.kernels, NativeKernels):
            self._spec.kernels.products.profile = self.profile
        rng, scheduler = random.Random(0), Scheduler(self._limits)
        params = ResolvedParams(temperature=0.0, max_tokens=output_len, seed=0, ignore_eos=True)
        for number in range(requests):
            prompt = [rng.randrange(self._limits.vocab_size) for _ in range(prompt_len)]
            scheduler.add(Sequence(number, number, prompt, prompt_len, params, frozenset()))
        while (output := self._measure("scheduling", scheduler.schedule)) is not None:
            self._step(scheduler, output)

    def _step(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        self.num_steps += 1
        self.num_tokens += output.num_tokens
        model, cache, states = self._runner.model, self._runner.cache, self._runner.states
        kernels = self._spec.kernels
        with torch.inference_mode():
            cache.copy_blocks(output.copies, output.window_copies)
            if states is not None:
                states.copy(output.state_copies)
            batch = self._measure("batch", lambda: make_batch(output, self._spec.layout.block_size).to(model.device))
            attention = self._measure("batch", lambda: kernels.attention(batch, cache))
            logits, best = self._measure("model", lambda: model.compute(batch, attention, states))
            sampled = self._measure("sampling", lambda: sample_all(logits, output.scheduled, best))
        self._measure("scheduling", lambda: scheduler.update(output, sampled))

    def _measure(self, name: str, call: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        result = call()
        self.profile.add(name, time.perf_counter() - began)
        return result
