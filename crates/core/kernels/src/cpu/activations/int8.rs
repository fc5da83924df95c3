//! Int8 activations, with a scale per 32 inputs or per 256. The parts of a row are adjacent rows of the layout, with their own
//! scales. Kernels multiply them as any rows, and add the results of a row's parts when they write them.
//!
//! With a scale per 32 inputs and fewer than 16 rows, a tile holds only as many rows as needed (rounded up to a power of
//! two). Other threads fetch the activations that one thread has just written, so the data should fill whole cache lines.

use super::super::level::Level;
use super::super::matrix::{GROUP, GROUPS_PER_SUPER, LINE, SUPER, SendPtr};
use super::super::memory::Aligned;
use super::super::pool::Pool;
use super::super::rows::for_row_chunks;
use super::int8_parts::{PART_RATIO, PARTS_MAX, round, round_row};
use super::{BLOCK, TILE, supers};
use crate::BackendError;

/// Int8 activations with one scale per row and group: for the formats with a scale per 32 weights.
pub(crate) struct Q8Activations {
    /// `[superblock][tile][group 8][row][32]`
    pub(crate) values: Aligned<i8>,
    /// `[superblock][tile][group 8][row]`
    pub(crate) scales: Aligned<f32>,
    /// `-1.5 * 2^23 * scale`, exactly; same shape. `fma(1.5 * 2^23 + integer, scale, rebase)` is `integer * scale`.
    pub(crate) rebase: Aligned<f32>,
    /// Sums of the integers, same shape.
    pub(crate) sums: Aligned<i32>,
    /// `scale * sum`, same shape: the factor of a weight group's minimum.
    pub(crate) weighted: Aligned<f32>,
    pub(crate) tiles: usize,
    /// Parts of a row: part `p` of row `r` is row `r * parts + p` of the layout.
    pub(crate) parts: usize,
    /// Rows in a tile: 16, or a smaller power of two if there are fewer rows.
    lanes: usize,
}

/// Int8 activations with one scale per row and superblock: for the K formats.
pub(crate) struct Q8KActivations {
    /// `[superblock][tile][4][row 16][64]`
    pub(crate) values: Aligned<i8>,
    /// `[superblock][tile][row 16]`
    pub(crate) scales: Aligned<f32>,
    /// Sums of 16 integers each: `[superblock][tile][row 16][16]`
    pub(crate) sums: Aligned<i16>,
    /// Sums of 32: `[superblock][tile][row 16][8]`
    pub(crate) sums32: Aligned<i16>,
    pub(crate) tiles: usize,
    /// As in [`Q8Activations`].
    pub(crate) parts: usize,
}

/// Write access to the rows of a [`Q8Activations`] from several threads.
pub(crate) struct Q8Writer {
    pub(super) values: SendPtr<i8>,
    pub(super) scales: SendPtr<f32>,
    pub(super) rebase: SendPtr<f32>,
    pub(super) sums: SendPtr<i32>,
    pub(super) weighted: SendPtr<f32>,
    pub(super) tiles: usize,
    pub(super) parts: usize,
    pub(super) lanes: usize,
}

impl Q8Activations {
    /// Bytes that `new` would allocate. `rows` are rows of the layout.
    pub(crate) fn bytes(rows: usize, cols: usize) -> usize {
        const PER_GROUP: usize = 3 * size_of::<f32>() + size_of::<i32>();
        supers(cols) * rows.div_ceil(TILE) * (BLOCK + GROUPS_PER_SUPER * TILE * PER_GROUP)
    }

    pub(crate) fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        let (tiles, blocks) = (rows.div_ceil(TILE), supers(cols) * rows.div_ceil(TILE));
        let (what, per_group) = ("activations", blocks * GROUPS_PER_SUPER * TILE);
        Ok(Self {
            values: Aligned::working(what, blocks * BLOCK)?,
            scales: Aligned::working(what, per_group)?,
            rebase: Aligned::working(what, per_group)?,
            sums: Aligned::zeroed(what, per_group)?,
            weighted: Aligned::zeroed(what, per_group)?,
            tiles,
            parts: 1,
            lanes: TILE,
        })
    }

    /// The offset of a row's group, in groups. Kernels may read 16 rows from this offset, even if fewer rows exist.
    #[inline]
    pub(crate) fn at(&self, group: usize, row: usize) -> usize {
        place(group, row, self.tiles, self.lanes)
    }

    /// Prefetches the first row, of `cols` inputs, if it is the only one: it may be in another core's cache.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn prefetch(&self, cols: usize) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let (parts, groups) = (self.parts, cols / GROUP);
        let numbers = [&self.scales, &self.rebase, &self.weighted].map(|numbers| numbers.as_ptr().cast::<i8>());
        let sums = [self.sums.as_ptr().cast::<i8>()];
        let of_groups = numbers.into_iter().chain(sums).map(|start| (start, groups * parts * size_of::<f32>()));
        for (start, bytes) in of_groups.chain([(self.values.as_ptr(), cols * parts)]) {
            for line in (0..bytes).step_by(LINE) {
                // SAFETY: a prefetch reads nothing; SSE is part of the architecture.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line)) };
            }
        }
    }

    /// Sets the layout for `rows` rows of `cols` inputs, in `parts` parts, and returns the pointers to write them.
    pub(crate) fn begin(&mut self, rows: usize, parts: usize, cols: usize) -> Q8Writer {
        let lines = rows * parts;
        self.tiles = lines.div_ceil(TILE);
        assert!(supers(cols) * self.tiles * BLOCK <= self.values.len(), "{rows} rows in {parts} parts");
        self.parts = parts;
        self.lanes = lines.next_power_of_two().min(TILE);
        Q8Writer {
            values: SendPtr(self.values.as_mut_ptr()),
            scales: SendPtr(self.scales.as_mut_ptr()),
            rebase: SendPtr(self.rebase.as_mut_ptr()),
            sums: SendPtr(self.sums.as_mut_ptr()),
            weighted: SendPtr(self.weighted.as_mut_ptr()),
            tiles: self.tiles,
            parts: self.parts,
            lanes: self.lanes,
        }
    }

    /// Quantises `rows` rows of `x` `[rows, cols]` in `parts` parts.
    pub(crate) fn fill(&mut self, pool: &Pool, level: Level, rows: usize, parts: usize, cols: usize, x: &[f32]) {
        let places = self.begin(rows, parts, cols);
        for_row_chunks(pool, rows, cols, TILE, &|row| {
            // SAFETY: the CPU has `level` (`CpuBackend::new` checks it); `new` allocated space for these rows and columns,
            // and each call writes only its own row.
            unsafe { places.round(level, row, 0, &x[row * cols..(row + 1) * cols]) };
        });
    }
}

