"""``python -m moecomm``: the same as the ``moecomm`` command."""

from moecomm.cli.main import main

main()
