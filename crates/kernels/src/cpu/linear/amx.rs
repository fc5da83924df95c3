//! What the tile kernels for quantised weights share: 16 rows by 16 features at a time, in batches that fit the caches.
//!
//! Integers come out of the tile unit exact, so scales can be applied by vectors in the order that all kernels share. A format
//! with a scale per group ([`super::amx_group`]) brings its 16x16 integers back after every 32 inputs, a K format
//! ([`super::amx_super`]) once per superblock.
//!
//! On stable Rust tiles are reached through inline assembly; `Level::Amx` says that the kernel granted them to this process.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::activations::TILE;
use super::super::matrix::{LINE, PANEL, Segment};
use super::Output;

/// Row tiles that pass by an unpacked superblock of weights before the next one is unpacked.
const TILES_AT_ONCE: usize = 16;
/// Panels that share a load of activations: four superblocks of byte weights fill 16 KiB of the first-level cache.
pub(super) const PANELS_AT_ONCE: usize = 4;
/// Activations that stay in the second-level cache while the panels of a chunk pass by.
const ACTIVATION_BYTES: usize = 768 * 1024;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Lines<const N: usize>(pub(super) [[u8; LINE]; N]);

/// f32 sums of one tile of rows by one panel.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct TileSums([[f32; PANEL]; TILE]);

/// Sums of all tiles and panels that are worked on at once, kept while the superblocks pass by.
pub(super) type Sums = [[TileSums; PANELS_AT_ONCE]; TILES_AT_ONCE];

/// Batches of row tiles, whose activations of `row_bytes` a row fit the cache, by batches of so many panels.
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

/// The weights that come next: a superblock of each panel. They are asked for line by line between the products of this one, and
/// from all panels in turn: a burst of requests would hold everything up, and a panel that is walked slowly is noticed by the
/// hardware, which then runs ahead itself.
pub(super) struct Ahead {
    superblocks: [*const u8; PANELS_AT_ONCE],
    panels: usize,
    /// The next line to ask for.
    line: usize,
    /// Lines that are due, and those that become due with every step, in 2^16ths.
    due: usize,
    rate: usize,
}

impl Ahead {
    /// What follows after `done` bytes of some panels, of which `bytes` are a superblock: the next one or the first of the panels
    /// after them, spread over so many steps.
    pub(super) fn new(segment: &Segment, panels: &Range<usize>, done: usize, bytes: usize, steps: usize) -> Self {
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

    /// Asks for what is due at a step.
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
    // SAFETY: the caller has room for four tiles.
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

/// Writes the sums of some tiles and panels.
///
/// # Safety
/// All of them have been written, and as for [`Output::put`].
pub(super) unsafe fn put_tiles(
    segment: &Segment,
    panels: Range<usize>,
    rows: usize,
    tiles: Range<usize>,
    sums: *const TileSums,
    out: Output<'_>,
) {
    for tile in tiles.clone() {
        for r in 0..TILE.min(rows - tile * TILE) {
            for (p, panel) in panels.clone().enumerate() {
                // SAFETY: the caller wrote the sums of these tiles and panels; its promise about `out`.
                unsafe {
                    let sums = &*sums.add((tile - tiles.start) * PANELS_AT_ONCE + p);
                    out.put(tile * TILE + r, panel, segment.rows, &sums.0[r]);
                }
            }
        }
    }
}
