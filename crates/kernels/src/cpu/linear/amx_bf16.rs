//! Tile kernels for bf16 weights. f32 activations come as three bf16 parts whose sum is exact; each part has tiles of its
//! own, which are added at the end.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{BLOCK, TILE};
use super::super::matrix::{GROUP, GROUPS_PER_SUPER, LINE, PANEL, Segment};
use super::super::tiles::{TileConfig, release};
use super::amx::{Lines, batches, tile_store, tile_zero};
use super::{Inputs, Output};

/// # Safety
/// As for [`super::avx512::panels`], and this process may use tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    if inputs.rows == 1 {
        // SAFETY: passed on.
        return unsafe { single_row(segment, panels, inputs, out) };
    }
    let rows = inputs.rows.min(TILE);
    // Sums 0..6: three parts of two panels; 6: activations; 7: weights. Fewer than 16 rows make shorter tiles.
    let config =
        TileConfig::new([(rows, 64), (rows, 64), (rows, 64), (rows, 64), (rows, 64), (rows, 64), (rows, 64), (16, 64)]);
    // SAFETY: passed on.
    unsafe {
        config.load();
        for (tiles, panels) in batches(inputs.rows, segment.cols * 6, panels) {
            for panel in panels.clone().step_by(2) {
                // Two panels: their streams from memory, and each tile of activations, are used together.
                let second = (panel + 1).min(panels.end - 1);
                for tile in tiles.clone() {
                    tile_pair(segment, [panel, second], tile, inputs, out);
                }
            }
        }
        release();
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn tile_pair(segment: &Segment, panels: [usize; 2], tile: usize, inputs: &Inputs<'_>, out: Output<'_>) {
    let steps = segment.cols.div_ceil(GROUP);
    let mut sums = MaybeUninit::<[Lines<TILE>; 6]>::uninit();
    // SAFETY: a panel has `steps` tiles of 1 KiB, the split activations have as many for each part of this tile.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", options(nostack, nomem));
        asm!("tilezero tmm3", "tilezero tmm4", "tilezero tmm5", options(nostack, nomem));
        let mut b = panels.map(|panel| segment.panel(panel).as_ptr());
        for index in 0..steps.div_ceil(GROUPS_PER_SUPER) {
            let mut a = inputs.split.values.as_ptr().add((index * inputs.split.tiles + tile) * 3 * BLOCK);
            for _ in 0..GROUPS_PER_SUPER.min(steps - index * GROUPS_PER_SUPER) {
                asm!(
                    "tileloadd tmm7, [{b0} + {stride}]",
                    "tileloadd tmm6, [{a} + {stride}]",
                    "tdpbf16ps tmm0, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {stride} + 8192]",
                    "tdpbf16ps tmm1, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {stride} + 16384]",
                    "tdpbf16ps tmm2, tmm6, tmm7",
                    "tileloadd tmm7, [{b1} + {stride}]",
                    "tdpbf16ps tmm5, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {stride}]",
                    "tdpbf16ps tmm3, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {stride} + 8192]",
                    "tdpbf16ps tmm4, tmm6, tmm7",
                    a = in(reg) a, b0 = in(reg) b[0], b1 = in(reg) b[1], stride = in(reg) LINE, options(nostack),
                );
                a = a.add(TILE * GROUP);
                b = b.map(|b| b.add(TILE * LINE));
            }
        }
        asm!(
            "tilestored [{c} + {stride}], tmm0",
            "tilestored [{c} + {stride} + 1024], tmm1",
            "tilestored [{c} + {stride} + 2048], tmm2",
            "tilestored [{c} + {stride} + 3072], tmm3",
            "tilestored [{c} + {stride} + 4096], tmm4",
            "tilestored [{c} + {stride} + 5120], tmm5",
            c = in(reg) sums.as_mut_ptr(), stride = in(reg) LINE, options(nostack),
        );
        let sums = sums.as_ptr().cast::<f32>();
        for (p, panel) in panels.into_iter().enumerate().take(if panels[0] == panels[1] { 1 } else { 2 }) {
            for r in 0..TILE.min(inputs.rows - tile * TILE) {
                let part = |part: usize| _mm512_load_ps(sums.add(((p * 3 + part) * TILE + r) * PANEL));
                let sum = _mm512_add_ps(_mm512_add_ps(part(0), part(1)), part(2));
                let mut values = [0f32; PANEL];
                _mm512_storeu_ps(values.as_mut_ptr(), sum);
                out.put(tile * TILE + r, panel, segment.rows, &values);
            }
        }
    }
}

/// One row: its three parts are the rows of one tile, and four panels stream from memory together.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn single_row(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    const PARTS: usize = 3;
    /// How far ahead of its use a tile of weights is asked for.
    const AHEAD: usize = 2048;
    let sum = (PARTS, 64);
    let config = TileConfig::new([sum, sum, sum, sum, (PARTS, 64), (16, 64), (16, 64), (16, 64)]);
    let steps = segment.cols.div_ceil(GROUP);
    // SAFETY: a panel has `steps` tiles of 1 KiB, the split activations have as many for each part of this row; rows of
    // the tile of activations are its parts, a block apart. A prefetch may point anywhere.
    unsafe {
        config.load();
        for first in panels.clone().step_by(4) {
            let four: [usize; 4] = std::array::from_fn(|p| (first + p).min(panels.end - 1));
            let mut b = four.map(|panel| segment.panel(panel).as_ptr());
            tile_zero();
            for step in 0..steps {
                let at = step / GROUPS_PER_SUPER * inputs.split.tiles * PARTS * BLOCK
                    + step % GROUPS_PER_SUPER * TILE * GROUP;
                let a = inputs.split.values.as_ptr().add(at);
                // Beyond the end of these panels the next four begin.
                let wrap = if (step + AHEAD / 1024) < steps { 0 } else { 3 * segment.stride };
                for b in b {
                    for line in 0..16 {
                        _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(AHEAD + wrap + line * LINE).cast());
                    }
                }
                asm!(
                    "tileloadd tmm4, [{a} + {parts}]",
                    "tileloadd tmm5, [{b0} + {stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    "tileloadd tmm6, [{b1} + {stride}]",
                    "tdpbf16ps tmm1, tmm4, tmm6",
                    "tileloadd tmm7, [{b2} + {stride}]",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tileloadd tmm5, [{b3} + {stride}]",
                    "tdpbf16ps tmm3, tmm4, tmm5",
                    a = in(reg) a, b0 = in(reg) b[0], b1 = in(reg) b[1], b2 = in(reg) b[2], b3 = in(reg) b[3],
                    parts = in(reg) BLOCK * 2, stride = in(reg) LINE, options(nostack, readonly),
                );
                b = b.map(|b| b.wrapping_add(TILE * LINE));
            }
            let mut sums = MaybeUninit::<[Lines<TILE>; 4]>::uninit();
            tile_store(sums.as_mut_ptr().cast());
            for panel in first..panels.end.min(first + 4) {
                let part = |part: usize| {
                    _mm512_load_ps(sums.as_ptr().cast::<f32>().add(((panel - first) * TILE + part) * PANEL))
                };
                let mut values = [0f32; PANEL];
                _mm512_storeu_ps(values.as_mut_ptr(), _mm512_add_ps(_mm512_add_ps(part(0), part(1)), part(2)));
                out.put(0, panel, segment.rows, &values);
            }
        }
        release();
    }
}
