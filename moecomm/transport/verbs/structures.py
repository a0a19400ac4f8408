"""The structures of ``infiniband/verbs.h`` that are used here, and reading what others fill.

Like ``abi``, with the numbers, they are part of rdma-core's ABI, and compared with the installed
header.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p


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
