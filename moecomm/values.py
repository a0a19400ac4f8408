"""Values of the routing, looked at on the host where it can see them without waiting."""

from __future__ import annotations

import numpy as np

from moecomm.arrays import as_numpy
from moecomm.checks_dispatch import DispatchInputs
from moecomm.config import MoeConfig
from moecomm.errors import ConfigError
from moecomm.reports import bad_expert


def check_values(cfg: MoeConfig, given: DispatchInputs) -> None:
    """What the device check reports after the fact, as an error before anything is sent.

    Raises:
        ConfigError: ``num_tokens`` is out of range, or an expert is, among the tokens that exist.
    """
    tokens = given.num_rows
    if given.num_tokens is not None:
        tokens = int(as_numpy(given.num_tokens)[0])
        if not 0 <= tokens <= given.num_rows:
            raise ConfigError(
                f"num_tokens={tokens}: must be from 0 to the {given.num_rows} rows of x"
            )
    experts = as_numpy(given.topk_idx)[:tokens]
    bad = np.argwhere((experts < -1) | (experts >= cfg.num_experts))
    if len(bad):
        token, slot = (int(i) for i in bad[0])
        raise bad_expert(cfg, token, slot, int(experts[token, slot]))
