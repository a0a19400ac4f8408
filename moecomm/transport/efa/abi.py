"""libfabric's binary interface: constants, and offsets of the fields that are used.

The same from libfabric 1.17 to 2.6: later versions append to structures. What we pass in is sized
for the newest and zeroed; ``fi_info`` comes from ``fi_dupinfo``. ``tests/test_efa.py`` compares all
of this with the headers where a compiler finds them.
"""

from __future__ import annotations

from typing import Final

# Capabilities and flags.
FI_MSG: Final = 1 << 1
FI_RMA: Final = 1 << 2
FI_READ: Final = 1 << 8
FI_WRITE: Final = 1 << 9
FI_RECV: Final = 1 << 10
FI_SEND: Final = 1 << 11
FI_REMOTE_READ: Final = 1 << 12
FI_REMOTE_WRITE: Final = 1 << 13
FI_REMOTE_CQ_DATA: Final = 1 << 17
FI_MORE: Final = 1 << 18
FI_COMPLETION: Final = 1 << 24
FI_TRANSMIT_COMPLETE: Final = 1 << 27
FI_DELIVERY_COMPLETE: Final = 1 << 28
FI_HMEM: Final = 1 << 47
FI_LOCAL_COMM: Final = 1 << 51
FI_REMOTE_COMM: Final = 1 << 52
FI_SOURCE: Final = 1 << 57

# Modes: what a provider asks of its caller.
FI_CONTEXT: Final = 1 << 59
FI_CONTEXT2: Final = 1 << 52
FI_RX_CQ_DATA: Final = 1 << 56

# Memory registration.
FI_MR_LOCAL: Final = 1 << 2
FI_MR_VIRT_ADDR: Final = 1 << 4
FI_MR_ALLOCATED: Final = 1 << 5
FI_MR_PROV_KEY: Final = 1 << 6
FI_MR_ENDPOINT: Final = 1 << 9
FI_MR_HMEM: Final = 1 << 10
FI_MR_DMABUF: Final = 1 << 40

# Enumerations.
FI_EP_RDM: Final = 3
FI_CQ_FORMAT_DATA: Final = 3
FI_AV_TABLE: Final = 2
FI_THREAD_DOMAIN: Final = 3
FI_ENABLE: Final = 6
FI_OPT_ENDPOINT: Final = 0
FI_OPT_CUDA_API_PERMITTED: Final = 10
FI_OPT_SHARED_MEMORY_PERMITTED: Final = 11
FI_OPT_MAX_RMA_SIZE: Final = 14
FI_HMEM_CUDA: Final = 1
_FI_PROV_SPECIFIC_EFA: Final = 0xEFA << 16
FI_OPT_EFA_EMULATED_WRITE: Final = 2 - _FI_PROV_SPECIFIC_EFA
FI_OPT_EFA_USE_DEVICE_RDMA: Final = 4 - _FI_PROV_SPECIFIC_EFA

# Errors.
FI_EAGAIN: Final = 11
FI_EINVAL: Final = 22
FI_ENOSYS: Final = 38
FI_ENODATA: Final = 61
FI_ENOPROTOOPT: Final = 92
FI_EAVAIL: Final = 259

# struct fi_info
INFO_NEXT: Final = 0
INFO_CAPS: Final = 8
INFO_MODE: Final = 16
INFO_TX_ATTR: Final = 72
INFO_RX_ATTR: Final = 80
INFO_EP_ATTR: Final = 88
INFO_DOMAIN_ATTR: Final = 96
INFO_FABRIC_ATTR: Final = 104
# struct fi_tx_attr, fi_rx_attr
TX_OP_FLAGS: Final = 16
TX_SIZE: Final = 48
RX_SIZE: Final = 48
# struct fi_ep_attr
EP_TYPE: Final = 0
EP_MAX_MSG_SIZE: Final = 16
# struct fi_domain_attr
DOMAIN_NAME: Final = 8
DOMAIN_THREADING: Final = 16
DOMAIN_MR_MODE: Final = 36
DOMAIN_CQ_DATA_SIZE: Final = 48
# struct fi_fabric_attr
FABRIC_NAME: Final = 8
FABRIC_PROV_NAME: Final = 16

