// A warp's ring of stages in shared memory, which the warp itself fills with cp.async.
//
// A stage is kRows rows of 8 kOctets columns. It holds the weights in blocks of 64 columns, each block row by row (8
// kBits bytes per row), then the mask bytes row by row. All lanes of the warp copy, and no warp waits for another.
#pragma once
#include "packed_masks.cuh"
#include "params.cuh"
#include "ptx.cuh"

namespace mglu {

template <int kRows_, int kOctets_, int kBits_, int kMasks_, int kMaskVector_>
struct StageShape {
    static constexpr int kRows = kRows_;
    static constexpr int kOctets = kOctets_;
    static constexpr int kBits = kBits_;                       // bits of a weight: 16, 8 or 4
    static constexpr int kElementBytes = kBits == 16 ? 2 : 1;  // bytes of a stored element, the unit of strides
    static constexpr int kMasks = kMasks_;
    static constexpr int kMaskVector = kMaskVector_;  // bytes of masks that one cp.async copies
    static constexpr int kWeightBytes = kRows * kOctets * kBits;
    static constexpr int kBlockRowBytes = 8 * kBits;  // bytes of 64 columns of a row
    static constexpr int kMaskRowBytes = mask_bytes(kOctets * kOctet, kMasks);
    static constexpr int kBytes = kWeightBytes + kRows * kMaskRowBytes;
    // Swizzles that spread the rows over the banks. A warp reads the same quarter of every row of a block at once, so
    // the n-th quarter of row r lies at n ^ swizzle_of(r). Reads of masks touch two rows. They conflict only if the
    // length of a row is a multiple of 128 bytes; then odd rows swap neighbouring 16-byte vectors.
    static constexpr int kQuarterBytes = kBlockRowBytes / 4;
    static __device__ __forceinline__ int swizzle_of(int row) {
        return kBits == 16 ? row % 4 : kBits == 8 ? row / 2 % 4 : row / 4 % 2 * 2;
    }
    static constexpr bool kSwizzleMasks = kMaskRowBytes % 128 == 0 && kMaskVector == 16;
};

// Copies one warp's 16 rows from global memory into its ring, stage by stage. A lane keeps one pointer into W and one
// into the masks. The distances from these pointers to the lane's other copies are the same in all lanes.
template <typename Shape, int kStep>  // a warp takes every kStep-th stage of k
class StageLoader {
    static constexpr int kRows = Shape::kRows;
    static constexpr int kOctets = Shape::kOctets;
    static constexpr int kWeightVectors = kOctets * Shape::kBits / 16;  // 16-byte vectors in a row of a stage
    static constexpr int kVectorOctets = kOctets / kWeightVectors;
    static constexpr int kMasks = Shape::kMasks;
    static constexpr int kMaskVector = Shape::kMaskVector;
    static constexpr int kMaskRowBytes = Shape::kMaskRowBytes;
    // In one copy instruction every lane copies one vector, so the instruction copies 32 / kWeightVectors rows.
    static constexpr int kRowsPerCopy = 32 / kWeightVectors;
    static constexpr int kWeightCopies = kRows / kRowsPerCopy;
    static constexpr int kVectorsPerRow = kMaskRowBytes / kMaskVector;
    static constexpr int kMaskVectors = kRows * kVectorsPerRow;
    static constexpr int kMaskCopies = (kMaskVectors + 31) / 32;
    // If kVectorsPerRow is a divisor or a multiple of 32, a lane's copies of the masks are a constant number of rows,
    // or 32 vectors, apart. Otherwise each copy needs its own offset.
    static constexpr bool kUniformCopies = 32 % kVectorsPerRow == 0 || kVectorsPerRow % 32 == 0;
    static constexpr int kMaskRowsPerCopy = kVectorsPerRow < 32 ? 32 / kVectorsPerRow : 1;
    static constexpr int kMaskCopiesPerRow = kUniformCopies && kVectorsPerRow > 32 ? kVectorsPerRow / 32 : 1;
    static constexpr int kOffsets = kUniformCopies ? 1 : kMaskCopies;
    static_assert(kMaskRowBytes % kMaskVector == 0, "a stage's mask row is whole vectors");
    static_assert(32 % kWeightVectors == 0, "a copy of weights is whole rows");

    const u8* weight_;
    const u8* masks_;
    i64 weight_step_;
    i64 mask_step_;
    u32 weight_slot_offset_;  // offset of the lane's first copy in a slot of the ring
    u32 mask_row_offset_[kOffsets];
    u32 mask_slot_offset_[kOffsets];
    int lane_;
    int octets_left_;  // octets of the row from the next stage on
    u64 policy_;

    template <int kBytes, bool kPrefetch>
    __device__ __forceinline__ void copy_or_prefetch(u32 destination, const u8* from, u32 valid) const {
        if constexpr (!kPrefetch) copy_async<kBytes>(destination, from, valid, policy_);
        else if (valid > 0) prefetch(from);
    }

