"""OpenAI's routes: chat completions and models."""
