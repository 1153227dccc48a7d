// The epilogue of tile_wgmma.cu in training. It writes y and the partial derivatives of y, so that the backward pass
// needs neither the products t and f_i nor the activation:
//
//     P   = dy/dt   = sum_i r_i (act(g_i) + act'(g_i) v_i) / 2
//     Q_i = dy/df_i = r_i (act(g_i) - act'(g_i) v_i) / 2
//     R_i = dy/dr_i = act(g_i) v_i, if there are mask weights
//
// g_i is the gate, v_i the value and r_i the mask weight of mask i. The partial derivatives are one tensor
// [tokens][n_masks + 1 or 2 n_masks + 1][out_features]: P, Q_1 to Q_n, R_1 to R_n.
#pragma once
#include "element.cuh"
#include "tile_mainloop.cuh"

namespace mglu {

// The boxes that a warpgroup stores by TMA, one for each output. A box is 64 rows of W by kBoxTokens tokens, with a row
// of 128 bytes for each token in the 128-byte swizzle. There are two sets of boxes: the warpgroup fills one while the
// TMA unit reads the other.
//
// TMA clips a box at the last token of the call, but not at the end of an item, after which another item's tokens
// follow. So the item's last box is stored token by token; the swizzle of a token's row follows from the row's address
// in shared memory.
class StoredBoxes {
    struct Maps {
        const TensorMap& of_boxes;
        const TensorMap& of_tokens;  // boxes of one token, for experts
    };
    const Maps y_;
    const Maps partials_;
    const int warp_ = threadIdx.x / 32 % 4;
    const int lane_ = threadIdx.x % 32;
    const int barrier_ = 8 + threadIdx.x / 128;  // named barrier of the warpgroup
    const u32 boxes_;                            // address of the warpgroup's two sets
    u32 column_;                                 // where this lane stores in the first box (store_matrices_transposed)
    u32 filling_ = 0;                            // offset of the set that is being filled: 0 or kSetBytes

    static constexpr u32 kSetBytes = kBoxes * kBoxBytes;

  public:
    // `memory` holds the boxes of all warpgroups.
    __device__ __forceinline__ StoredBoxes(const Maps& y, const Maps& partials, u32 memory)
        : y_(y),
          partials_(partials),
          boxes_(memory + threadIdx.x / 128 * (2 * kSetBytes)),
          column_(boxes_ + lane_ % 8 * 128 + ((2 * warp_ + lane_ / 8 % 2) ^ lane_ % 8) * 16) {
        keep_in_register(column_);
    }

    // Puts 16 rows of W by 8 tokens into a box, from the tile's token 8 j on. A thread has the values of rows g and
    // g + 8, tokens 2q and 2q + 1.
    __device__ __forceinline__ void put(int box, int j, const float (&value)[4]) const {
        store_matrices_transposed(column_ + filling_ + box * kBoxBytes + j % (kBoxTokens / 8) * 1024,
                                  from_floats<kType>(value[0], value[1]), from_floats<kType>(value[2], value[3]));
    }

    // Puts y and P into their boxes, which follow the boxes of the warpgroup's kCount masks.
    template <int kCount>
    __device__ __forceinline__ void put_results(int j, const float (&y)[4], const float (&twice_p)[4]) const {
        const float p[4] = {0.5f * twice_p[0], 0.5f * twice_p[1], 0.5f * twice_p[2], 0.5f * twice_p[3]};
        put(boxes_of_masks(kCount), j, y);
        put(boxes_of_masks(kCount) + 1, j, p);
    }