# struct fid and what begins with one: where the tables of functions are, and places in them.
FID_OPS: Final = 16
OPS_CLOSE: Final = 8
OPS_BIND: Final = 16
OPS_CONTROL: Final = 24
FABRIC_OPS: Final = 24
FABRIC_OPS_DOMAIN: Final = 8
DOMAIN_OPS: Final = 24
DOMAIN_OPS_AV_OPEN: Final = 8
DOMAIN_OPS_CQ_OPEN: Final = 16
DOMAIN_OPS_ENDPOINT: Final = 24
DOMAIN_MR: Final = 32
MR_OPS_REGATTR: Final = 24
EP_OPS: Final = 24
EP_OPS_GETOPT: Final = 16
EP_OPS_SETOPT: Final = 24
EP_CM: Final = 32
CM_OPS_GETNAME: Final = 16
EP_MSG: Final = 40
MSG_OPS_RECVMSG: Final = 24
MSG_OPS_SENDMSG: Final = 48
EP_RMA: Final = 48
RMA_OPS_WRITEMSG: Final = 48
AV_OPS: Final = 24
AV_OPS_INSERT: Final = 8
CQ_OPS: Final = 24
CQ_OPS_READ: Final = 8
CQ_OPS_READERR: Final = 24
CQ_OPS_STRERROR: Final = 56
MR_MEM_DESC: Final = 24
MR_KEY: Final = 32

# Structures passed in.
AV_ATTR_BYTES: Final = 64
AV_ATTR_TYPE: Final = 0
AV_ATTR_COUNT: Final = 8
CQ_ATTR_BYTES: Final = 64
CQ_ATTR_SIZE: Final = 0
CQ_ATTR_FORMAT: Final = 16
MR_ATTR_BYTES: Final = 128
MR_ATTR_IOV: Final = 0
MR_ATTR_IOV_COUNT: Final = 8
MR_ATTR_ACCESS: Final = 16
MR_ATTR_REQUESTED_KEY: Final = 32
MR_ATTR_IFACE: Final = 64
MR_ATTR_DEVICE: Final = 72
DMABUF_BYTES: Final = 32  # struct fi_mr_dmabuf
DMABUF_FD: Final = 0
DMABUF_OFFSET: Final = 8
DMABUF_LEN: Final = 16
DMABUF_BASE: Final = 24

# struct iovec
IOV_BYTES: Final = 16
IOV_BASE: Final = 0
IOV_LEN: Final = 8
# struct fi_rma_iov
RMA_IOV_BYTES: Final = 24
RMA_IOV_ADDR: Final = 0
RMA_IOV_LEN: Final = 8
RMA_IOV_KEY: Final = 16
# struct fi_msg_rma
MSG_RMA_BYTES: Final = 64
MSG_RMA_IOV: Final = 0
MSG_RMA_DESC: Final = 8
MSG_RMA_IOV_COUNT: Final = 16
MSG_RMA_ADDR: Final = 24
MSG_RMA_RMA_IOV: Final = 32
MSG_RMA_RMA_IOV_COUNT: Final = 40
MSG_RMA_CONTEXT: Final = 48
MSG_RMA_DATA: Final = 56
# struct fi_msg
MSG_BYTES: Final = 48
MSG_IOV: Final = 0
MSG_DESC: Final = 8
MSG_IOV_COUNT: Final = 16
MSG_ADDR: Final = 24
MSG_CONTEXT: Final = 32
MSG_DATA: Final = 40
# struct fi_context2: providers write into it until the operation has completed.
CONTEXT_BYTES: Final = 64
# struct fi_cq_data_entry
CQ_ENTRY_BYTES: Final = 40
CQ_ENTRY_CONTEXT: Final = 0
CQ_ENTRY_FLAGS: Final = 8
CQ_ENTRY_LEN: Final = 16
CQ_ENTRY_DATA: Final = 32
# struct fi_cq_err_entry
CQ_ERR_BYTES: Final = 96
CQ_ERR_CONTEXT: Final = 0
CQ_ERR_FLAGS: Final = 8
CQ_ERR_ERR: Final = 56
CQ_ERR_PROV_ERRNO: Final = 60
CQ_ERR_DATA: Final = 64
CQ_ERR_DATA_SIZE: Final = 72
