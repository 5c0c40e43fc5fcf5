"""Text to tokens and back: pure code over tokenizers and jinja2."""
