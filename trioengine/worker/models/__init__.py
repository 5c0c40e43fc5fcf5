"""Models: a file per `model_type` of config.json."""
