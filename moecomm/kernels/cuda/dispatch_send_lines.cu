// dispatch_send, with flags in the data: for small batches, where waiting costs more than bytes.
//
// As dispatch_send.cu, but a block first makes the token's image (meta | row | scales) in shared
// memory, once, and then its warps write it to each destination as lines.
//
// Writes: peers' head, record; own route, num_dest, weight, num_tokens, epoch.
// Order: none but the lines' own.
#include "line.cuh"
#include "routing.cuh"
#include "wire_row.cuh"

// Shared memory: the part of the image that all destinations share, and each one's meta.
struct Image {
    u8* body;   // [RECORD_WORDS * 8 - META_BYTES]
    u32* meta;  // [num_dest][META_BYTES / 4]

    DEVICE void row_chunk(u64 c, Chunk chunk) const
    {
        *reinterpret_cast<uint4*>(body + c * 16) = to_v4(chunk);
    }

    DEVICE void row_scale(u64 block, float scale) const
    {
        reinterpret_cast<float*>(body + RECORD_SCALE_OFF - META_BYTES)[block] = scale;
    }

    // Between the last scale and the end of the image: sent, but never written again.
    DEVICE void clear_rest() const
    {
        const u64 end = (RECORD_WORDS * 8 - RECORD_SCALE_OFF) / 4;
        for (u64 b = NUM_SCALES + threadIdx.x; b < end; b += blockDim.x) row_scale(b, 0.0f);
    }

    DEVICE u64 word(u32 d, u32 i) const
    {
        if (i < META_BYTES / 8) return reinterpret_cast<const u64*>(meta)[d * (META_BYTES / 8) + i];
        return i < RECORD_WORDS ? reinterpret_cast<const u64*>(body)[i - META_BYTES / 8] : 0;
    }
};

// One warp: the meta of token t for destination d (protocol.cuh), all of it.
DEVICE void make_meta(const Args& a, const Plan& plan, u32 t, u32 d, u32* meta)
{
    const u32 k = lane_id(), first = rank_first_expert(plan.rank[d]);
    const u32 expert = plan.expert[k];
    const bool here = expert != NO_EXPERT && expert_rank(expert) == plan.rank[d];
    if (k < META_EXPERT) meta[k] = k == META_TOKEN ? t : k == META_PLACE ? d : k == META_GROUP ? (u32)(a.rank / REPLICAS) : 0;
    for (u32 i = META_WEIGHT + TOP_K + k; i < META_BYTES / 4; i += WARP_SIZE) meta[i] = 0;
    if (k >= TOP_K) return;
    meta[META_EXPERT + k] = here ? expert - first : NO_EXPERT;
    meta[META_INDEX + k] = here ? plan.index[k] : 0;
    meta[META_WEIGHT + k] = here ? __float_as_uint(plan.weight[k]) : 0;
}

// Warp 0: where token t goes, and what each destination is told. What comes before it is counted.
DEVICE void plan_image(const Args& a, const Counters& s, u32 t, Slot slot, const Image& image)
{
    Plan& plan = *s.plans;
    plan_token(a, t, slot, plan);
    place_token(a, s, t, 0);
    count_planned(a, s, t, plan);
    for (u32 d = 0; d < plan.num_dest; ++d)
        make_meta(a, plan, t, d, image.meta + d * (META_BYTES / 4));
}

DEVICE void send_image(const Plan& plan, const Image& image, u64 epoch)
{
    const u32 pieces = num_pieces(RECORD_WORDS);
    for (u32 task = warp_id(); task < plan.num_dest * pieces; task += num_warps()) {
        const u32 d = task / pieces, piece = task % pieces;
        const u32 word = piece * WARP_WORDS + lane_id() / 8 * LINE_WORDS + lane_id() % 8 * 2;
        Pair v;
        v.low = image.word(d, word);
        v.high = holds_flag() ? epoch : image.word(d, word + 1);
        st_line(lane_address(plan.record[d], piece), v, lane_live(piece, RECORD_WORDS));
    }
}

DEVICE void send_tokens(const Args& a, const Counters& s, Share share, Image image,
                        const SendState& state, u64 epoch)
{
    image.clear_rest();
    for (u32 t = share.first; t < share.last; ++t) {
        const bool ours = is_ours(a, t);
        // Neither needs what is counted: these loads overlap the counting.
        Slot slot;
        if (warp_id() == 0) slot = load_slot(a, t);
        if (ours) make_row(a, t, warp_id(), num_warps(), image);
        // A barrier: what comes before t is counted.
        if (!may_send(a, state, epoch)) return;
        if (warp_id() == 0) plan_image(a, s, t, slot, image);
        __syncthreads();  // every thread's part of the image comes before it is sent
        if (ours) send_image(*s.plans, image, epoch);
        __syncthreads();  // nobody still reads plan and image
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, SM_BLOCKS) dispatch_send_lines(Args a)
{
    DYNAMIC_SHARED(u32, words);
    const Counters s = counters_at(words, 1);
    u64 epoch;
    const SendState state = begin_send(a, s, &epoch);
    Image image;
    image.body = reinterpret_cast<u8*>(words) + (counters_bytes(1) + 15) / 16 * 16;
    image.meta = reinterpret_cast<u32*>(image.body + RECORD_WORDS * 8 - META_BYTES);
    const u32 tokens = token_count(a);
    if (is_divided(tokens) && is_row_block()) publish_counts(a, s, tokens, epoch);
    const Share share = token_share(tokens);
    if (!count_before(a, s, blockIdx.x == 0 ? tokens : share.first, tokens, epoch)) return;
    if (blockIdx.x == 0 && !announce(a, s, tokens, state, epoch)) return;
    if (is_row_block()) send_tokens(a, s, share, image, state, epoch);
}
