"""`trioengine doctor`: its results on machines made of files, and without the packages that it checks."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from trioengine.cli import doctor
from trioengine.cli.doctor import (
    CheckResult,
    Machine,
    Severity,
    check_cores,
    check_limits,
    check_memory,
    check_models,
    check_versions,
    check_worker,
    fatal,
    run_checks,
    warning,
)
from trioengine.hub.known_models import GEMMA3, SMOLLM2, KnownModel, Part
from trioengine.worker.__main__ import MARK

GIB = 1 << 30


@pytest.fixture
def files(tmp_path):
    """Writes files below a folder, and gives the machine that they describe."""

    def write(contents):
        for name, text in contents.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return Machine(tmp_path / "proc", tmp_path / "cgroup")

    return write


MEMINFO = f"MemTotal:       {8 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable:   {4 * GIB // 1024} kB\n"


def messages(result):
    return [(problem.severity, problem.message) for problem in result.problems]


def test_memory_of_a_machine_without_a_container(files):
    result = check_memory(files({"proc/meminfo": MEMINFO}))
    assert result.facts == {"total_bytes": 8 * GIB, "available_bytes": 4 * GIB, "container_left_bytes": None}
    assert result.problems == ()


CONTAINERS = {
    "version 2": {
        "proc/self/cgroup": "0::/a/b\n",
        "cgroup/a/memory.max": f"{GIB}\n",
        "cgroup/a/memory.current": f"{GIB // 2}\n",
        "cgroup/a/b/memory.max": "max\n",
    },
    "version 2, in a namespace of its own": {
        "proc/self/cgroup": "0::/\n",
        "cgroup/memory.max": f"{GIB}\n",
        "cgroup/memory.current": f"{GIB // 2}\n",
    },
    "version 1": {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/a\n",
        "cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        "cgroup/memory/a/memory.limit_in_bytes": f"{GIB}\n",
        "cgroup/memory/a/memory.usage_in_bytes": f"{GIB // 2}\n",
    },
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_memory_that_a_container_leaves(files, container):
    result = check_memory(files({"proc/meminfo": MEMINFO, **CONTAINERS[container]}))
    assert result.facts["container_left_bytes"] == GIB // 2
    assert messages(result) == [(Severity.FATAL, "512 MiB of memory are free, the default model needs 1024 MiB")]


QUOTAS = [
    {"proc/self/cgroup": "0::/a\n", "cgroup/a/cpu.max": "50000 100000\n"},
    {
        "proc/self/cgroup": "3:cpu:/a\n",
        "cgroup/cpu/a/cpu.cfs_quota_us": "50000\n",
        "cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
    },
]


@pytest.mark.parametrize("quota", QUOTAS)
def test_cores_and_instruction_sets(files, quota):
    info = "processor : 0\nmodel name\t: Zen\nflags\t\t: fpu avx2 avx512_bf16\n"
    result = check_cores(files({"proc/cpuinfo": info, **quota}))
    assert (result.facts["cpu"], result.facts["instruction_sets"]) == ("Zen", ["avx2", "avx512_bf16"])
    assert result.facts["quota_cores"] == 0.5
    assert result.problems[0].remedy == "serve with --num-threads 1"


@pytest.mark.parametrize("quota", [{}, {"proc/self/cgroup": "0::/a\n", "cgroup/a/cpu.max": "max 100000\n"}])
def test_no_quota(files, quota):
    result = check_cores(files(quota))
    assert (result.facts["quota_cores"], result.facts["cpu"], result.problems) == (None, None, ())


def test_few_descriptors(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 512))
    result = check_limits()
    assert messages(result) == [(Severity.WARNING, "at most 512 descriptors: so many connections less 64 are served")]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_model_that_is_not_there_yet(home):
    result = check_models()
    assert result.facts["models"][SMOLLM2.name]["size_bytes"] is None
    assert [problem.severity for problem in result.problems] == [Severity.WARNING]
    assert result.problems[0].message.endswith(" is not there yet: the first start fetches 93 MB")  # as in README
    assert result.problems[0].remedy == "trioengine pull"
    assert not home.exists()


def test_a_model_that_is_damaged(home):
    path = home / SMOLLM2.location
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    result = check_models()
    assert result.facts["models"][SMOLLM2.name] == {"path": str(path), "size_bytes": 1, "sha256_ok": False}
    assert messages(result) == [(Severity.FATAL, f"{path} is damaged: its checksum is wrong")]


def test_another_model_that_is_damaged(home):
    path = home / GEMMA3.location
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    _, problem = check_models().problems  # the first one is that the default model is not there yet
    assert (problem.severity, problem.message) == (Severity.WARNING, f"{path} is damaged: its checksum is wrong")
    assert problem.remedy == f"rm {path}; trioengine pull gemma3-270m"


def part_of(content):
    return Part("tiny", "1", 9, "tiny", len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("content", "is_whole"),
    [(b"abcde", True), (b"deabc", False), (b"abcd", False), (b"abc", False), (b"abcdef", False), (b"", False)],
)
def test_a_model_of_two_parts(home, monkeypatch, content, is_whole):
    tiny = KnownModel("tiny", "tiny/tiny.gguf", (part_of(b"abc"), part_of(b"de")), "MIT")
    monkeypatch.setattr(doctor, "SMOLLM2", tiny)
    monkeypatch.setattr(doctor, "KNOWN_MODELS", {tiny.name: tiny})
    path = home / tiny.location
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    result = check_models()
    assert result.facts["models"] == {"tiny": {"path": str(path), "size_bytes": len(content), "sha256_ok": is_whole}}
    assert messages(result) == [(Severity.FATAL, f"{path} is damaged: its checksum is wrong")][: not is_whole]


def test_no_place_for_a_model(home, monkeypatch):
    usage = doctor.shutil.disk_usage(home.parent)._replace(free=1 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    found = messages(check_models())
    assert [severity for severity, _ in found] == [Severity.WARNING, *[Severity.FATAL] * 3]
    assert f"{home} cannot be written" in found[2][1]


def test_versions():
    result = check_versions()
    assert None not in result.facts.values()
    assert result.problems == ()


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package", "torch"))
    assert messages(check_versions()) == [(Severity.FATAL, "the package no-such-package is not installed")]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise ImportError('no module named torch')", "a worker cannot start: ImportError: no module named torch"),
        ("import os; os.kill(os.getpid(), 11)", "a worker cannot start: killed by signal 11"),
        ("import sys; sys.exit(3)", "a worker cannot start: exit status 3"),
        ("print('nothing')", "a worker cannot start: exit status 0"),
    ],
)
def test_a_torch_that_is_broken(program, why):
    assert messages(check_worker([sys.executable, "-c", program])) == [(Severity.FATAL, why)]


@pytest.mark.parametrize(
    ("device", "kernels", "expected"),
    [
        ("cpu", "native", []),
        ("cuda", "triton", []),
        ("cuda", "torch", [(Severity.WARNING, "torch's kernels are used, which take longer: there is no compiler")]),
        ("cpu", "torch", [(Severity.WARNING, "torch's kernels are used, which take longer: there is no compiler")]),
    ],
)
def test_a_machine_without_a_compiler(device, kernels, expected):
    found = json.dumps({"device": device, "kernels": kernels, "no_kernels": "there is no compiler"})
    assert messages(check_worker([sys.executable, "-c", f"print({MARK!r} + {found!r})"])) == expected


def test_a_report_has_words_for_what_is_so_and_what_is_not_there(capsys):
    facts = {"sha256_ok": True, "container_left_bytes": None, "open": False}
    assert run_checks({"part": lambda: CheckResult(facts)}, as_json=False) == 0
    assert [re.split(r" {2,}", line)[1:] for line in capsys.readouterr().out.splitlines()[1:4]] == [
        ["checksum right", "yes"],
        ["left in container", "no limit"],
        ["open", "no"],
    ]


def test_a_report_has_a_line_for_gpus(capsys):
    gpu = {"name": "NVIDIA H200", "free_bytes": 149_557_477_376, "total_bytes": 150_109_880_320}
    assert run_checks({"worker": lambda: CheckResult({"gpus": [gpu, gpu]})}, as_json=False) == 0
    one = "name NVIDIA H200, free 149.56 GB, total 150.11 GB"
    assert capsys.readouterr().out.splitlines()[1] == f"  gpus                 {one}; {one}"


def test_a_report(capsys):
    all_checks = {
        "memory": lambda: CheckResult({"free_bytes": 2 * 10**9, "gpus": []}, (warning("ti\x1b[mght", "buy some"),))
    }
    assert run_checks(all_checks, as_json=False) == 0
    assert capsys.readouterr().out.splitlines() == [
        "memory",
        "  free                 2.00 GB",
        "  gpus                 none",
        "problems",
        r"  warning: ti\x1b[mght",
        "    -> buy some",
    ]
    assert (
        run_checks(all_checks | {"disk": lambda: CheckResult(problems=(fatal("none", "buy one"),))}, as_json=True) == 1
    )
    said = json.loads(capsys.readouterr().out)
    assert (said["works"], said["memory"]["gpus"], len(said["problems"])) == (False, [], 2)


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_it_works_without_the_packages_that_it_checks(tmp_path):
    names = ("torch", "trio", "tokenizers", "h11", "msgpack", "numpy", "rich", "gguf", "trio_websocket")
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(names=names))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "trioengine", "doctor", "--json"]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (1, "")
    (problem,) = json.loads(ended.stdout)["problems"][:1]
    assert problem["message"] == "a worker cannot start: ModuleNotFoundError: No module named 'torch'"
    assert problem["remedy"].startswith("pip install 'torch")


def test_on_this_machine(smollm2):
    command = [sys.executable, "-m", "trioengine", "doctor", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = json.loads(ended.stdout)
    assert (ended.returncode, ended.stderr, said["works"]) == (0, "", True)
    assert said["worker"]["dtype"] in ("bfloat16", "float32")
    assert said["models"]["models"]["smollm2-135m-instruct"]["sha256_ok"] is True


def test_the_probe_gets_no_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_API_KEY", "secret")
    seen = tmp_path / "seen"
    check_worker((sys.executable, "-c", f"import os; open({str(seen)!r}, 'w').write(repr(dict(os.environ)))"))
    assert "PYTHONPATH" in seen.read_text()
    assert "secret" not in seen.read_text()
