/* Prints what moecomm/transport/efa/abi.py says, as the installed headers have it. */
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>
#include <stddef.h>
#include <stdio.h>
#define V(x) printf("%s %llu\n", #x, (unsigned long long)(x));
#define O(name, type, field) printf("%s %zu\n", name, offsetof(struct type, field));
#define S(name, type) printf("%s %zu\n", name, sizeof(struct type));
int main(void) {
  V(FI_MSG) V(FI_RMA) V(FI_READ) V(FI_WRITE) V(FI_RECV) V(FI_SEND) V(FI_REMOTE_READ)
  V(FI_REMOTE_WRITE) V(FI_REMOTE_CQ_DATA) V(FI_MORE) V(FI_COMPLETION) V(FI_TRANSMIT_COMPLETE)
  V(FI_DELIVERY_COMPLETE) V(FI_HMEM) V(FI_LOCAL_COMM) V(FI_REMOTE_COMM) V(FI_SOURCE) V(FI_CONTEXT)
  V(FI_CONTEXT2) V(FI_RX_CQ_DATA) V(FI_MR_LOCAL) V(FI_MR_VIRT_ADDR) V(FI_MR_ALLOCATED)
  V(FI_MR_PROV_KEY) V(FI_MR_ENDPOINT) V(FI_MR_HMEM) V(FI_EP_RDM) V(FI_CQ_FORMAT_DATA)
  V(FI_AV_TABLE) V(FI_THREAD_DOMAIN) V(FI_ENABLE) V(FI_OPT_ENDPOINT) V(FI_HMEM_CUDA)
  V(FI_EAGAIN) V(FI_EINVAL) V(FI_ENOSYS) V(FI_ENODATA) V(FI_ENOPROTOOPT) V(FI_EAVAIL)
#ifdef FI_MR_DMABUF
  V(FI_MR_DMABUF) O("DMABUF_FD", fi_mr_dmabuf, fd) O("DMABUF_OFFSET", fi_mr_dmabuf, offset)
  O("DMABUF_LEN", fi_mr_dmabuf, len) O("DMABUF_BASE", fi_mr_dmabuf, base_addr)
#endif
#if FI_MAJOR_VERSION > 1 || FI_MINOR_VERSION >= 18
  V(FI_OPT_CUDA_API_PERMITTED) V(FI_OPT_SHARED_MEMORY_PERMITTED)
#endif
#if FI_MAJOR_VERSION > 1
  V(FI_OPT_MAX_RMA_SIZE)
#endif
  O("INFO_NEXT", fi_info, next) O("INFO_CAPS", fi_info, caps) O("INFO_MODE", fi_info, mode)
  O("INFO_TX_ATTR", fi_info, tx_attr) O("INFO_RX_ATTR", fi_info, rx_attr)
  O("INFO_EP_ATTR", fi_info, ep_attr) O("INFO_DOMAIN_ATTR", fi_info, domain_attr)
  O("INFO_FABRIC_ATTR", fi_info, fabric_attr)
  O("TX_OP_FLAGS", fi_tx_attr, op_flags) O("TX_SIZE", fi_tx_attr, size)
  O("RX_SIZE", fi_rx_attr, size)
  O("EP_TYPE", fi_ep_attr, type) O("EP_MAX_MSG_SIZE", fi_ep_attr, max_msg_size)
  O("DOMAIN_NAME", fi_domain_attr, name) O("DOMAIN_THREADING", fi_domain_attr, threading)
  O("DOMAIN_MR_MODE", fi_domain_attr, mr_mode)
  O("DOMAIN_CQ_DATA_SIZE", fi_domain_attr, cq_data_size)
  O("FABRIC_NAME", fi_fabric_attr, name) O("FABRIC_PROV_NAME", fi_fabric_attr, prov_name)
  O("FID_OPS", fid, ops) O("OPS_CLOSE", fi_ops, close) O("OPS_BIND", fi_ops, bind)
  O("OPS_CONTROL", fi_ops, control) O("FABRIC_OPS", fid_fabric, ops)
  O("FABRIC_OPS_DOMAIN", fi_ops_fabric, domain) O("DOMAIN_OPS", fid_domain, ops)
  O("DOMAIN_OPS_AV_OPEN", fi_ops_domain, av_open) O("DOMAIN_OPS_CQ_OPEN", fi_ops_domain, cq_open)
  O("DOMAIN_OPS_ENDPOINT", fi_ops_domain, endpoint) O("DOMAIN_MR", fid_domain, mr)
  O("MR_OPS_REGATTR", fi_ops_mr, regattr) O("EP_OPS", fid_ep, ops)
  O("EP_OPS_GETOPT", fi_ops_ep, getopt) O("EP_OPS_SETOPT", fi_ops_ep, setopt)
  O("EP_CM", fid_ep, cm) O("CM_OPS_GETNAME", fi_ops_cm, getname) O("EP_MSG", fid_ep, msg)
  O("MSG_OPS_RECVMSG", fi_ops_msg, recvmsg) O("MSG_OPS_SENDMSG", fi_ops_msg, sendmsg)
  O("EP_RMA", fid_ep, rma) O("RMA_OPS_WRITEMSG", fi_ops_rma, writemsg) O("AV_OPS", fid_av, ops)
  O("AV_OPS_INSERT", fi_ops_av, insert) O("CQ_OPS", fid_cq, ops) O("CQ_OPS_READ", fi_ops_cq, read)
  O("CQ_OPS_READERR", fi_ops_cq, readerr) O("CQ_OPS_STRERROR", fi_ops_cq, strerror)
  O("MR_MEM_DESC", fid_mr, mem_desc) O("MR_KEY", fid_mr, key)
  O("AV_ATTR_TYPE", fi_av_attr, type) O("AV_ATTR_COUNT", fi_av_attr, count)
  O("CQ_ATTR_SIZE", fi_cq_attr, size) O("CQ_ATTR_FORMAT", fi_cq_attr, format)
  O("MR_ATTR_IOV", fi_mr_attr, mr_iov) O("MR_ATTR_IOV_COUNT", fi_mr_attr, iov_count)
  O("MR_ATTR_ACCESS", fi_mr_attr, access) O("MR_ATTR_REQUESTED_KEY", fi_mr_attr, requested_key)
  O("MR_ATTR_IFACE", fi_mr_attr, iface) O("MR_ATTR_DEVICE", fi_mr_attr, device)
  S("IOV_BYTES", iovec) O("IOV_BASE", iovec, iov_base) O("IOV_LEN", iovec, iov_len)
  S("RMA_IOV_BYTES", fi_rma_iov) O("RMA_IOV_ADDR", fi_rma_iov, addr)
  O("RMA_IOV_LEN", fi_rma_iov, len) O("RMA_IOV_KEY", fi_rma_iov, key)
  S("MSG_RMA_BYTES", fi_msg_rma) O("MSG_RMA_IOV", fi_msg_rma, msg_iov)
  O("MSG_RMA_DESC", fi_msg_rma, desc) O("MSG_RMA_IOV_COUNT", fi_msg_rma, iov_count)
  O("MSG_RMA_ADDR", fi_msg_rma, addr) O("MSG_RMA_RMA_IOV", fi_msg_rma, rma_iov)
  O("MSG_RMA_RMA_IOV_COUNT", fi_msg_rma, rma_iov_count) O("MSG_RMA_CONTEXT", fi_msg_rma, context)
  O("MSG_RMA_DATA", fi_msg_rma, data) S("MSG_BYTES", fi_msg) O("MSG_IOV", fi_msg, msg_iov)
  O("MSG_DESC", fi_msg, desc) O("MSG_IOV_COUNT", fi_msg, iov_count) O("MSG_ADDR", fi_msg, addr)
  O("MSG_CONTEXT", fi_msg, context) O("MSG_DATA", fi_msg, data) S("CONTEXT_BYTES", fi_context2)
  S("CQ_ENTRY_BYTES", fi_cq_data_entry) O("CQ_ENTRY_CONTEXT", fi_cq_data_entry, op_context)
  O("CQ_ENTRY_FLAGS", fi_cq_data_entry, flags) O("CQ_ENTRY_LEN", fi_cq_data_entry, len)
  O("CQ_ENTRY_DATA", fi_cq_data_entry, data) O("CQ_ERR_CONTEXT", fi_cq_err_entry, op_context)
  O("CQ_ERR_FLAGS", fi_cq_err_entry, flags) O("CQ_ERR_ERR", fi_cq_err_entry, err)
  O("CQ_ERR_PROV_ERRNO", fi_cq_err_entry, prov_errno) O("CQ_ERR_DATA", fi_cq_err_entry, err_data)
  O("CQ_ERR_DATA_SIZE", fi_cq_err_entry, err_data_size)
  /* We allocate these: the header's must not be larger. */
  S("<= AV_ATTR_BYTES", fi_av_attr) S("<= CQ_ATTR_BYTES", fi_cq_attr)
  S("<= MR_ATTR_BYTES", fi_mr_attr) S("<= CQ_ERR_BYTES", fi_cq_err_entry)
  return 0;
}
