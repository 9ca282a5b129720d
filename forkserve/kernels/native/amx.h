// The tiles of AMX: eight registers of 16 rows of 64 bytes.
//
// A kernel that uses them makes a `Tiles` first, on its own thread.  The process must have asked
// for them (library.py does).  The intrinsics of gcc do not say that a load reads memory: what was
// written in the same function needs a `written()` before it.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstdint>

#include "simd.h"

namespace fs {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;  // of a row

FS_INLINE void written() { __asm__ __volatile__("" ::: "memory"); }

struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};
// All tiles whole.
inline constexpr TileConfig WHOLE_TILES = {1,
                                           0,
                                           {},
                                           {64, 64, 64, 64, 64, 64, 64, 64},
                                           {16, 16, 16, 16, 16, 16, 16, 16}};

// Tiles are configured while one of these lives; released, they cost a thread switch nothing.
class Tiles {
   public:
    explicit Tiles(const TileConfig& shapes = WHOLE_TILES) {
        // gcc 12 tells the optimiser of 8 of the 64 bytes only.
        __asm__ __volatile__("" : : "r"(&shapes) : "memory");
        _tile_loadconfig(&shapes);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
};

}  // namespace fs

#endif
