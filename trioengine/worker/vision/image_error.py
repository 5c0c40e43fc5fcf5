"""The error of an image, importable without Pillow."""

from __future__ import annotations


class ImageError(Exception):
    """The bytes of an image cannot be decoded, or are not as declared; the message is one sentence for the client."""
