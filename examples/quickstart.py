import numpy as np

import moecomm as mc

cfg = mc.MoeConfig(num_experts=8, top_k=2, hidden=256, max_tokens=64,
                   dispatch_dtype="float32", combine_dtype="float32")

def layer(group: mc.Group) -> float:
    x = np.random.default_rng(group.rank).random((50, cfg.hidden), np.float32)  # 50 tokens here
    topk_idx = (np.arange(50)[:, None] + [0, 3]) % cfg.num_experts  # two experts for each
    with mc.MoeComm(cfg, group) as comm:
        recv = comm.dispatch(x, topk_idx)  # recv.x [local experts, rows, hidden]
        y = np.zeros_like(recv.x)
        for expert, count in enumerate(recv.counts):  # your experts here; these double
            y[expert, :count] = 2 * recv.x[expert, :count]
        out = comm.combine(y, recv.handle, topk_weights=np.full((50, 2), 0.5, np.float32))
    return float(np.abs(out - 2 * x).max())

if __name__ == "__main__":
    print("largest error on each rank:", mc.run(layer, 4))
