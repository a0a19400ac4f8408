// release: a handle ends without combine; its records have been read.
//
// Writes: peers' ack.
#include "waits.cuh"

extern "C" __global__ void release(Args a)
{
    wait_for_earlier_kernels();
    u64 epoch;
    begin_combine(a, &epoch);
    acknowledge(a, epoch);
    ring_ack(a, epoch);
}