    // Stores the boxes of kCount masks from `first_mask` on, and with `done` also the boxes of y and P. The first row
    // of W is `row`, and the tile's tokens end before `end`. Each warp issues every fourth store.
    template <int kCount>
    __device__ __forceinline__ void store(const Params& p, int row, int token, int end, int first_mask, bool done) {
        constexpr int kOfMasks = boxes_of_masks(kCount);
        fence_async_proxy();
        if (lane_ == 0) store_wait_read();  // wait for the other set, which is filled next
        named_sync<128>(barrier_);
        if (lane_ == 0 && token < end) {
#pragma unroll 1
            for (int box = warp_; box < kOfMasks + (done ? 2 : 0); box += 4) {
                const u32 source = boxes_ + filling_ + box * kBoxBytes;
                const int of_mask = first_mask + (box < kCount ? box : kMasks + box - kCount);
                const int partial = box < kOfMasks ? 1 + of_mask : 0;
                // The partial derivatives are not read until the backward pass, so they may leave L2 first.
                if constexpr (!kExperts) {  // two calls, since choosing the map at run time would cost registers
                    if (box == kOfMasks) tma_store_box(y_.of_boxes, row, token, source, cache_policy(false));
                    else
                        tma_store_box(partials_.of_boxes, partial * p.out_features + row, token, source,
                                      cache_policy(true));
                    continue;
                }
                const Maps& maps = box == kOfMasks ? y_ : partials_;
                const int column = box == kOfMasks ? row : partial * p.out_features + row;
                const u64 policy = cache_policy(box != kOfMasks);
                if (token + kBoxTokens <= end) tma_store_box(maps.of_boxes, column, token, source, policy);
                else
                    for (int i = 0; token + i < end; ++i)
                        tma_store_box(maps.of_tokens, column, token + i, source + i * 128, policy);
            }
            store_commit();
        }
        filling_ = kSetBytes - filling_;
    }

    // Waits until all stores are complete.
    __device__ __forceinline__ void finish() const {
        if (lane_ == 0) store_wait();
    }
};

// The mask weights of eight tokens from `token` on, for kCount masks from `first_mask` on. A thread loads the weights
// of tokens 2q and 2q + 1 for masks g, g + 8 and so on; get() gets other masks' weights from other lanes.
template <int kCount>
class MaskWeights {
    float loaded_[2][(kCount + 7) / 8];

  public:
    __device__ __forceinline__ MaskWeights(const Params& p, int token, int first_mask) {
        if constexpr (kMaskWeightType < 0) return;
        u32 lane = threadIdx.x % 32;
        keep_in_register(lane);  // otherwise the addresses of all tokens stay in registers in all passes
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            // Clamp the token; results past the last token are not stored.
            const int row = min(static_cast<int>(token + lane % 4 * 2 + c), p.tokens - 1);
#pragma unroll
            for (int i = 0; i < kCount; i += 8)
                loaded_[c][i / 8] =
                    load_mask_weight<kMaskWeightType>(p, row, first_mask + min(i + lane / 4, kCount - 1u));
        }
    }

    // The weight of the mask first_mask + i for token 2q + c; 1 without mask weights.
    __device__ __forceinline__ float get(int i, int c) const {
        if constexpr (kMaskWeightType < 0) return 1.0f;
        else return shuffle_from_quad(loaded_[c][i / 8], i % 8);
    }
};

// Adds the terms of a warpgroup's masks to y, and their terms of 2 P to `twice_p`, and puts Q_i and R_i into boxes. It
// handles 16 rows of W by the tile's j-th 8 tokens, which begin at `token`. `first_mask` is the first mask of `sums`.
template <bool kTotal, int kFirst, int kCount>
__device__ __forceinline__ void add_terms_and_derivatives(const Params& p,
                                                          const Accumulators<kTotal, kFirst, kCount>& sums,
                                                          const float (&total)[4], int j, int token, int first_mask,
                                                          float (&y)[4], float (&twice_p)[4],
                                                          const StoredBoxes& boxes) {
    const MaskWeights<kCount> term_weights(p, token, first_mask);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float mask_weight[2] = {term_weights.get(i, 0), term_weights.get(i, 1)};
        float term[4], q[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float f = sums.f[i][4 * j + r];
            const float gate = 0.5f * total[r] - 0.5f * f;
            const float value = 0.5f * total[r] + 0.5f * f;
            const ValueAndDerivative act = activate_with_derivative<kActivation, true>(gate);
            term[r] = act.value * value;
            y[r] += mask_weight[r % 2] * term[r];
            twice_p[r] += mask_weight[r % 2] * fmaf(act.derivative, value, act.value);
            q[r] = 0.5f * mask_weight[r % 2] * fmaf(-act.derivative, value, act.value);
        }
        boxes.put(i, j, q);
        if constexpr (kMaskWeightType >= 0) boxes.put(kCount + i, j, term);
    }
}

}  // namespace mglu
