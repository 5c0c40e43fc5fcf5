"""A runner of the tiny model, awake or asleep: the actions and the questions of the tests of sleep and of updates."""

import json
import shutil

from helpers.torch_driver import generate, reference
from trioengine.core.errors import InvariantError
from trioengine.core.power import Tag

EXPECTED = reference("tiny_reference.json")["plain"]["output"]
WEIGHTS, KV_CACHE = frozenset({Tag.WEIGHTS}), frozenset({Tag.KV_CACHE})
KV_BYTES = 4 << 20


class FailingProgress:
    """Loading fails once so many bytes are read: as a disk would."""

    def __init__(self):
        self.fail_after = None
        self.calls = 0

    def __call__(self, done, total):
        self.calls += 1
        if self.fail_after is not None and done > self.fail_after:
            raise OSError("the disk is gone")


def answer(runner, prompt):
    (tokens,), statistics = generate(runner, [prompt], 48)
    assert statistics.num_tokens == len(prompt) + 47
    return tokens


def asleep(runner):
    """The tags that sleep, as the refusals say."""
    tags = set()
    for tag, attribute in ((Tag.WEIGHTS, "model"), (Tag.KV_CACHE, "cache")):
        try:
            getattr(runner, attribute)
        except InvariantError:
            tags.add(tag)
    return tags


def fall_asleep(runner, level):
    """At level 2 no memory has the weights, as after an update of what sleeps."""
    runner.sleep()
    if level == 2:
        runner.update_weights(runner.target.weights._path)


def another_architecture(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))


def truncated(directory):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {"architecture": another_architecture, "truncated": truncated, "deleted": shutil.rmtree}
