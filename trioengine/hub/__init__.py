"""Models: names and paths to local files, and files to the properties that the engine needs."""
