//! The AMX instructions: blocks of keys or values times blocks of lanes.

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::super::tiles::TileConfig;
use super::TILE_BYTES;

/// Eight full tiles. Tile `2 * first factor's half + lanes' half` (0 to 3) holds sums, 4 and 5 hold the lanes, 6 and 7 the
/// first factor.
pub(super) static CONFIG: TileConfig = TileConfig::new([(16, 64); 8]);

/// Prefetches a block, but only for few queries, which are memory-bound; with many, the block is already in the cache.
#[inline(always)]
pub(super) fn fetch<const HALVES: usize, const PARTS: usize>(block: *const u16) {
    if HALVES == 1 {
        for line in 0..PARTS * 2 * TILE_BYTES / 64 {
            // SAFETY: prefetching changes nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(block.cast::<i8>().wrapping_add(line * 64)) };
        }
    }
}

#[inline(always)]
pub(super) unsafe fn zero<const HALVES: usize>() {
    // SAFETY: the caller configured the tiles.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm2", options(nostack, nomem));
        if HALVES == 2 {
            asm!("tilezero tmm1", "tilezero tmm3", options(nostack, nomem));
        }
    }
}

/// # Safety
/// The tiles are configured; `from` points to a block.
#[inline(always)]
pub(super) unsafe fn load<const HALVES: usize>(from: *const u8) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        asm!(
            "tileloadd tmm0, [{from} + {line}]", "tileloadd tmm2, [{from} + {line} + 1024]",
            from = in(reg) from, line = in(reg) 64usize, options(nostack, readonly),
        );
        if HALVES == 2 {
            asm!(
                "tileloadd tmm1, [{from} + {line} + 2048]", "tileloadd tmm3, [{from} + {line} + 3072]",
                from = in(reg) from, line = in(reg) 64usize, options(nostack, readonly),
            );
        }
    }
}

/// # Safety
/// The tiles are configured; `to` points to a block.
#[inline(always)]
pub(super) unsafe fn store<const HALVES: usize>(to: *mut u8) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        asm!(
            "tilestored [{to} + {line}], tmm0", "tilestored [{to} + {line} + 1024], tmm2",
            to = in(reg) to, line = in(reg) 64usize, options(nostack),
        );
        if HALVES == 2 {
            asm!(
                "tilestored [{to} + {line} + 2048], tmm1", "tilestored [{to} + {line} + 3072], tmm3",
                to = in(reg) to, line = in(reg) 64usize, options(nostack),
            );
        }
    }
}

/// Adds a block of keys or values (`a`) times a block of lanes (`b`) to the sums: `a.high * b.low` if the lanes have a low
/// part, `a.high * b.high`, then `a.low * b.high` if the block has a low part. The order is the same for any number of lanes.
///
/// # Safety
/// The tiles are configured; `a` and `b` point to blocks.
#[inline(always)]
pub(super) unsafe fn multiply<const HALVES: usize, const PARTS: usize, const QUERY_PARTS: usize>(
    a: *const u8,
    b: *const u8,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        asm!(
            "tileloadd tmm6, [{a} + {line}]",
            "tileloadd tmm7, [{a} + {line} + 1024]",
            a = in(reg) a, line = in(reg) 64usize, options(nostack, readonly),
        );
        if HALVES == 1 {
            if QUERY_PARTS == 2 {
                asm!(
                    "tileloadd tmm4, [{b} + {pair} + 64]",
                    "tdpbf16ps tmm0, tmm6, tmm4",
                    "tdpbf16ps tmm2, tmm7, tmm4",
                    b = in(reg) b, pair = in(reg) QUERY_PARTS * 64, options(nostack, readonly),
                );
            }
            asm!(
                "tileloadd tmm5, [{b} + {pair}]",
                "tdpbf16ps tmm0, tmm6, tmm5",
                "tdpbf16ps tmm2, tmm7, tmm5",
                b = in(reg) b, pair = in(reg) QUERY_PARTS * 64, options(nostack, readonly),
            );
            if PARTS == 2 {
                asm!(
                    "tileloadd tmm6, [{a} + {line} + 2048]",
                    "tdpbf16ps tmm0, tmm6, tmm5",
                    "tileloadd tmm7, [{a} + {line} + 3072]",
                    "tdpbf16ps tmm2, tmm7, tmm5",
                    a = in(reg) a, line = in(reg) 64usize, options(nostack, readonly),
                );
            }
        } else {
            if QUERY_PARTS == 2 {
                asm!(
                    "tileloadd tmm4, [{b} + {pair} + 64]",
                    "tdpbf16ps tmm0, tmm6, tmm4",
                    "tileloadd tmm5, [{b} + {pair} + 2112]",
                    "tdpbf16ps tmm1, tmm6, tmm5",
                    "tdpbf16ps tmm2, tmm7, tmm4",
                    "tdpbf16ps tmm3, tmm7, tmm5",
                    b = in(reg) b, pair = in(reg) QUERY_PARTS * 64, options(nostack, readonly),
                );
            }
            asm!(
                "tileloadd tmm4, [{b} + {pair}]",
                "tdpbf16ps tmm0, tmm6, tmm4",
                "tileloadd tmm5, [{b} + {pair} + 2048]",
                "tdpbf16ps tmm1, tmm6, tmm5",
                "tdpbf16ps tmm2, tmm7, tmm4",
                "tdpbf16ps tmm3, tmm7, tmm5",
                b = in(reg) b, pair = in(reg) QUERY_PARTS * 64, options(nostack, readonly),
            );
            if PARTS == 2 {
                asm!(
                    "tileloadd tmm6, [{a} + {line} + 2048]",
                    "tdpbf16ps tmm0, tmm6, tmm4",
                    "tdpbf16ps tmm1, tmm6, tmm5",
                    "tileloadd tmm7, [{a} + {line} + 3072]",
                    "tdpbf16ps tmm2, tmm7, tmm4",
                    "tdpbf16ps tmm3, tmm7, tmm5",
                    a = in(reg) a, line = in(reg) 64usize, options(nostack, readonly),
                );
            }
        }
    }
}
