"""Compiling the kernels of ``moecomm/kernels/numba``: for GPUs, and for the emulator.

``sources`` finds their text and puts the problem's numbers in; ``cpu`` and ``gpu`` hand the
functions to numba; ``emulated`` and ``launched`` are what a runtime launches.
"""
