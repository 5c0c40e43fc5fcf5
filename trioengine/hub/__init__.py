"""Where models come from: known names and paths to files, and files to what the engine must know of a model."""
