"""The model runner: a step of the scheduler in, sampled tokens out."""
