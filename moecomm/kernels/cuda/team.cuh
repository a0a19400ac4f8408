// Who moves a row together.
//
// Rows that travel with flags are moved by a *team* each: in large batches a warp, in small ones, which
// have fewer rows than a GPU has warps, the whole block.
#pragma once
#include "common.cuh"

DEVICE u32 num_teams() { return BLOCK_PER_ROW ? 1 : num_warps(); }
DEVICE u32 team_id() { return BLOCK_PER_ROW ? 0 : warp_id(); }
DEVICE u32 team_thread() { return BLOCK_PER_ROW ? threadIdx.x : lane_id(); }
DEVICE u32 team_threads() { return BLOCK_PER_ROW ? blockDim.x : WARP_SIZE; }
DEVICE bool leads_team() { return !BLOCK_PER_ROW || warp_id() == 0; }  // a whole warp

DEVICE void team_sync()
{
    if (BLOCK_PER_ROW)
        __syncthreads();
    else
        __syncwarp();
}

// A barrier; whether `yes` holds for the whole team.
DEVICE bool team_all(bool yes)
{
    if (BLOCK_PER_ROW) return __syncthreads_and(yes);
    const bool all = __all_sync(FULL_WARP, yes);
    __syncwarp();  // a vote orders no memory
    return all;
}
