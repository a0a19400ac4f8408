// combine_recv: out[t] = sum over places of (weight *) returned row, in fp32, rounded once.
//
// Blocks share out this rank's tokens; each waits for exactly the rows its token is owed, which
// the routing kept by dispatch_send tells. Places count slots k (reduce="receiver": weighted
// here) or destination ranks in ascending order (already weighted).
//
// Reads: own combine_row, combine_flag, route, num_dest, weight.  Writes: out.
// Order: acquire of a row's flag, block barrier, its bytes.
#include "dtype.cuh"
#include "protocol.cuh"

struct Token {  // in shared memory, filled by warp 0
    u32 num;               // rows owed
    u32 place[WARP_SIZE];  // [num] ascending
    u32 peer[WARP_SIZE];   // who owes each
    float weight[WARP_SIZE];
};
static_assert(sizeof(Token) <= SMEM_STRUCT_BYTES, "kernels/geometry.py sets aside too little");

// The weight of slot `lane` with those of later slots that name the same expert, in slot order.
DEVICE float slot_weight(const Args& a, u32 t, u32 route)
{
    const u64 token = a.slot * MAX_TOKENS + t;
    const u32 lane = lane_id();
    if (!a.topk_weights)
        return lane < TOP_K ? ld(local_at<float>(a, LOC_WEIGHT, token * TOP_K + lane)) : 0.0f;
    const bool named = route != NO_EXPERT;
    const float own = named ? given_weight(a, t, lane) : 0.0f;
    float sum = 0.0f;
    for (u32 k = 0; k < TOP_K; ++k) {
        const float w = __shfl_sync(FULL_WARP, own, k);
        if (__shfl_sync(FULL_WARP, route, k) == route && named) sum = __fadd_rn(sum, w);
    }
    return sum;
}

DEVICE void load_token(const Args& a, Token& tok, u32 t)
{
    const u64 token = a.slot * MAX_TOKENS + t;
    const u32 lane = lane_id();
    const u32 route =
        lane < TOP_K ? ld(local_at<u32>(a, LOC_ROUTE, token * TOP_K + lane)) : NO_EXPERT;
    const bool named = route != NO_EXPERT;
    const u32 rank = named ? expert_rank(route & 0xffffu) : 0;
    bool owed = named && route >> 16 == lane;
    u32 place = lane;
    float weight = 1.0f;
    if (ROWS_PER_RANK) {
        // The first lane that names a rank stands for it; its place counts lower ranks.
        const u32 twins = __match_any_sync(FULL_WARP, named ? rank : 0x80000000u | lane);
        owed = named && __ffs(twins) - 1 == (i32)lane;
        const u32 openers = __ballot_sync(FULL_WARP, owed);
        place = 0;
        for (u32 k = 0; k < TOP_K; ++k) {
            const u32 other = __shfl_sync(FULL_WARP, rank, k);
            if ((openers >> k & 1) && other < rank) ++place;
        }
    } else {
        weight = slot_weight(a, t, route);
    }
    const u32 mask = __ballot_sync(FULL_WARP, owed);
    const u32 at = ROWS_PER_RANK ? place : __popc(mask & ((1u << lane) - 1));
    if (owed) {
        tok.place[at] = place;
        tok.peer[at] = rank;
        tok.weight[at] = weight;
    }
    if (lane == 0) tok.num = __popc(mask);
}

DEVICE bool rows_arrived(const Args& a, const Token& tok, u32 t, u64 epoch)
{
    bool ok = true;
    if (threadIdx.x < tok.num)
        ok = wait_for(a, combine_flag(a.symmetric, a, t, tok.place[threadIdx.x]), FlagReached{epoch},
                      epoch, epoch, PHASE_COMBINE_RECV, tok.peer[threadIdx.x]);
    return __syncthreads_and(ok);
}

DEVICE void sum_rows(const Args& a, const Token& tok, u32 t)
{
    typedef Row<COMBINE_DTYPE> Y;
    void* out = (void*)(a.out + t * a.out_stride);
    for (u64 c = threadIdx.x; c < Y::num_chunks(); c += blockDim.x) {
        float sum[Y::kElems];
        Chunk chunk;
        chunk.v4 = zero_chunk();
        if (a.accumulate) chunk = Y::load(out, c, a.out_aligned);
        for (u32 e = 0; e < Y::kElems; ++e)
            sum[e] = a.accumulate ? decode<COMBINE_DTYPE>(element(chunk, e, Y::Elem())) : 0.0f;
        for (u32 i = 0; i < tok.num; ++i) {
            chunk.v4 = ld_v4((const void*)(combine_row(a.symmetric, a, t, tok.place[i]) + c * 16));
            for (u32 e = 0; e < Y::kElems; ++e) {
                const float y = decode<COMBINE_DTYPE>(element(chunk, e, Y::Elem()));
                sum[e] = __fadd_rn(sum[e], ROWS_PER_RANK ? y : __fmul_rn(tok.weight[i], y));
            }
        }
        for (u32 e = 0; e < Y::kElems; ++e) element(chunk, e, Y::Elem()) = encode<COMBINE_DTYPE>(sum[e]);
        Y::store(out, c, chunk, a.out_aligned);
    }
}

extern "C" __global__ void combine_recv(Args a)
{
    const u64 epoch = ld(epoch_word(a));
    note_epoch(epoch);
    if (__syncthreads_or(threadIdx.x == 0 && aborted(a, epoch))) return;
    if (CAPPED && ld(local_at<u64>(a, LOC_OVERFLOWED, a.slot)) == epoch) return;

    DYNAMIC_SHARED(Token, token);
    const u32 tokens = ld(local_at<u32>(a, LOC_NUM_TOKENS, a.slot));
    for (u32 t = blockIdx.x; t < tokens; t += gridDim.x) {
        if (warp_id() == 0) load_token(a, *token, t);
        __syncthreads();
        if (!rows_arrived(a, *token, t, epoch)) return;
        sum_rows(a, *token, t);
        __syncthreads();  // nobody still reads this token
    }
}
