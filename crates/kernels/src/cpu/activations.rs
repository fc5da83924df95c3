//! Activations in the forms that the linear kernels multiply with: int8 with a scale per 32 or per 256 inputs, or
//! bf16 in three parts.
//!
//! Rows are dealt into *tiles* of 16 and inputs into superblocks of 256; the bytes of one (superblock, tile) lie together,
//! 16 rows by the depth of a hardware tile, so that a tile load reads one contiguous kilobyte and a vector kernel finds
//! four consecutive inputs of a row in one 32-bit word. Rounding is the same on every level, so the integers are too.

use super::lanes::for_each_level;
use super::level::Level;
use super::matrix::{GROUP, GROUPS_PER_SUPER, SUPER, SendPtr};
use super::memory::Aligned;
use super::per_level;
use super::pool::Pool;
use super::rows::for_runs;
use crate::BackendError;

/// Rows of a tile.
pub(crate) const TILE: usize = 16;
/// Bytes of the int8 values of one (superblock, tile).
pub(crate) const BLOCK: usize = TILE * SUPER;

/// Int8 activations with one scale per row and group: for the formats with a scale per 32 weights.
pub(crate) struct GroupActivations {
    /// `[superblock][tile][group 8][row 16][32]`
    pub(crate) values: Aligned<i8>,
    /// `[superblock][tile][group 8][row 16]`
    pub(crate) scales: Aligned<f32>,
    /// Sums of the integers, same shape.
    pub(crate) sums: Aligned<i32>,
    /// `scale * sum`, same shape: what a weight's minimum is multiplied with.
    pub(crate) weighted: Aligned<f32>,
    pub(crate) tiles: usize,
}

/// Int8 activations with one scale per row and superblock: for the K formats.
pub(crate) struct SuperActivations {
    /// `[superblock][tile][4][row 16][64]`
    pub(crate) values: Aligned<i8>,
    /// `[superblock][tile][row 16]`
    pub(crate) scales: Aligned<f32>,
    /// Sums of 16 integers each: `[superblock][tile][row 16][16]`
    pub(crate) sums: Aligned<i16>,
    /// Sums of 32: `[superblock][tile][row 16][8]`
    pub(crate) sums32: Aligned<i16>,
    pub(crate) tiles: usize,
}

/// An f32 row as three bf16 parts whose sum is exact: high, middle, low.
pub(crate) struct SplitActivations {
    /// `[superblock][tile][part 3][8][row 16][32]`: tiles of 16 rows by 32 inputs (64 bytes a row).
    pub(crate) values: Aligned<u16>,
    pub(crate) tiles: usize,
}

fn supers(cols: usize) -> usize {
    cols.div_ceil(SUPER)
}

impl GroupActivations {
    pub(crate) fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        let (tiles, blocks) = (rows.div_ceil(TILE), supers(cols) * rows.div_ceil(TILE));
        let (what, per_group) = ("activations", blocks * GROUPS_PER_SUPER * TILE);
        Ok(Self {
            values: Aligned::working(what, blocks * BLOCK)?,
            scales: Aligned::working(what, per_group)?,
            sums: Aligned::zeroed(what, per_group)?,
            weighted: Aligned::zeroed(what, per_group)?,
            tiles,
        })
    }

    /// Quantises `rows` rows of `x` `[rows, cols]`.
    pub(crate) fn fill(&mut self, pool: &Pool, level: Level, rows: usize, cols: usize, x: &[f32]) {
        self.tiles = rows.div_ceil(TILE);
        let tiles = self.tiles;
        let (values, scales) = (SendPtr(self.values.as_mut_ptr()), SendPtr(self.scales.as_mut_ptr()));
        let (sums, weighted) = (SendPtr(self.sums.as_mut_ptr()), SendPtr(self.weighted.as_mut_ptr()));
        for_runs(pool, rows, cols, TILE, &|row| {
            let places = GroupPlaces {
                values: values.get(),
                scales: scales.get(),
                sums: sums.get(),
                weighted: weighted.get(),
                tiles,
                row,
            };
            let x = &x[row * cols..(row + 1) * cols];
            // SAFETY: the CPU has `level` (`CpuBackend::new` checks it); `new` allocated places for these rows and columns,
            // and each row writes its own.
            unsafe {
                match level {
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 | Level::Amx => avx512::group_row(x, &places),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 => avx2::group_row(x, &places),
                    _ => scalar::group_row(x, &places),
                }
            }
        });
    }
}