impl Q8Writer {
    /// Quantises `x` into consecutive groups of a row, from group `first` on.
    ///
    /// # Safety
    /// The CPU has `level`, space for these groups is allocated, and no other thread accesses them.
    pub(crate) unsafe fn round(&self, level: Level, row: usize, first: usize, x: &[f32]) {
        // SAFETY: guaranteed by the caller.
        unsafe { round_row(level, x, self, row, first) }
    }
}

/// The offset, in groups, of a row's group in a layout of `tiles` tiles of `lanes` rows.
#[inline]
pub(super) fn place(group: usize, row: usize, tiles: usize, lanes: usize) -> usize {
    let block = group / GROUPS_PER_SUPER * tiles + row / TILE;
    (block * GROUPS_PER_SUPER + group % GROUPS_PER_SUPER) * lanes + row % TILE
}

impl Q8KActivations {
    /// Bytes that `new` would allocate. `rows` are rows of the layout.
    pub(crate) fn bytes(rows: usize, cols: usize) -> usize {
        const PER_ROW: usize = size_of::<f32>() + (16 + 8) * size_of::<i16>();
        supers(cols) * rows.div_ceil(TILE) * (BLOCK + TILE * PER_ROW)
    }

    pub(crate) fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        let (tiles, blocks) = (rows.div_ceil(TILE), supers(cols) * rows.div_ceil(TILE));
        let what = "activations";
        Ok(Self {
            values: Aligned::working(what, blocks * BLOCK)?,
            scales: Aligned::zeroed(what, blocks * TILE)?,
            sums: Aligned::zeroed(what, blocks * TILE * 16)?,
            sums32: Aligned::zeroed(what, blocks * TILE * 8)?,
            tiles,
            parts: 1,
        })
    }

    /// Quantises `rows` rows of `x` `[rows, cols]` in `parts` parts.
    pub(crate) fn fill(&mut self, pool: &Pool, level: Level, rows: usize, parts: usize, cols: usize, x: &[f32]) {
        let tiles = (rows * parts).div_ceil(TILE);
        assert!(
            parts <= PARTS_MAX && supers(cols) * tiles * BLOCK <= self.values.len(),
            "{rows} rows in {parts} parts"
        );
        (self.tiles, self.parts) = (tiles, parts);
        let (values, scales) = (SendPtr(self.values.as_mut_ptr()), SendPtr(self.scales.as_mut_ptr()));
        let (sums, sums32) = (SendPtr(self.sums.as_mut_ptr()), SendPtr(self.sums32.as_mut_ptr()));
        for_row_chunks(pool, rows, cols, TILE, &|row| {
            for (index, block) in x[row * cols..(row + 1) * cols].chunks_exact(SUPER).enumerate() {
                let (mut rounded, mut rounded_sums) = ([0i8; PARTS_MAX * SUPER], [0i16; PARTS_MAX * SUPER / 16]);
                let mut scale = round(level, block, parts, &mut rounded, &mut rounded_sums);
                let of_parts = rounded.chunks_exact(SUPER).zip(rounded_sums.chunks_exact(SUPER / 16)).take(parts);
                for (part, (rounded, rounded_sums)) in of_parts.enumerate() {
                    let (tile, lane) = ((row * parts + part) / TILE, (row * parts + part) % TILE);
                    let at = index * tiles + tile;
                    // SAFETY: as in `Q8Activations::fill`.
                    unsafe {
                        let out = values.get().add(at * BLOCK + lane * 64);
                        *scales.get().add(at * TILE + lane) = scale;
                        let sums = std::slice::from_raw_parts_mut(sums.get().add((at * TILE + lane) * 16), 16);
                        sums.copy_from_slice(rounded_sums);
                        let sums32 = std::slice::from_raw_parts_mut(sums32.get().add((at * TILE + lane) * 8), 8);
                        for (sum, pair) in sums32.iter_mut().zip(sums.chunks_exact(2)) {
                            *sum = pair[0] + pair[1];
                        }
                        for (quarter, values) in rounded.chunks_exact(64).enumerate() {
                            std::ptr::copy_nonoverlapping(values.as_ptr(), out.add(quarter * 64 * TILE), 64);
                        }
                    }
                    scale /= PART_RATIO;
                }
            }
        });
    }
}
