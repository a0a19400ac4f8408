// release: a handle ends without combine; its records have been read.
//
// Writes: peers' ack.
#include "protocol.cuh"

extern "C" __global__ void release(Args a)
{
    const u64 epoch = ld(epoch_word(a));
    note_epoch(epoch);
    if (!aborted(a, epoch)) acknowledge(a, epoch);
}
