// Multiplies tiles with AMX. Included inside a file's own namespace, after terms.h.
//
// `tdpbf16ps` multiplies a tile of 16 rows with a tile of 16 columns, 32 deep, and adds the products to 16 x 16 sums.
// All eight tile registers are used, four for sums and two for each operand: 32 features by 32 tokens.
#include "tiles.h"

// Configures all eight tiles as 16 rows of 64 bytes on this thread, for the lifetime of this object.
class Tiles {
  public:
    Tiles() {
        alignas(64) std::uint8_t config[64] = {1};  // byte 0: palette 1; from 16: bytes per row; from 48: rows
        for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// sums [32 features][16 * Vecs tokens] += weights [steps][2 tiles] * x [steps][Vecs tiles]. With `first`, sums are
// overwritten.
template <int Vecs>
void multiply(const float* weights, std::int64_t steps, const float* x, float* sums, bool first) {
    constexpr std::int64_t kWidth = 16 * Vecs, kBytes = 4 * kWidth;
    asm volatile("" ::: "memory");  // GCC does not know that its tile loads read memory
    _tile_zero(0);
    _tile_zero(1);
    if (Vecs == 2) _tile_zero(2);
    if (Vecs == 2) _tile_zero(3);
    if (!first) {
        _tile_loadd(0, sums, kBytes);
        _tile_loadd(1, sums + 16 * kWidth, kBytes);
        if (Vecs == 2) _tile_loadd(2, sums + 16, kBytes);
        if (Vecs == 2) _tile_loadd(3, sums + 16 * kWidth + 16, kBytes);
    }
    for (std::int64_t step = 0; step < steps; ++step, weights += 2 * kSpacedTile, x += Vecs * kTile) {
        _tile_loadd(6, x, 64);
        _tile_loadd(4, weights, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, weights + kSpacedTile, 64);
        _tile_dpbf16ps(1, 5, 6);
        if (Vecs == 2) {
            _tile_loadd(7, x + kTile, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, kBytes);
    _tile_stored(1, sums + 16 * kWidth, kBytes);
    if (Vecs == 2) _tile_stored(2, sums + 16, kBytes);
    if (Vecs == 2) _tile_stored(3, sums + 16 * kWidth + 16, kBytes);
}