/// Where one row goes in [`GroupActivations`].
struct GroupPlaces {
    values: *mut i8,
    scales: *mut f32,
    sums: *mut i32,
    weighted: *mut f32,
    tiles: usize,
    row: usize,
}

impl SuperActivations {
    pub(crate) fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        let (tiles, blocks) = (rows.div_ceil(TILE), supers(cols) * rows.div_ceil(TILE));
        let what = "activations";
        Ok(Self {
            values: Aligned::working(what, blocks * BLOCK)?,
            scales: Aligned::zeroed(what, blocks * TILE)?,
            sums: Aligned::zeroed(what, blocks * TILE * 16)?,
            sums32: Aligned::zeroed(what, blocks * TILE * 8)?,
            tiles,
        })
    }

    pub(crate) fn fill(&mut self, pool: &Pool, level: Level, rows: usize, cols: usize, x: &[f32]) {
        self.tiles = rows.div_ceil(TILE);
        let tiles = self.tiles;
        let (values, scales) = (SendPtr(self.values.as_mut_ptr()), SendPtr(self.scales.as_mut_ptr()));
        let (sums, sums32) = (SendPtr(self.sums.as_mut_ptr()), SendPtr(self.sums32.as_mut_ptr()));
        for_runs(pool, rows, cols, TILE, &|row| {
            let (tile, lane) = (row / TILE, row % TILE);
            for (index, block) in x[row * cols..(row + 1) * cols].chunks_exact(SUPER).enumerate() {
                let at = index * tiles + tile;
                // SAFETY: as in `GroupActivations::fill`.
                unsafe {
                    let out = values.get().add(at * BLOCK + lane * 64);
                    let sums = std::slice::from_raw_parts_mut(sums.get().add((at * TILE + lane) * 16), 16);
                    let mut rounded = [0i8; SUPER];
                    *scales.get().add(at * TILE + lane) = round(level, block, &mut rounded, sums);
                    let sums32 = std::slice::from_raw_parts_mut(sums32.get().add((at * TILE + lane) * 8), 8);
                    for (sum, pair) in sums32.iter_mut().zip(sums.chunks_exact(2)) {
                        *sum = pair[0] + pair[1];
                    }
                    for (quarter, part) in rounded.chunks_exact(64).enumerate() {
                        std::ptr::copy_nonoverlapping(part.as_ptr(), out.add(quarter * 64 * TILE), 64);
                    }
                }
            }
        });
    }
}

impl SplitActivations {
    pub(crate) fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        let tiles = rows.div_ceil(TILE);
        Ok(Self { values: Aligned::working("activations", supers(cols) * tiles * 3 * BLOCK)?, tiles })
    }

    pub(crate) fn fill(&mut self, pool: &Pool, level: Level, rows: usize, cols: usize, x: &[f32]) {
        self.tiles = rows.div_ceil(TILE);
        let tiles = self.tiles;
        let values = SendPtr(self.values.as_mut_ptr());
        for_runs(pool, rows, cols, TILE, &|row| {
            let (tile, lane) = (row / TILE, row % TILE);
            for (index, group) in x[row * cols..(row + 1) * cols].chunks(GROUP).enumerate() {
                let at = (index / GROUPS_PER_SUPER * tiles + tile) * 3 * BLOCK
                    + index % GROUPS_PER_SUPER * TILE * GROUP
                    + lane * GROUP;
                // SAFETY: as in `GroupActivations::fill`; a short last group leaves the zeros of `new`.
                let parts: [&mut [u16]; 3] = std::array::from_fn(|part| unsafe {
                    std::slice::from_raw_parts_mut(values.get().add(at + part * BLOCK), group.len())
                });
                split_group(level, group, parts);
            }
        });
    }
}

