"""Numbers of ``infiniband/verbs.h``, as far as they are used here; ``structures`` has the rest.

They are part of rdma-core's ABI, which only ever grows at the end of a structure (of
``verbs_context``: at its front, which is why its functions have fixed negative offsets from the
``ibv_context`` inside it). A test compiles a program against the installed header and compares.
"""

from __future__ import annotations

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
