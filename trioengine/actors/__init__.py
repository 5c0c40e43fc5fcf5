"""Who does what, on trio: the engine, its sessions and generations, the link to the worker, and its supervisor."""
