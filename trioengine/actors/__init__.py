"""The engine on trio: its sessions and generations, the link to the worker, and the worker's supervisor."""
