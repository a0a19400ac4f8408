"""A virtual machine with an RDMA device, for tests of code that needs one.

QEMU without KVM (so it runs anywhere), Debian's own kernel, soft-RoCE (``rdma_rxe``). The guest's
root is this machine's, shared read-only with a RAM overlay: the checkout, Python and its packages
are there at the same paths, nothing is copied, and nothing that the guest does changes this
machine. ``python tests/vm --help`` is the command line.
"""
