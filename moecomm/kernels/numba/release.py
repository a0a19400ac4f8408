"""release: a handle ends without combine; its records have been read.

Writes: peers' ack.
"""

from __future__ import annotations

from moecomm.kernels.numba.device import *
from moecomm.kernels.numba.protocol import *
from moecomm.kernels.numba.waits import *


def release(a: Args) -> None:
    wait_for_earlier_kernels()
    epoch = sent_epoch(a)
    goes_on(a, epoch)  # tells the host if the group has given up
    acknowledge(a, epoch)
