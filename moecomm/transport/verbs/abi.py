"""Structures and numbers of ``infiniband/verbs.h``, as far as they are used here.

They are part of rdma-core's ABI, which only ever grows at the end of a structure (of
``verbs_context``: at its front, which is why its functions have fixed negative offsets from the
``ibv_context`` inside it). A test compiles a program against the installed header and compares.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Final

# enum ibv_access_flags
LOCAL_WRITE: Final = 1
REMOTE_WRITE: Final = 2
REMOTE_READ: Final = 4
RELAXED_ORDERING: Final = 1 << 20  # optional: what does not know it ignores it
# enum ibv_qp_type, ibv_qp_state
QPT_RC: Final = 2
QPT_UD: Final = 4
STATE_INIT: Final = 1
STATE_RTR: Final = 2
STATE_RTS: Final = 3
STATE_ERR: Final = 6
# enum ibv_qp_attr_mask
QP_STATE: Final = 1
QP_ACCESS_FLAGS: Final = 1 << 3
QP_PKEY_INDEX: Final = 1 << 4
QP_PORT: Final = 1 << 5
QP_QKEY: Final = 1 << 6
QP_AV: Final = 1 << 7
QP_PATH_MTU: Final = 1 << 8
QP_TIMEOUT: Final = 1 << 9
QP_RETRY_CNT: Final = 1 << 10
QP_RNR_RETRY: Final = 1 << 11
QP_RQ_PSN: Final = 1 << 12
QP_MAX_QP_RD_ATOMIC: Final = 1 << 13
QP_MIN_RNR_TIMER: Final = 1 << 15
QP_SQ_PSN: Final = 1 << 16
QP_MAX_DEST_RD_ATOMIC: Final = 1 << 17
QP_DEST_QPN: Final = 1 << 20
# enum ibv_wr_opcode, ibv_send_flags
WR_RDMA_WRITE: Final = 0
WR_RDMA_WRITE_WITH_IMM: Final = 1
WR_SEND: Final = 2
SEND_SIGNALED: Final = 2
SEND_INLINE: Final = 8
# enum ibv_wc_opcode, ibv_wc_flags
WC_SEND: Final = 0
WC_RDMA_WRITE: Final = 1
WC_RECV: Final = 128
WC_RECV_RDMA_WITH_IMM: Final = 129
WC_GRH: Final = 1
# port attributes
PORT_ACTIVE: Final = 4
LINK_LAYER_INFINIBAND: Final = 1
LINK_LAYER_ETHERNET: Final = 2
GRH_BYTES: Final = 40  # in front of every datagram's payload

# struct ibv_context: functions that the fast path calls, by their addresses
CONTEXT_POLL_CQ: Final = 96
CONTEXT_POST_SRQ_RECV: Final = 168
CONTEXT_POST_SEND: Final = 208
CONTEXT_POST_RECV: Final = 216
CONTEXT_ABI_COMPAT: Final = 320
ABI_IS_EXTENDED: Final = (1 << 64) - 1  # then a verbs_context surrounds the context
# struct verbs_context, from the ibv_context inside it
VERBS_SIZE: Final = -8
VERBS_ALLOC_TD: Final = -192
VERBS_DEALLOC_TD: Final = -200
VERBS_ALLOC_PARENT_DOMAIN: Final = -208
VERBS_TAIL: Final = 328  # from the inner context to the end of verbs_context
# objects that the library returns
QP_NUM: Final = 52
MR_LKEY: Final = 36
MR_RKEY: Final = 40

# Work requests and completions, written and read by address on the fast path
SGE_BYTES: Final = 16
SGE_LENGTH: Final = 8
SGE_LKEY: Final = 12
SEND_WR_BYTES: Final = 128
SEND_WR_NEXT: Final = 8
SEND_WR_SG_LIST: Final = 16
SEND_WR_NUM_SGE: Final = 24
SEND_WR_OPCODE: Final = 28
SEND_WR_FLAGS: Final = 32
SEND_WR_IMM: Final = 36  # big-endian
SEND_WR_REMOTE_ADDR: Final = 40
SEND_WR_RKEY: Final = 48
RECV_WR_BYTES: Final = 32
RECV_WR_NEXT: Final = 8
WC_BYTES: Final = 48
WC_STATUS: Final = 8
WC_OPCODE: Final = 12
WC_VENDOR_ERR: Final = 16
WC_BYTE_LEN: Final = 20
WC_IMM: Final = 24  # big-endian
WC_QP_NUM: Final = 28


class Gid(ctypes.Structure):
    """``union ibv_gid``."""

    _fields_ = (("raw", c_uint8 * 16),)


class QpCap(ctypes.Structure):
    """``struct ibv_qp_cap``."""

    _fields_ = (
        ("max_send_wr", c_uint32),
        ("max_recv_wr", c_uint32),
        ("max_send_sge", c_uint32),
        ("max_recv_sge", c_uint32),
        ("max_inline_data", c_uint32),
    )


class QpInitAttr(ctypes.Structure):
    """``struct ibv_qp_init_attr``."""

    _fields_ = (
        ("qp_context", c_void_p),
        ("send_cq", c_void_p),
        ("recv_cq", c_void_p),
        ("srq", c_void_p),
        ("cap", QpCap),
        ("qp_type", c_int32),
        ("sq_sig_all", c_int32),
    )


class GlobalRoute(ctypes.Structure):
    """``struct ibv_global_route``."""

    _fields_ = (
        ("dgid", c_uint8 * 16),
        ("flow_label", c_uint32),
        ("sgid_index", c_uint8),
        ("hop_limit", c_uint8),
        ("traffic_class", c_uint8),
    )


class AhAttr(ctypes.Structure):
    """``struct ibv_ah_attr``."""

    _fields_ = (
        ("grh", GlobalRoute),
        ("dlid", c_uint16),
        ("sl", c_uint8),
        ("src_path_bits", c_uint8),
        ("static_rate", c_uint8),
        ("is_global", c_uint8),
        ("port_num", c_uint8),
    )


class QpAttr(ctypes.Structure):
    """``struct ibv_qp_attr``. The last field stands for padding: in C the structure holds 64-bit
    integers (the gids), in ctypes it does not, and sizes are rounded to the alignment."""

    _fields_ = (
        ("qp_state", c_int32),
        ("cur_qp_state", c_int32),
        ("path_mtu", c_int32),
        ("path_mig_state", c_int32),
        ("qkey", c_uint32),
        ("rq_psn", c_uint32),
        ("sq_psn", c_uint32),
        ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint32),
        ("cap", QpCap),
        ("ah_attr", AhAttr),
        ("alt_ah_attr", AhAttr),
        ("pkey_index", c_uint16),
        ("alt_pkey_index", c_uint16),
        ("en_sqd_async_notify", c_uint8),
        ("sq_draining", c_uint8),
        ("max_rd_atomic", c_uint8),
        ("max_dest_rd_atomic", c_uint8),
        ("min_rnr_timer", c_uint8),
        ("port_num", c_uint8),
        ("timeout", c_uint8),
        ("retry_cnt", c_uint8),
        ("rnr_retry", c_uint8),
        ("alt_port_num", c_uint8),
        ("alt_timeout", c_uint8),
        ("rate_limit", c_uint32),
        ("padding", c_uint32),
    )


class SrqInitAttr(ctypes.Structure):
    """``struct ibv_srq_init_attr``."""

    _fields_ = (
        ("srq_context", c_void_p),
        ("max_wr", c_uint32),
        ("max_sge", c_uint32),
        ("srq_limit", c_uint32),
    )


class PortAttr(ctypes.Structure):
    """``struct ibv_port_attr``, with room for what newer libraries append."""

    _fields_ = (
        ("state", c_int32),
        ("max_mtu", c_int32),
        ("active_mtu", c_int32),
        ("gid_tbl_len", c_int32),
        ("port_cap_flags", c_uint32),
        ("max_msg_sz", c_uint32),
        ("bad_pkey_cntr", c_uint32),
        ("qkey_viol_cntr", c_uint32),
        ("pkey_tbl_len", c_uint16),
        ("lid", c_uint16),
        ("sm_lid", c_uint16),
        ("lmc", c_uint8),
        ("max_vl_num", c_uint8),
        ("sm_sl", c_uint8),
        ("subnet_timeout", c_uint8),
        ("init_type_reply", c_uint8),
        ("active_width", c_uint8),
        ("active_speed", c_uint8),
        ("phys_state", c_uint8),
        ("link_layer", c_uint8),
        ("flags", c_uint8),
        ("room", c_uint8 * 16),
    )


class DeviceAttr(ctypes.Structure):
    """``struct ibv_device_attr``."""

    _fields_ = (
        ("fw_ver", c_uint8 * 64),
        ("guids", c_uint64 * 2),
        ("max_mr_size", c_uint64),
        ("page_size_cap", c_uint64),
        ("vendor_id", c_uint32),
        ("vendor_part_id", c_uint32),
        ("hw_ver", c_uint32),
        ("max_qp", c_int32),
        ("max_qp_wr", c_int32),
        ("device_cap_flags", c_uint32),
        ("max_sge", c_int32),
        ("max_sge_rd", c_int32),
        ("max_cq", c_int32),
        ("max_cqe", c_int32),
        ("others", c_int32 * 19),
        ("max_srq", c_int32),
        ("max_srq_wr", c_int32),
        ("max_srq_sge", c_int32),
        ("max_pkeys", c_uint16),
        ("local_ca_ack_delay", c_uint8),
        ("phys_port_cnt", c_uint8),
    )


class TdInitAttr(ctypes.Structure):
    """``struct ibv_td_init_attr``."""

    _fields_ = (("comp_mask", c_uint32),)


class ParentDomainInitAttr(ctypes.Structure):
    """``struct ibv_parent_domain_init_attr``."""

    _fields_ = (
        ("pd", c_void_p),
        ("td", c_void_p),
        ("comp_mask", c_uint32),
        ("alloc", c_void_p),
        ("free", c_void_p),
        ("pd_context", c_void_p),
    )


class Sge(ctypes.Structure):
    """``struct ibv_sge``."""

    _fields_ = (("addr", c_uint64), ("length", c_uint32), ("lkey", c_uint32))


class SendWr(ctypes.Structure):
    """``struct ibv_send_wr`` of a datagram; writes are made of numbers, on the fast path."""

    _fields_ = (
        ("wr_id", c_uint64),
        ("next", c_void_p),
        ("sg_list", c_void_p),
        ("num_sge", c_int32),
        ("opcode", c_int32),
        ("send_flags", c_uint32),
        ("imm_data", c_uint32),
        ("ah", c_void_p),
        ("remote_qpn", c_uint32),
        ("remote_qkey", c_uint32),
        ("rest", c_uint8 * 72),
    )


class RecvWr(ctypes.Structure):
    """``struct ibv_recv_wr``."""

    _fields_ = (
        ("wr_id", c_uint64),
        ("next", c_void_p),
        ("sg_list", c_void_p),
        ("num_sge", c_int32),
    )


class Wc(ctypes.Structure):
    """``struct ibv_wc``."""

    _fields_ = (
        ("wr_id", c_uint64),
        ("status", c_int32),
        ("opcode", c_int32),
        ("vendor_err", c_uint32),
        ("byte_len", c_uint32),
        ("imm_data", c_uint32),
        ("qp_num", c_uint32),
        ("src_qp", c_uint32),
        ("wc_flags", c_uint32),
        ("rest", c_uint8 * 8),
    )


def load(kind: type[ctypes._SimpleCData[int]], address: int) -> int:
    """The number of ``kind`` at ``address``."""
    return kind.from_address(address).value
