//! Shared code of the int8 tile kernels for quantised weights: 16 rows by 16 features at a time, in batches that fit the
//! caches.
//!
//! The tile unit sums integers exactly, and vectors then apply the scales in the order that all kernels share. Formats with
//! a scale per group ([`super::amx_group`]) store the 16x16 integers to memory after every 32 inputs, K formats
//! ([`super::amx_super`]) once per superblock.
//!
//! Stable Rust has no AMX intrinsics, so the kernels use inline assembly. `Level::Amx` means that the operating system has
//! granted AMX to this process.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::activations::TILE;
use super::super::matrix::{LINE, MatrixSegment, PANEL};
use super::Output;

/// Row tiles that are multiplied with an unpacked superblock of weights before the next one is unpacked.
const TILES_AT_ONCE: usize = 16;
/// Panels that share a load of activations: four superblocks of byte weights fill 16 KiB of the first-level cache.
pub(super) const PANELS_AT_ONCE: usize = 4;
/// Activations that stay in the second-level cache while the panels of a chunk are processed.
const ACTIVATION_BYTES: usize = 768 * 1024;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Lines<const N: usize>(pub(super) [[u8; LINE]; N]);

/// f32 sums of one tile of rows by one panel.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct TileSums([[f32; PANEL]; TILE]);

/// Sums of all tiles and panels of a batch, across all superblocks.
pub(super) type Sums = [[TileSums; PANELS_AT_ONCE]; TILES_AT_ONCE];

/// Batches of row tiles whose activations (`row_bytes` per row) fit the cache, by batches of `at_once` panels.
pub(super) fn batches(
    rows: usize,
    row_bytes: usize,
    panels: Range<usize>,
    at_once: usize,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let tiles = rows.div_ceil(TILE);
    let batch = (ACTIVATION_BYTES / (row_bytes * TILE)).clamp(2, TILES_AT_ONCE) & !1;
    (0..tiles).step_by(batch).flat_map(move |first| {
        let (tiles, end) = (first..tiles.min(first + batch), panels.end);
        panels.clone().step_by(at_once).map(move |panel| (tiles.clone(), panel..end.min(panel + at_once)))
    })
}

/// Prefetches the next superblock of each panel, line by line between the products of the current one, from all panels in
/// turn. A burst of requests would stall other loads, and slow regular accesses also train the hardware prefetcher.
pub(super) struct SuperblockPrefetcher {
    superblocks: [*const u8; PANELS_AT_ONCE],
    panels: usize,
    /// The next line to prefetch.
    line: usize,
    /// Lines that should have been prefetched by now, and the increment per step, in units of 2^-16 lines.
    due: usize,
    rate: usize,
}

impl SuperblockPrefetcher {
    /// Prefetches the `bytes` bytes of the superblock at offset `done` of each panel or, at the end of the panels, the first
    /// superblock of the panels after them, spread over `steps` calls of [`Self::step`].
    pub(super) fn new(segment: &MatrixSegment, panels: &Range<usize>, done: usize, bytes: usize, steps: usize) -> Self {
        let superblocks = std::array::from_fn(|p| {
            let at = match done < segment.stride {
                true => (panels.start + p) * segment.stride + done,
                false => (panels.end + p) * segment.stride,
            };
            segment.bytes.as_ptr().wrapping_add(at)
        });
        let rate = ((bytes / LINE) << 16).div_ceil(steps);
        Self { superblocks, panels: panels.len(), line: 0, due: 0, rate }
    }

    /// Issues the prefetches that are due.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        self.due += self.rate;
        while self.line << 16 < self.due {
            for superblock in &self.superblocks[..self.panels] {
                // SAFETY: a prefetch reads nothing and may point anywhere; SSE is part of the architecture.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(superblock.wrapping_add(self.line * LINE).cast()) };
            }
            self.line += 1;
        }
    }
}

#[inline(always)]
pub(super) unsafe fn tile_zero() {
    // SAFETY: the caller configured these tiles.
    unsafe { asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem)) };
}

