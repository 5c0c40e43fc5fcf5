"""Print the time of a decoding step on this device, the CPU's part of it, and the kernels that take longest.

Usage: python tests/worker/step_times.py MODEL [NUM_REQUESTS…], with the root and tests in PYTHONPATH. Prompts have 128
tokens. On a GPU each row is measured with and without CUDA graphs.
"""

import statistics
import sys
import time

import torch
from helpers.torch_driver import load
from torch.profiler import ProfilerActivity, profile

from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Limits, Sequence

PROMPT, STEPS, WARM_UP = 128, 100, 20
PARAMS = ResolvedParams(temperature=0.0, max_tokens=WARM_UP + 2 * STEPS, seed=0, ignore_eos=True)


def start(runner, num_requests):
    """A scheduler whose sequences all decode."""
    info = runner.info
    limits = Limits(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        kv_blocks_total=info.kv_blocks_total,
        block_size=info.block_size,
        max_num_seqs=128,
        max_num_batched_tokens=1 << 15,
        chunked_prefill_size=1 << 15,
        enable_prefix_caching=False,
        state_slots=info.state_slots,
        windows=info.windows,
    )
    scheduler = Scheduler(limits)
    for number in range(num_requests):
        prompt = torch.randint(3, 250, (PROMPT,), generator=torch.Generator().manual_seed(number)).tolist()
        scheduler.add(Sequence(number, number, prompt, PROMPT, PARAMS, frozenset()))
    for _ in range(WARM_UP):
        step(scheduler, runner)
    return scheduler


def step(scheduler, runner):
    """Seconds: all of it, and that of the runner."""
    began = time.perf_counter()
    output = scheduler.schedule()
    runs = time.perf_counter()
    sampled = runner.execute(output)
    ran = time.perf_counter()
    scheduler.update(output, sampled)
    return time.perf_counter() - began, ran - runs


def measure(runner, name, num_requests):
    scheduler = start(runner, num_requests)
    steps = [step(scheduler, runner) for _ in range(STEPS)]
    total, ran = (statistics.median(times) * 1e3 for times in zip(*steps, strict=True))
    line = f"{name:24} {num_requests:4} requests: {total:7.3f} ms a step, {ran:7.3f} of the runner"
    if runner.info.device.startswith("cuda"):
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            for _ in range(10):
                step(scheduler, runner)
        kernels = [event for event in profiled.key_averages() if event.self_device_time_total > 0]
        busy = sum(event.self_device_time_total for event in kernels) / 10 / 1e3
        line += f", {busy:7.3f} of the GPU"
        for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:8]:
            line += f"\n    {event.self_device_time_total / 1e4:7.4f} ms {event.count / 10:6.1f} x {event.key[:100]}"
    print(line, flush=True)


def main(path, counts):
    is_cuda = torch.cuda.is_available()
    options = [{"cuda_graphs": "auto"}, {"cuda_graphs": "none"}, {"kernels": "torch"}] if is_cuda else [{}]
    for option in options:
        name = ", ".join(map(str, option.values())) or "-"
        device = "cuda" if is_cuda else "cpu"
        runner = load(path, dtype="bfloat16", device=device, kv_cache_memory=8 << 30, max_model_len=2048, **option)
        for count in counts:
            measure(runner, f"{runner.info.kernels}, {name}", count)
        del runner
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], [int(count) for count in sys.argv[2:]] or [1, 64])
