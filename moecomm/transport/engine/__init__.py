"""TransferEngine: one-sided writes over several NICs, driven by one thread per GPU."""