  public:
    __device__ __forceinline__ StageLoader(const Params& p, bool read_once) {
        const int lane = threadIdx.x % 32;
        lane_ = lane;
        keep_in_register(lane_);
        policy_ = cache_policy(read_once);
        // Consecutive lanes copy consecutive 16-byte vectors of a row, so that they read whole lines of 128 bytes.
        constexpr int kBlockVectors = Shape::kBlockRowBytes / 16;
        const int row = lane / kWeightVectors;
        weight_slot_offset_ = lane % kWeightVectors / kBlockVectors * (kRows * Shape::kBlockRowBytes) +
                              row * Shape::kBlockRowBytes +
                              (lane % kBlockVectors * 16 ^ Shape::swizzle_of(row) * Shape::kQuarterBytes);
        weight_step_ = p.weight_row_stride * (Shape::kElementBytes * kRowsPerCopy);
        mask_step_ = p.mask_row_stride * kMaskRowsPerCopy;
#pragma unroll
        for (int c = 0; c < kOffsets; ++c) {
            const int vector = c * 32 + lane;
            const int tile_row = vector / kVectorsPerRow;
            const int column = vector % kVectorsPerRow;
            mask_row_offset_[c] = tile_row * static_cast<u32>(p.mask_row_stride) + column * kMaskVector;
            const int slot_column = Shape::kSwizzleMasks ? column ^ (tile_row & 1) : column;
            mask_slot_offset_[c] = Shape::kWeightBytes + tile_row * kMaskRowBytes + slot_column * kMaskVector;
            keep_in_register(mask_row_offset_[c]);
            keep_in_register(mask_slot_offset_[c]);
        }
        keep_in_register(weight_slot_offset_);
    }

    // Moves to stage `first_stage` of the kRows rows from `first_row` on; load_next() continues from there along k.
    __device__ __forceinline__ void start(const Params& p, int first_row, int first_stage) {
        const int lane = threadIdx.x % 32;
        const int row = lane / kWeightVectors;
        octets_left_ = p.in_features / kOctet - first_stage * kOctets;
        weight_ = static_cast<const u8*>(p.weight) + (first_row + row) * p.weight_row_stride * Shape::kElementBytes +
                  static_cast<i64>(first_stage * kWeightVectors + lane % kWeightVectors) * 16;
        masks_ = p.packed_masks + first_row * p.mask_row_stride + static_cast<i64>(first_stage) * kMaskRowBytes;
        if constexpr (kUniformCopies) masks_ += mask_row_offset_[0];
        keep_in_register(weight_);
        keep_in_register(masks_);
    }

    // Copies this warp's next stage to a slot (a shared address), or with kPrefetch prefetches it into L2.
    template <bool kPrefetch = false>
    __device__ __forceinline__ void load_next(u32 slot) {
        const int lane = lane_;
        // Weights past the end of the row become zeros. Mask bits past the end may have any value, since they select
        // among zeros, but must not be read from global memory.
        const u8* weight = weight_;
#pragma unroll
        for (int c = 0; c < kWeightCopies; ++c) {
            const u32 valid = lane % kWeightVectors * kVectorOctets < octets_left_ ? 16 : 0;
            const u32 swizzle = Shape::swizzle_of(c * kRowsPerCopy) * Shape::kQuarterBytes;
            copy_or_prefetch<16, kPrefetch>(
                (slot + weight_slot_offset_ + c * kRowsPerCopy * Shape::kBlockRowBytes) ^ swizzle, weight, valid);
            weight += weight_step_;
        }
        weight_ += kStep * kWeightVectors * 16;
        const u8* masks = masks_;
#pragma unroll
        for (int c = 0; c < kMaskCopies; ++c) {
            const int vector = c * 32 + lane;
            const int column = vector % kVectorsPerRow * kMaskVector;  // in bytes
            if ((kMaskVectors % 32 == 0 || vector < kMaskVectors) && column < octets_left_ * kMasks) {
                if constexpr (kUniformCopies) {
                    const int part = c % kMaskCopiesPerRow * 32 * kMaskVector;
                    const int row = c / kMaskCopiesPerRow * kMaskRowsPerCopy;
                    const u32 swizzle = Shape::kSwizzleMasks ? row % 2 * 16 : 0;
                    copy_or_prefetch<kMaskVector, kPrefetch>(
                        (slot + mask_slot_offset_[0] + row * kMaskRowBytes + part) ^ swizzle, masks + part,
                        kMaskVector);
                } else {
                    copy_or_prefetch<kMaskVector, kPrefetch>(slot + mask_slot_offset_[c], masks + mask_row_offset_[c],
                                                             kMaskVector);
                }
            }
            if (kUniformCopies && c % kMaskCopiesPerRow == kMaskCopiesPerRow - 1) masks += mask_step_;
        }
        masks_ += kStep * kMaskRowBytes;
        octets_left_ -= kStep * kOctets;
    }
};

}  // namespace mglu
