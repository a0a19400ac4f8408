"""The direct protocol in Python: one file a stage, to read, to copy and to change.

``device.py`` is the vocabulary: what a kernel is told, and what it can ask of the machine. The
other modules are kernels. They are never run by Python itself: numba compiles them, for a GPU or
for the emulator, with the numbers of one problem in the place of ``device``'s constants.
``docs/change-a-kernel.md`` shows how to change one.
"""
