// combine_push: a bounce: staged rows  →  where the network reads them.
//
// Rows of all groups lie one behind the other. Nothing is pushed of a step that overflowed, or of one
// that combine_send has given up.
//
// Reads: own out_row, plan, rung, staged_first.  Writes: the same area for the network, plan, door.
#include "bounce_push.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) combine_push(Args a)
{
    let_next_kernel_start();
    const u64 epoch = ld(rung_word(a, DOOR_ROWS));
    push_ticket(a, HALF_COMBINE, epoch);
    if (epoch == ld(pushed_word(a, HALF_COMBINE))) return;
    note_epoch(epoch);
    if (blockIdx.x == 0) push_plan(a, PLAN_ROW_FIRST, PLAN_ROW_BASE + 1);
    Copier copier;
    const u64 rows = ld(staged_first(a) + NUM_GROUPS), source = staged_row(a, 0);
    copier.span(at_network(a, source), source, rows * COMBINE_STRIDE);
    if (!push_over(a, DOOR_ROWS)) return;
    st(pushed_word(a, HALF_COMBINE), epoch);
    push_ring(a, DOOR_ROWS, epoch);
}
