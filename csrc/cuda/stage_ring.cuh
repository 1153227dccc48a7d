// A warp's private ring of stages in shared memory, filled with cp.async.
//
// A stage is kRows rows of kOctets octets (8 weights each): the weights row by row in blocks of 64 columns (128 bytes), then
// the mask bytes row by row. The warp's lanes fill it together; each warp waits only for itself.
#pragma once
#include "params.cuh"
#include "ptx.cuh"

namespace mglu {

template <int kRows_, int kOctets_, int kMasks_, int kMaskVector_>
struct StageShape {
    static constexpr int kRows = kRows_;
    static constexpr int kOctets = kOctets_;
    static constexpr int kMasks = kMasks_;
    static constexpr int kMaskVector = kMaskVector_;  // bytes a lane copies of the masks at a time
    static constexpr int kWeightBytes = kRows * kOctets * 16;
    static constexpr int kMaskRowBytes = kOctets * kMasks;
    static constexpr int kBytes = kWeightBytes + kRows * kMaskRowBytes;
    // The fragment readers' lanes touch 32 bytes of each of four rows at once; row r has its n-th 32 bytes at n ^ (r % 4), so
    // that the rows use different banks. Of the masks' rows they touch two, which matters only where rows are whole multiples
    // of 128 bytes: odd rows exchange neighbouring 16-byte vectors.
    static constexpr bool kSwizzleMasks = kMaskRowBytes % 128 == 0 && kMaskVector == 16;
};

// Copies one warp's 16 rows, stage after stage, from global memory into its ring. A lane keeps one pointer into W
// and one into the masks; the rows of its other copies lie a warp-uniform step further on.
template <typename Shape, int kStep>  // kStep: a warp takes every kStep-th stage of k
class StageLoader {
    static constexpr int kRows = Shape::kRows;
    static constexpr int kOctets = Shape::kOctets;
    static constexpr int kMasks = Shape::kMasks;
    static constexpr int kMaskVector = Shape::kMaskVector;
    static constexpr int kMaskRowBytes = Shape::kMaskRowBytes;
    // One copy is one vector a lane. With V vectors a row it covers 32 / V whole rows, or a V / 32-th part of one.
    static constexpr int kRowsPerCopy = 32 / kOctets;
    static constexpr int kWeightCopies = kRows / kRowsPerCopy;
    static constexpr int kVectorsPerRow = kMaskRowBytes / kMaskVector;
    static constexpr int kMaskVectors = kRows * kVectorsPerRow;
    static constexpr int kMaskCopies = (kMaskVectors + 31) / 32;
    // A lane's copies of the masks differ by whole rows (or by 32 vectors) if V divides 32 (or is divided by it);
    // else each has an offset of its own.
    static constexpr bool kRegular = 32 % kVectorsPerRow == 0 || kVectorsPerRow % 32 == 0;
    static constexpr int kMaskRowsPerCopy = kVectorsPerRow < 32 ? 32 / kVectorsPerRow : 1;
    static constexpr int kMaskCopiesPerRow = kRegular && kVectorsPerRow > 32 ? kVectorsPerRow / 32 : 1;
    static constexpr int kOffsets = kRegular ? 1 : kMaskCopies;
    static_assert(kMaskRowBytes % kMaskVector == 0, "a stage's mask row is whole vectors");
    static_assert(32 % kOctets == 0, "a copy of weights is whole rows");

    const u8* weight_;
    const u8* masks_;
    i64 weight_step_;
    i64 mask_step_;
    u32 weight_place_;  // inside a slot
    u32 mask_offset_[kOffsets];
    u32 mask_place_[kOffsets];
    int lane_;
    int octets_left_;  // of the row, from the next stage's first on
    u64 policy_;

    template <int kBytes, bool kPrefetch>
    __device__ __forceinline__ void bring(u32 place, const u8* from, u32 valid) const {
        if constexpr (!kPrefetch) copy_async<kBytes>(place, from, valid, policy_);
        else if (valid > 0) prefetch(from);
    }

