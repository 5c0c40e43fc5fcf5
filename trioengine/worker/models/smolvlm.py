"""SmolVLM: an Idefics3 of other sizes (arXiv 2504.05299)."""

from __future__ import annotations

from trioengine.worker.models.idefics3 import Model as Model
