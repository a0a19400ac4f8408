"""``moecomm bench``: how long exchanges take on this machine's GPUs, checked before they are timed.

``session`` starts a process per rank; ``worker`` is what each does: check an exchange against an
oracle bit by bit (``inputs``, ``oracle``), time it in replayed CUDA graphs (``timing``), and
measure what bounds it (``link``) and what it competes with (``nccl``).
"""