/// Stores the first four tiles, one after the other.
#[inline(always)]
pub(super) unsafe fn tile_store(integers: *mut u8) {
    // SAFETY: the caller's buffer has space for four tiles.
    unsafe {
        asm!(
            "tilestored [{c} + {stride}], tmm0",
            "tilestored [{c} + {stride} + 1024], tmm1",
            "tilestored [{c} + {stride} + 2048], tmm2",
            "tilestored [{c} + {stride} + 3072], tmm3",
            c = in(reg) integers, stride = in(reg) LINE, options(nostack),
        );
    }
}

/// Writes the sums of some tiles and panels: `parts` adjacent rows of the tiles are added for each of the `rows` of `out`.
///
/// # Safety
/// All these sums have been written, and the contract of [`Output::put`] holds.
pub(super) unsafe fn put_tiles(
    segment: &MatrixSegment,
    panels: Range<usize>,
    rows: usize,
    parts: usize,
    tiles: Range<usize>,
    sums: *const TileSums,
    out: Output<'_>,
) {
    let per_tile = TILE / parts;
    for tile in tiles.clone() {
        for r in 0..per_tile.min(rows - tile * per_tile) {
            for (p, panel) in panels.clone().enumerate() {
                // SAFETY: the caller wrote the sums of these tiles and panels and guarantees the contract of `Output::put`.
                unsafe {
                    let sums = &*sums.add((tile - tiles.start) * PANELS_AT_ONCE + p);
                    let mut values = sums.0[r * parts];
                    for part in 1..parts {
                        values = std::array::from_fn(|feature| values[feature] + sums.0[r * parts + part][feature]);
                    }
                    out.put(tile * per_tile + r, panel, segment.rows, &values);
                }
            }
        }
    }
}

/// What writes the sums needs no tiles.
#[cfg(test)]
mod tests {
    use super::super::super::{CpuBackend, CpuOptions};
    use super::*;
    use crate::{Backend, MatrixSource};
    use types::DType;

    #[test]
    fn the_parts_of_a_row_are_added_and_only_existing_rows_and_features_are_written() {
        const FEATURES: usize = 40;
        let source = MatrixSource {
            dtype: DType::F32,
            rows: FEATURES,
            cols: 1,
            row_stride: 4,
            bytes: &[0; 4 * FEATURES],
            keep: DType::F32,
        };
        let matrix = CpuBackend::new(CpuOptions::default()).unwrap().matrix(&[source]).unwrap();
        for (rows, parts) in [(20usize, 1usize), (33, 1), (3, 2), (8, 2), (9, 2), (20, 2)] {
            let value = |line: usize, feature: usize| (line * 1000 + feature) as f32;
            let tiles = (rows * parts).div_ceil(TILE);
            let sums: Vec<TileSums> = (0..tiles * PANELS_AT_ONCE)
                .map(|at| {
                    let (tile, panel) = (at / PANELS_AT_ONCE, at % PANELS_AT_ONCE);
                    let line = |r| std::array::from_fn(|f| value(tile * TILE + r, panel * PANEL + f));
                    TileSums(std::array::from_fn(line))
                })
                .collect();
            let mut found = vec![-1.0; (rows + 1) * FEATURES];
            let out = Output { start: found.as_mut_ptr(), stride: FEATURES, bias: None };
            // SAFETY: the sums of these tiles and panels exist, and `found` has the rows.
            unsafe { put_tiles(&matrix.segments[0], 0..3, rows, parts, 0..tiles, sums.as_ptr(), out) };
            for (at, found) in found.iter().enumerate() {
                let (row, feature) = (at / FEATURES, at % FEATURES);
                let lines = row * parts..(row + 1) * parts;
                let want = if row < rows { lines.map(|line| value(line, feature)).sum() } else { -1.0 };
                assert_eq!(*found, want, "row {row} of {rows} in {parts} parts, feature {feature}");
            }
        }
    }
}
