"""What this machine has for serving a model, and what it lacks."""
