"""The mover of remote peers' bytes: ``docs/protocol.md`` ("Remote peers") as a program of the
transfer engine.

``Mover`` is for callers, ``program`` is what runs in the engine's loop, ``state`` is what the two
share. Importing this module compiles nothing.
"""
