"""``moecomm demo``: a small, real mixture-of-experts layer on real text, sharded and checked.

text.py     text → tokens → vectors
router.py   vectors → top-k experts and weights
experts.py  SwiGLU experts, and running those of one rank over received rows
layer.py    the layer twice: sharded over ranks through MoeComm, and plain
traffic.py  what crosses between ranks, counted from the routing
report.py   the printed report
session.py  options → everything above → result
"""
