// The configuration of tile_wgmma.cu, and what follows from it: the layout of a stage, registers, the order of tiles.
#pragma once
#include "activation.cuh"
#include "packed_masks.cuh"
#include "params.cuh"
#include "weight_format.cuh"
#include "wgmma.cuh"
#include "work.cuh"

namespace mglu {

constexpr int kType = MGLU_ELEMENT;
constexpr int kMasks = MGLU_N_MASKS;
constexpr Activation kActivation = static_cast<Activation>(MGLU_ACTIVATION);
constexpr int kMaskWeightType = MGLU_MASK_WEIGHTS;  // -1: no mask weights
constexpr int kTokens = MGLU_TOKEN_COLUMNS;         // tokens of a tile, N of the wgmma
constexpr int kBlockRows = MGLU_BLOCK_ROWS;         // rows of W in a tile, a multiple of 16
constexpr int kMaskGroups = MGLU_MASK_GROUPS;  // warpgroups that share 64 rows, each with a part of the masks: 1 or 2
constexpr int kPasses = MGLU_PASSES;           // passes over k, each with an equal part of the masks
constexpr int kStages = MGLU_STAGES;           // stages in the ring
constexpr int kStageChunks = MGLU_SUB;         // chunks of kChunkColumns columns in a stage
constexpr int kSteps = MGLU_STEPS;             // wgmmas of 16 columns in a commit group: 1, 2 or 4
constexpr int kCluster = MGLU_CLUSTER;         // blocks that load W and masks for each other: 1 or 2
constexpr bool kSparse = MGLU_SPARSE != 0;     // masks are the metadata of sparse products, not sign flips
constexpr WeightFormat kFormat = static_cast<WeightFormat>(MGLU_WEIGHT_FORMAT);
using Weight = WeightPairs<kFormat, kType>;
constexpr bool kFp8 = MGLU_FP8 != 0;               // x and W are multiplied in fp8 (tile_fp8.cuh)
constexpr bool kPermutedX = MGLU_PERMUTED != 0;    // p.x is the copy that permute_x.cu or quantize_x.cu has written
constexpr bool kBulkMasks = MGLU_BULK_MASKS != 0;  // TMA loads the masks, whose rows must be 16-byte aligned
constexpr bool kExperts = kItems == Items::table;
#if defined(MGLU_TRAIN) && MGLU_TRAIN
constexpr bool kTrain = true;                // also writes the partial derivatives (tile_training.cuh)
constexpr int kBoxTokens = MGLU_BOX_TOKENS;  // tokens of a box that TMA stores, a multiple of 8
#else
constexpr bool kTrain = false;
constexpr int kBoxTokens = 8;
#endif

constexpr int kRowGroups = (kBlockRows + 63) / 64;
constexpr int kConsumers = kRowGroups * kMaskGroups;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kColumns = kTokens / 2;           // sums of one product that a thread holds
constexpr int kChunkColumns = kFp8 ? 128 : 64;  // columns of a chunk: 128 bytes of a row of x
// True if permute_x or quantize_x runs first and copies x. For experts the copy is sorted by expert. Experts need no
// copy if x is sorted already and products are dense.
constexpr bool kCopiedX = kPermutedX || (kExperts && kSparse);
constexpr bool kTiledX = kPermutedX && !kExperts;  // the copy has one contiguous block for each tile and stage
constexpr int kSwath = 8;                          // row tiles that are visited one after the other for the same tokens
constexpr int kPassMasks = kMasks / kPasses;
static_assert(kBlockRows % 16 == 0 && kBlockRows >= 64, "whole warps of rows, and at least one warpgroup");
static_assert(kMaskGroups == 1 || kMaskGroups == 2, "one warpgroup for all masks, or two");
static_assert(kBlockRows / kCluster % 8 == 0, "a block loads multiples of 8 rows, the period of the swizzle");
static_assert(kConsumers <= 4, "at most four consumer warpgroups: registers");
static_assert(kPasses == 1 || (kPassMasks * kPasses == kMasks && kPassMasks % 4 == 0),
              "the masks of a pass are whole words");
static_assert(!kTrain || !kSparse, "in training products are dense");
static_assert(!kFp8 || (kPermutedX && !kSparse && kPasses == 1 && kStageChunks == 1 && Weight::kBits == 8),
              "products in fp8 have one form");
static_assert(!kTrain || kFormat == WeightFormat::dense, "in training W has the type of x");
static_assert(!kTrain || kTokens % kBoxTokens == 0, "whole boxes");

// Registers per thread, in multiples of 8. A launch gives each thread 168, 128 or 96 registers, and some of these move
// from the producer warpgroup to the consumers. The producer keeps more if its warps expand x (kSparse), and most if
// the consumers also have few sums.
constexpr bool kFewSpareRegisters = (kPassMasks / kMaskGroups + 1) * kTokens / 2 > 112;
constexpr int kDenseProducerRegisters = !kExperts ? 24 : kCluster > 1 || !kCopiedX ? 40 : 32;
constexpr int kProducerRegisters = !kSparse ? kDenseProducerRegisters : kFewSpareRegisters ? 40 : 72;
constexpr int kLaunchRegisters = kConsumers == 2 ? 3 * 168 : kConsumers == 3 ? 4 * 128 : 5 * 96;
constexpr int kConsumerRegisters =
    kConsumers == 1 ? 255 : (kLaunchRegisters - kProducerRegisters) / (8 * kConsumers) * 8;

// A stage of the ring holds
//
// - x [kStageChunks][kTokens][64], with the 16-byte vector v of row r in position v ^ (r % 8);
// - W [kStageChunks][kBlockRows][64], swizzled in the same way (weight_offset());
// - masks [kStageChunks / kMaskSpan][kBlockRows][mask bytes of kMaskSpan chunks]. kMaskSpan makes the number of mask
//   bytes a multiple of 16, the unit of TMA.
//
// For sparse products x is [kStageChunks][2][kTokens][64]. Each half of a chunk has 32 columns, first the even ones,
// then the odd ones, each element followed by a zero.
constexpr int kMaskSpan = kFp8 || kMasks % 2 == 0 ? 1 : 2;
constexpr int kMaskRowBytes = mask_bytes(kChunkColumns * kMaskSpan, kMasks);
constexpr bool kSwizzleMasks = kMasks == 16 && !kFp8;  // rows of 128 bytes, swizzled like the rows of W
constexpr int kXChunkBytes = kTokens * (kSparse ? 256 : 128);
constexpr int kXBytes = kStageChunks * kXChunkBytes;
constexpr int kWeightRowBytes = kChunkColumns / 8 * Weight::kBits;                  // bytes of a chunk of a row
constexpr int kWeightBoxColumns = kWeightRowBytes / (Weight::kBits == 16 ? 2 : 1);  // stored elements of that chunk
constexpr int kWeightChunkBytes = kBlockRows * kWeightRowBytes;
constexpr int kWeightBytes = kStageChunks * kWeightChunkBytes;
constexpr int kMaskBytes = kBulkMasks ? kStageChunks / kMaskSpan * kBlockRows * kMaskRowBytes : 0;
constexpr int kStageBytes = (kXBytes + kWeightBytes + kMaskBytes + 1023) / 1024 * 1024;
static_assert(!kBulkMasks || kStageChunks % kMaskSpan == 0,
              "an odd number of masks is loaded for two chunks at a time");

// The offset in a row of a chunk of W at which TMA puts byte `byte` of the row. TMA's swizzle permutes the 16-byte
// vectors of a row, which has 128, 64 or 32 bytes. `row` is the row modulo 8.
__device__ __forceinline__ u32 weight_offset(int row, int byte) {
    const int swizzle = kWeightRowBytes == 128 ? row : kWeightRowBytes == 64 ? row / 2 % 4 : row / 4 % 2;
    return (byte / 16 ^ swizzle) * 16 + byte % 16;
}

// The first product of warpgroup `group`. The products of a pass (t if the pass computes it, then one for each mask)
// are divided among the warpgroups that share rows.
__host__ __device__ constexpr int first_product(int group, int products) {
    const int longer = products % kMaskGroups;  // the first `longer` warpgroups have one product more
    return group * (products / kMaskGroups) + (group < longer ? group : longer);
}

// True if every pass computes t, false if only the first does. Two warpgroups that share rows keep in step only if all
// passes have the same number of products: without t in later passes they took a fifth more time.
constexpr bool kTotalInEachPass = kPasses == 1 || kMaskGroups == 2;

// In training, the boxes to be stored follow the ring in shared memory: two for each warpgroup and output, each of
// kBoxTokens rows of 128 bytes. The outputs of a warpgroup are Q_i for its masks of a pass, with mask weights also R_i,
// then y and P.
__host__ __device__ constexpr int boxes_of_masks(int masks) { return kMaskWeightType < 0 ? masks : 2 * masks; }
constexpr int kBoxBytes = kBoxTokens * 128;
constexpr int kBoxes = boxes_of_masks((kPassMasks + kMaskGroups - 1) / kMaskGroups) + 2;
constexpr int kStagingBytes = kTrain ? kConsumers * 2 * kBoxes * kBoxBytes : 0;

// Behind these boxes, shared memory holds the exchange and then the barriers. Through the exchange a warpgroup passes t
// and the sum of its terms, and in training the sum of P's terms, to the second warpgroup of its rows and to the next
// pass. In training without a second warpgroup, t stays in registers from pass to pass.
constexpr bool kKeepTotal = kTrain && kMaskGroups == 1 && kPasses > 1;
constexpr int kExchanged = kTrain && !kKeepTotal ? 3 : 2;  // arrays of the exchange, with one float for each sum
constexpr int kExchangeBytes = kMaskGroups == 2 || kPasses > 1 ? kRowGroups * kColumns * kExchanged * 512 : 0;

template <bool kWithResults, bool kOfItems>
struct ParamsOf {
    using Type = TileParams;
};
template <>
struct ParamsOf<true, false> {
    using Type = TrainingTileParams;
};
template <>
struct ParamsOf<true, true> {
    using Type = TrainingItemParams;
};
using LaunchParams = ParamsOf<kTrain, kExperts>::Type;

template <bool kOfItems>
struct OrderOf {
    using Type = TileOrder<kBlockRows, kTokens, kCluster, kSwath>;
};
template <>
struct OrderOf<true> {
    using Type =
        ItemOrder<kBlockRows, kTokens, kCluster, kSwath, kFormat == WeightFormat::fp8_block ? kScaledTogether : 1>;
};
using Tiles = OrderOf<kExperts>::Type;
using LaunchTile = Tiles::Taken;

__device__ __forceinline__ int stage_count(const Params& p) {
    return (p.in_features + kChunkColumns * kStageChunks - 1) / (kChunkColumns * kStageChunks);
}

// A slot of the ring, and the parity of the number of times that the position has wrapped around.
struct RingPosition {
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kStages) {
            slot = 0;
            parity ^= 1;
        }
    }
};

}  // namespace mglu
