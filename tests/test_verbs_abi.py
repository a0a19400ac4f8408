"""``verbs.structures``, and ``verbs.abi``'s numbers, against the header that is installed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from moecomm.transport.verbs import abi, statuses, structures

HEADER = Path("/usr/include/infiniband/verbs.h")
# structure in C → ours; fields that are named otherwise there
STRUCTURES: dict[str, tuple[type[ctypes.Structure], dict[str, str]]] = {
    "ibv_qp_cap": (structures.QpCap, {}),
    "ibv_qp_init_attr": (structures.QpInitAttr, {}),
    "ibv_global_route": (structures.GlobalRoute, {}),
    "ibv_ah_attr": (structures.AhAttr, {}),
    "ibv_qp_attr": (structures.QpAttr, {"padding": ""}),
    "ibv_srq_init_attr": (
        structures.SrqInitAttr,
        {"max_wr": "attr.max_wr", "max_sge": "attr.max_sge", "srq_limit": "attr.srq_limit"},
    ),
    "ibv_port_attr": (structures.PortAttr, {"room": ""}),
    "ibv_device_attr": (structures.DeviceAttr, {"guids": "node_guid", "others": "max_mr"}),
    "ibv_td_init_attr": (structures.TdInitAttr, {}),
    "ibv_parent_domain_init_attr": (structures.ParentDomainInitAttr, {}),
    "ibv_sge": (structures.Sge, {}),
    "ibv_send_wr": (
        structures.SendWr,
        {
            "ah": "wr.ud.ah",
            "remote_qpn": "wr.ud.remote_qpn",
            "remote_qkey": "wr.ud.remote_qkey",
            "rest": "",
        },
    ),
    "ibv_recv_wr": (structures.RecvWr, {}),
    "ibv_wc": (structures.Wc, {"rest": ""}),
}
OPS = "offsetof(struct ibv_context, ops) + offsetof(struct ibv_context_ops, {})"
INNER = "(long)offsetof(struct verbs_context, {}) - (long)offsetof(struct verbs_context, context)"
# expression in C → our number
NUMBERS = {
    OPS.format("poll_cq"): abi.CONTEXT_POLL_CQ,
    OPS.format("post_srq_recv"): abi.CONTEXT_POST_SRQ_RECV,
    OPS.format("post_send"): abi.CONTEXT_POST_SEND,
    OPS.format("post_recv"): abi.CONTEXT_POST_RECV,
    "offsetof(struct ibv_context, abi_compat)": abi.CONTEXT_ABI_COMPAT,
    "(unsigned long)__VERBS_ABI_IS_EXTENDED": abi.ABI_IS_EXTENDED,
    INNER.format("sz"): abi.VERBS_SIZE,
    INNER.format("alloc_td"): abi.VERBS_ALLOC_TD,
    INNER.format("dealloc_td"): abi.VERBS_DEALLOC_TD,
    INNER.format("alloc_parent_domain"): abi.VERBS_ALLOC_PARENT_DOMAIN,
    "sizeof(struct verbs_context) - offsetof(struct verbs_context, context)": abi.VERBS_TAIL,
    "offsetof(struct ibv_qp, qp_num)": abi.QP_NUM,
    "offsetof(struct ibv_mr, lkey)": abi.MR_LKEY,
    "offsetof(struct ibv_mr, rkey)": abi.MR_RKEY,
    "sizeof(struct ibv_sge)": abi.SGE_BYTES,
    "offsetof(struct ibv_sge, length)": abi.SGE_LENGTH,
    "offsetof(struct ibv_sge, lkey)": abi.SGE_LKEY,
    "sizeof(struct ibv_send_wr)": abi.SEND_WR_BYTES,
    "offsetof(struct ibv_send_wr, next)": abi.SEND_WR_NEXT,
    "offsetof(struct ibv_send_wr, sg_list)": abi.SEND_WR_SG_LIST,
    "offsetof(struct ibv_send_wr, num_sge)": abi.SEND_WR_NUM_SGE,
    "offsetof(struct ibv_send_wr, opcode)": abi.SEND_WR_OPCODE,
    "offsetof(struct ibv_send_wr, send_flags)": abi.SEND_WR_FLAGS,
    "offsetof(struct ibv_send_wr, imm_data)": abi.SEND_WR_IMM,
    "offsetof(struct ibv_send_wr, wr.rdma.remote_addr)": abi.SEND_WR_REMOTE_ADDR,
    "offsetof(struct ibv_send_wr, wr.rdma.rkey)": abi.SEND_WR_RKEY,
    "sizeof(struct ibv_recv_wr)": abi.RECV_WR_BYTES,
    "offsetof(struct ibv_recv_wr, next)": abi.RECV_WR_NEXT,
    "sizeof(struct ibv_wc)": abi.WC_BYTES,
    "offsetof(struct ibv_wc, status)": abi.WC_STATUS,
    "offsetof(struct ibv_wc, opcode)": abi.WC_OPCODE,
    "offsetof(struct ibv_wc, vendor_err)": abi.WC_VENDOR_ERR,
    "offsetof(struct ibv_wc, byte_len)": abi.WC_BYTE_LEN,
    "offsetof(struct ibv_wc, imm_data)": abi.WC_IMM,
    "offsetof(struct ibv_wc, qp_num)": abi.WC_QP_NUM,
    "sizeof(struct ibv_grh)": abi.GRH_BYTES,
    "IBV_ACCESS_LOCAL_WRITE": abi.LOCAL_WRITE,
    "IBV_ACCESS_REMOTE_WRITE": abi.REMOTE_WRITE,
    "IBV_ACCESS_REMOTE_READ": abi.REMOTE_READ,
    "IBV_ACCESS_RELAXED_ORDERING": abi.RELAXED_ORDERING,
    "IBV_QPT_RC": abi.QPT_RC,
    "IBV_QPT_UD": abi.QPT_UD,
    **{f"IBV_QPS_{n}": getattr(abi, f"STATE_{n}") for n in ("INIT", "RTR", "RTS", "ERR")},
    **{f"IBV_{name}": getattr(abi, name) for name in dir(abi) if name.startswith("WR_")},
    **{f"IBV_{name}": getattr(abi, name) for name in ("SEND_SIGNALED", "SEND_INLINE", "WC_GRH")},
    "IBV_WC_SEND": abi.WC_SEND,
    "IBV_WC_RDMA_WRITE": abi.WC_RDMA_WRITE,
    "IBV_WC_RECV": abi.WC_RECV,
    "IBV_WC_RECV_RDMA_WITH_IMM": abi.WC_RECV_RDMA_WITH_IMM,
    "IBV_PORT_ACTIVE": abi.PORT_ACTIVE,
    "IBV_LINK_LAYER_INFINIBAND": abi.LINK_LAYER_INFINIBAND,
    "IBV_LINK_LAYER_ETHERNET": abi.LINK_LAYER_ETHERNET,
}
MASKS = [
    name
    for name in dir(abi)
    if name.startswith("QP_") and name not in ("QP_NUM",)  # enum ibv_qp_attr_mask
]


def fields() -> dict[str, int]:
    """Every field's offset, and every structure's size where it is not open-ended."""
    numbers = {}
    for name, (ours, renamed) in STRUCTURES.items():
        for field in ours._fields_:
            there = renamed.get(field[0], field[0])
            if there:
                numbers[f"offsetof(struct {name}, {there})"] = getattr(ours, field[0]).offset
        if "room" not in renamed:
            numbers[f"sizeof(struct {name})"] = ctypes.sizeof(ours)
    return numbers


@pytest.mark.skipif(
    not (HEADER.exists() and shutil.which("gcc")),
    reason="needs gcc and infiniband/verbs.h (Debian packages gcc and libibverbs-dev)",
)
def test_the_header_agrees(tmp_path: Path) -> None:
    wanted = {
        **fields(),
        **NUMBERS,
        **{f"IBV_{name}": getattr(abi, name) for name in MASKS},
        **{f"IBV_WC_{status.name}": n for n, status in enumerate(statuses.STATUSES)},
    }
    lines = "\n".join(f'printf("%llu\\n", (unsigned long long)({name}));' for name in wanted)
    source = tmp_path / "offsets.c"
    source.write_text(
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\n"
        f"int main(void) {{ {lines} return 0; }}\n"
    )
    program = tmp_path / "offsets"
    subprocess.run(["gcc", "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found = [int(line) for line in printed.split()]
    different = {
        name: (there, ours)
        for (name, ours), there in zip(wanted.items(), found, strict=True)
        if there != ours % (1 << 64)
    }
    assert not different, "in the header, here"
    assert len(wanted) > 150