for_each_level! {
    /// Rounds numbers (a multiple of 16) to int8 so that the largest magnitude becomes 127, and sums every 16 integers.
    /// Returns the scale that undoes it; zeros have scale zero.
    unsafe fn round(values: &[f32], out: &mut [i8], sums: &mut [i16]) -> f32 {
        let mut most = splat(0.0);
        for chunk in values.chunks_exact(16) {
            most = max(most, abs(load(chunk.as_ptr())));
        }
        let most = largest(most);
        let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
        for ((chunk, out), total) in values.chunks_exact(16).zip(out.chunks_exact_mut(16)).zip(sums) {
            *total = store_i8(out.as_mut_ptr(), mul(load(chunk.as_ptr()), splat(inverse))) as i16;
        }
        most / 127.0
    }

    unsafe fn group_row(x: &[f32], places: &GroupPlaces) {
        let (tile, lane) = (places.row / TILE, places.row % TILE);
        for (index, group) in x.chunks_exact(GROUP).enumerate() {
            let block = index / GROUPS_PER_SUPER * places.tiles + tile;
            let at = (block * GROUPS_PER_SUPER + index % GROUPS_PER_SUPER) * TILE + lane;
            let halves = [load(group.as_ptr()), load(group.as_ptr().add(16))];
            let most = largest(max(abs(halves[0]), abs(halves[1])));
            let inverse = splat(if most > 0.0 { 127.0 / most } else { 0.0 });
            let out = places.values.add(at * GROUP);
            let sum = store_i8(out, mul(halves[0], inverse)) + store_i8(out.add(16), mul(halves[1], inverse));
            let scale = most / 127.0;
            *places.scales.add(at) = scale;
            *places.sums.add(at) = sum;
            *places.weighted.add(at) = scale * sum as f32;
        }
    }
}

fn round(level: Level, values: &[f32], out: &mut [i8], sums: &mut [i16]) -> f32 {
    assert!(values.len().is_multiple_of(16) && out.len() == values.len() && sums.len() == values.len() / 16);
    // SAFETY: the CPU has `level` (`CpuBackend::new` checks it); the lengths fit.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => avx512::round(values, out, sums),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::round(values, out, sums),
            _ => scalar::round(values, out, sums),
        }
    }
}

per_level! {
    fn split_group(values: &[f32], parts: [&mut [u16]; 3]) {
        let [high, middle, low] = parts;
        for (i, value) in values.iter().enumerate() {
            [high[i], middle[i], low[i]] = split(*value);
        }
    }
}

/// The bf16 parts of a number: each the rounding of what the ones before left.
#[inline(always)]
fn split(value: f32) -> [u16; 3] {
    let high = round_bf16(value);
    let rest = value - widen(high);
    let middle = round_bf16(rest);
    [high, middle, round_bf16(rest - widen(middle))]
}

#[inline(always)]
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Round half to even, as the hardware does; infinities and NaN keep their kind.
#[inline(always)]
fn round_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_finite() {
        ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
    } else {
        (bits >> 16) as u16 | (value.is_nan() as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_parts_are_the_whole_number() {
        for value in [0.0, 1.0, -1.0 / 3.0, 1e-20, 3.4e37, -123456.79] {
            let sum: f32 = split(value).into_iter().rev().map(widen).sum();
            assert_eq!(sum, value);
        }
    }

    #[test]
    fn the_largest_magnitude_becomes_127_and_zeros_stay_zeros() {
        for level in Level::available() {
            let mut values = [0f32; GROUP];
            let (mut out, mut sums) = ([1i8; GROUP], [1i16; 2]);
            assert_eq!(round(level, &values, &mut out, &mut sums), 0.0);
            assert_eq!((out, sums), ([0; GROUP], [0; 2]));
            (values[3], values[9], values[30]) = (-2.0, 1.0, 0.5);
            let scale = round(level, &values, &mut out, &mut sums);
            assert_eq!((out[3], out[9], out[30], sums), (-127, 64, 32, [-63, 32]));
            assert!((scale - 2.0 / 127.0).abs() < 1e-9);
        }
    }
}