  public:
    __device__ __forceinline__ StageLoader(const Params& p, bool read_once) {
        const int lane = threadIdx.x % 32;
        lane_ = lane;
        keep(lane_);
        policy_ = cache_policy(read_once);
        // Consecutive lanes take consecutive octets of a row, whole 128-byte lines at a time.
        const int row = lane / kOctets;
        weight_place_ = lane % kOctets / 8 * (kRows * 128) + row * 128 + ((lane % 8) ^ (row % 4 * 2)) * 16;
        weight_step_ = p.weight_row_stride * (2 * kRowsPerCopy);
        mask_step_ = p.mask_row_stride * kMaskRowsPerCopy;
#pragma unroll
        for (int c = 0; c < kOffsets; ++c) {
            const int vector = c * 32 + lane;
            const int tile_row = vector / kVectorsPerRow;
            const int column = vector % kVectorsPerRow;
            mask_offset_[c] = tile_row * static_cast<u32>(p.mask_row_stride) + column * kMaskVector;
            const int place = Shape::kSwizzleMasks ? column ^ (tile_row & 1) : column;
            mask_place_[c] = Shape::kWeightBytes + tile_row * kMaskRowBytes + place * kMaskVector;
            keep(mask_offset_[c]);
            keep(mask_place_[c]);
        }
        keep(weight_place_);
    }

    // Points at a stage of kRows rows; load_next() goes on from there along k.
    __device__ __forceinline__ void start(const Params& p, int first_row, int first_stage) {
        const int lane = threadIdx.x % 32;
        const int row = lane / kOctets;
        octets_left_ = p.in_features / 8 - first_stage * kOctets;
        weight_ = static_cast<const u8*>(p.weight) + (first_row + row) * p.weight_row_stride * 2 +
                  static_cast<i64>(first_stage * kOctets + lane % kOctets) * 16;
        masks_ = p.masks + first_row * p.mask_row_stride + static_cast<i64>(first_stage) * kMaskRowBytes;
        if constexpr (kRegular) masks_ += mask_offset_[0];
        keep(weight_);
        keep(masks_);
    }

    // Copies the next of this warp's stages to a slot (a shared address), or asks L2 for it.
    template <bool kPrefetch = false>
    __device__ __forceinline__ void load_next(u32 slot) {
        const int lane = lane_;
        // Weights past the row's end become zeros. Mask bits there meet zeros: they may be anything, and only must
        // not be read.
        const u8* weight = weight_;
#pragma unroll
        for (int c = 0; c < kWeightCopies; ++c) {
            const u32 valid = lane % kOctets < octets_left_ ? 16 : 0;
            const u32 flip = c * kRowsPerCopy % 4 * 32;
            bring<16, kPrefetch>((slot + weight_place_ + c * kRowsPerCopy * 128) ^ flip, weight, valid);
            weight += weight_step_;
        }
        weight_ += kStep * kOctets * 16;
        const u8* masks = masks_;
#pragma unroll
        for (int c = 0; c < kMaskCopies; ++c) {
            const int vector = c * 32 + lane;
            const int column = vector % kVectorsPerRow * kMaskVector;  // in bytes
            if ((kMaskVectors % 32 == 0 || vector < kMaskVectors) && column < octets_left_ * kMasks) {
                if constexpr (kRegular) {
                    const int part = c % kMaskCopiesPerRow * 32 * kMaskVector;
                    const int row = c / kMaskCopiesPerRow * kMaskRowsPerCopy;
                    const u32 flip = Shape::kSwizzleMasks ? row % 2 * 16 : 0;
                    bring<kMaskVector, kPrefetch>((slot + mask_place_[0] + row * kMaskRowBytes + part) ^ flip, masks + part,
                                                  kMaskVector);
                } else {
                    bring<kMaskVector, kPrefetch>(slot + mask_place_[c], masks + mask_offset_[c], kMaskVector);
                }
            }
            if (kRegular && c % kMaskCopiesPerRow == kMaskCopiesPerRow - 1) masks += mask_step_;
        }
        masks_ += kStep * kMaskRowBytes;
        octets_left_ -= kStep * kOctets;
    }
};

}  // namespace mglu
