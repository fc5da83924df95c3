//! Activations in the layouts that the linear kernels read: int8 with a scale per 32 or per 256 inputs, or bf16. Each in one
//! or two parts: the row is the sum of its parts, and each part is the rounded remainder of the parts before it.
//!
//! The int8 parts of a row are adjacent rows of the layout, with their own scales. Kernels multiply them as any rows, and add
//! the results of a row's parts when they write them: one part keeps 8 bits of a row, two keep 16.
//!
//! Rows are grouped into *tiles* of 16 and inputs into superblocks of 256. The bytes of one (superblock, tile) are
//! contiguous, 16 rows by the depth of a hardware tile: a tile load reads one contiguous kilobyte, and a vector kernel
//! reads four consecutive inputs of a row as one 32-bit word. Rounding, and so every integer, is the same on all levels.
//!
//! With a scale per 32 inputs and fewer than 16 rows, a tile holds only as many rows as needed (rounded up to a power of
//! two). Other threads fetch the activations that one thread has just written, so the data should fill whole cache lines.

use super::lanes::for_each_level;
use super::level::Level;
use super::matrix::{GROUP, GROUPS_PER_SUPER, LINE, SUPER, SendPtr};
use super::memory::Aligned;
use super::pool::Pool;
use super::rows::for_row_chunks;
use crate::BackendError;

/// Rows in a tile.
pub(crate) const TILE: usize = 16;
/// Bytes of the int8 values of one (superblock, tile).
pub(crate) const BLOCK: usize = TILE * SUPER;
/// The scale of an int8 part over that of the next one: a remainder is at most half a unit, which becomes 127 units.
const PART_RATIO: f32 = 254.0;
/// The most int8 parts of a row.
pub(crate) const PARTS_MAX: usize = 2;

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

/// An f32 row as the sum of bf16 parts: one part keeps 8 bits, two keep 16.
pub(crate) struct Bf16SplitActivations<const PARTS: usize> {
    /// `[superblock][tile][part][8][row 16][32]`: tiles of 16 rows by 32 inputs (64 bytes a row).
    pub(crate) values: Aligned<u16>,
    pub(crate) tiles: usize,
}

/// Write access to the rows of a [`Bf16SplitActivations`] from several threads.
pub(crate) struct Bf16SplitWriter<const PARTS: usize> {
    values: SendPtr<u16>,
    tiles: usize,
}

fn supers(cols: usize) -> usize {
    cols.div_ceil(SUPER)
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
        unsafe {
            match level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 | Level::Amx => avx512::group_row(x, self, row, first),
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => avx2::group_row(x, self, row, first),
                _ => scalar::group_row(x, self, row, first),
            }
        }
    }
}

const REBASE: f32 = -1.5 * (1 << 23) as f32;

/// Clears the last two mantissa bits of a scale, so that its product with [`REBASE`] is exact, and clamps it so that the
/// product is finite.
fn short_scale(scale: f32) -> f32 {
    const MOST: f32 = (1u128 << 100) as f32;
    f32::from_bits(scale.min(MOST).to_bits() & !3)
}

/// The offset, in groups, of a row's group in a layout of `tiles` tiles of `lanes` rows.
#[inline]
fn place(group: usize, row: usize, tiles: usize, lanes: usize) -> usize {
    let block = group / GROUPS_PER_SUPER * tiles + row / TILE;
    (block * GROUPS_PER_SUPER + group % GROUPS_PER_SUPER) * lanes + row % TILE
}

/// Write access to the rows of a [`Q8Activations`] from several threads.
pub(crate) struct Q8Writer {
    values: SendPtr<i8>,
    scales: SendPtr<f32>,
    rebase: SendPtr<f32>,
    sums: SendPtr<i32>,
    weighted: SendPtr<f32>,
    tiles: usize,
    parts: usize,
    lanes: usize,
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

impl<const PARTS: usize> Bf16SplitActivations<PARTS> {
    /// Bytes that `new` would allocate.
    pub(crate) fn bytes(rows: usize, cols: usize) -> usize {
        supers(cols) * rows.div_ceil(TILE) * PARTS * BLOCK * size_of::<u16>()
    }

    pub(crate) fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        let tiles = rows.div_ceil(TILE);
        Ok(Self { values: Aligned::working("activations", supers(cols) * tiles * PARTS * BLOCK)?, tiles })
    }

    /// Sets the layout for `rows` rows of `cols` columns. Zeroes the padding from the last column to a multiple of 32,
    /// because kernels multiply it too, and an earlier step with another number of rows may have left other values there.
    pub(crate) fn begin(&mut self, rows: usize, cols: usize) {
        self.tiles = rows.div_ceil(TILE);
        let last = supers(cols) * self.tiles * PARTS * BLOCK;
        assert!(last <= self.values.len(), "{rows} rows of {cols} columns");
        if !cols.is_multiple_of(GROUP) {
            let group = cols / GROUP % GROUPS_PER_SUPER * TILE * GROUP;
            for block in self.values[..last].chunks_exact_mut(BLOCK).rev().take(self.tiles * PARTS) {
                block[group..group + TILE * GROUP].fill(0);
            }
        }
    }

    /// Write access to the rows that [`Self::begin`] made space for.
    pub(crate) fn target(&mut self) -> Bf16SplitWriter<PARTS> {
        Bf16SplitWriter { values: SendPtr(self.values.as_mut_ptr()), tiles: self.tiles }
    }

    /// Splits `rows` rows of `x` `[rows, cols]`.
    pub(crate) fn fill(&mut self, pool: &Pool, rows: usize, cols: usize, x: &[f32]) {
        self.begin(rows, cols);
        let places = self.target();
        for_row_chunks(pool, rows, cols, TILE, &|row| {
            // SAFETY: this layout is used only on CPUs with tiles; there is space for these rows, and each call writes only
            // its own row.
            unsafe { places.split(row, &x[row * cols..(row + 1) * cols], None) };
        });
    }
}

impl<const PARTS: usize> Bf16SplitWriter<PARTS> {
    /// Splits a row into bf16 parts. With `norm = (scale, weight)`, the row is first multiplied by `scale` and, element by
    /// element, by `weight`.
    ///
    /// # Safety
    /// The CPU has tiles, space for the row is allocated, and no other thread accesses it.
    #[inline]
    pub(crate) unsafe fn split(&self, row: usize, x: &[f32], norm: Option<(f32, &[f32])>) {
        let at = row / TILE * PARTS * BLOCK + row % TILE * GROUP;
        // SAFETY: as above; a CPU with tiles has AVX-512.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            split_row::<PARTS>(x, norm, self.tiles, self.values.get().add(at));
        }
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("no level on this architecture has tiles: {at}, {x:?}, {norm:?}");
    }
}

#[cfg(target_arch = "x86_64")]
impl<const PARTS: usize> Bf16SplitWriter<PARTS> {
    /// Pointer to the first part of element `first` of a row. The elements up to the next multiple of 32 are contiguous.
    #[inline]
    pub(super) fn at(&self, row: usize, first: usize) -> *mut u16 {
        let group = first / GROUP;
        let block = group / GROUPS_PER_SUPER * self.tiles + row / TILE;
        let line = group % GROUPS_PER_SUPER * TILE + row % TILE;
        self.values.get().wrapping_add(block * PARTS * BLOCK + line * GROUP + first % GROUP)
    }

    /// Splits the first `count` (at most 16) of `values` and writes them to a row from column `first` on. They may span two
    /// groups.
    ///
    /// # Safety
    /// The CPU has AVX-512, space for these elements is allocated, and no other thread accesses them.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn put(&self, row: usize, first: usize, count: usize, values: std::arch::x86_64::__m512) {
        let all = (1u32 << count) - 1;
        let in_group = GROUP - first % GROUP;
        let here = all & ((1u64 << in_group) - 1) as u32;
        // SAFETY: guaranteed by the caller. Lanes outside the mask are not written, so the second pointer may start before
        // its group.
        unsafe {
            put_parts::<PARTS>(self.at(row, first), here as u16, values);
            if here != all {
                let next = self.at(row, first + in_group).wrapping_sub(in_group);
                put_parts::<PARTS>(next, (all & !here) as u16, values);
            }
        }
    }
}

/// Splits the lanes of `values` in `mask`.
///
/// # Safety
/// The CPU has AVX-512, and `out` points into a block whose parts all have space for these elements.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn put_parts<const PARTS: usize>(out: *mut u16, mask: u16, values: std::arch::x86_64::__m512) {
    use std::arch::x86_64::*;
    let mut rest = values;
    for part in 0..PARTS {
        let high = round_bf16(rest);
        rest = _mm512_sub_ps(rest, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(high)));
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_mask_cvtepi32_storeu_epi16(out.add(part * BLOCK).cast(), mask, high) };
    }
}

/// Splits a row (with `norm`: its normed values) whose first line is at `out`. The padding after the last input stays zero,
/// as `begin` set it.
///
/// # Safety
/// The CPU has AVX-512, `out` points into the values of `tiles` tiles with at least this many inputs, and `norm` has as
/// many weights.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn split_row<const PARTS: usize>(x: &[f32], norm: Option<(f32, &[f32])>, tiles: usize, out: *mut u16) {
    use std::arch::x86_64::*;
    for (index, values) in x.chunks(GROUP / 2).enumerate() {
        let group = index / 2;
        let at = group / GROUPS_PER_SUPER * tiles * PARTS * BLOCK
            + group % GROUPS_PER_SUPER * TILE * GROUP
            + index % 2 * (GROUP / 2);
        let mask = ((1u32 << values.len()) - 1) as __mmask16;
        // SAFETY: masked loads and stores access only these values and their destinations.
        unsafe {
            let mut numbers = _mm512_maskz_loadu_ps(mask, values.as_ptr());
            if let Some((scale, weight)) = norm {
                let weight = _mm512_maskz_loadu_ps(mask, weight[index * (GROUP / 2)..].as_ptr());
                numbers = _mm512_mul_ps(_mm512_mul_ps(numbers, _mm512_set1_ps(scale)), weight);
            }
            put_parts::<PARTS>(out.add(at), mask, numbers);
        }
    }
}

/// Rounds to bf16, in the low half of each lane: to nearest, ties to even, as the hardware does. NaN stays NaN.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn round_bf16(values: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512i {
    use std::arch::x86_64::*;
    let bits = _mm512_castps_si512(values);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    _mm512_srli_epi32::<16>(_mm512_mask_set1_epi32(rounded, nan, 0x7fc0_0000))
}

for_each_level! {
    /// What rounding to an integer leaves of numbers up to 127, in units of the next part.
    #[inline]
    unsafe fn remainder(x: V) -> V {
        // Above this number floats are integers, so adding it rounds as `store_i8` does.
        let whole = sub(add(x, splat(-REBASE)), splat(-REBASE));
        mul(sub(x, whole), splat(PART_RATIO))
    }

    /// Rounds numbers (a multiple of 16) to int8 in `parts` parts, so that the largest magnitude becomes 127, and sums every 16
    /// integers: `[part][..]`. Returns the scale that dequantises the first part; if all inputs are zero, it is zero.
    unsafe fn round(values: &[f32], parts: usize, out: &mut [i8], sums: &mut [i16]) -> f32 {
        let mut most = splat(0.0);
        for chunk in values.chunks_exact(16) {
            most = max(most, abs(load(chunk.as_ptr())));
        }
        let most = largest(most);
        let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
        for (index, chunk) in values.chunks_exact(16).enumerate() {
            let mut rest = mul(load(chunk.as_ptr()), splat(inverse));
            for part in 0..parts {
                let at = part * values.len() + index * 16;
                sums[at / 16] = store_i8(out[at..at + 16].as_mut_ptr(), rest) as i16;
                rest = remainder(rest);
            }
        }
        most / 127.0
    }

    unsafe fn group_row(x: &[f32], places: &Q8Writer, row: usize, first: usize) {
        for (index, group) in x.chunks_exact(GROUP).enumerate() {
            let mut halves = [load(group.as_ptr()), load(group.as_ptr().add(16))];
            let most = largest(max(abs(halves[0]), abs(halves[1])));
            let inverse = splat(if most > 0.0 { 127.0 / most } else { 0.0 });
            halves = [mul(halves[0], inverse), mul(halves[1], inverse)];
            let mut scale = most / 127.0;
            for part in 0..places.parts {
                let at = place(first + index, row * places.parts + part, places.tiles, places.lanes);
                let out = places.values.get().add(at * GROUP);
                let sum = store_i8(out, halves[0]) + store_i8(out.add(16), halves[1]);
                let short = short_scale(scale);
                *places.scales.get().add(at) = short;
                *places.rebase.get().add(at) = short * REBASE;
                *places.sums.get().add(at) = sum;
                *places.weighted.get().add(at) = short * sum as f32;
                halves = [remainder(halves[0]), remainder(halves[1])];
                scale = short / PART_RATIO;
            }
        }
    }
}

fn round(level: Level, values: &[f32], parts: usize, out: &mut [i8], sums: &mut [i16]) -> f32 {
    assert!(values.len().is_multiple_of(16) && out.len() >= parts * values.len() && sums.len() * 16 >= out.len());
    // SAFETY: the CPU has `level` (`CpuBackend::new` checks it); the lengths fit.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => avx512::round(values, parts, out, sums),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::round(values, parts, out, sums),
            _ => scalar::round(values, parts, out, sums),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn two_parts_keep_sixteen_bits() {
        if Level::detect() < Level::Avx512 {
            return; // without AVX-512 there are no tiles, so this layout is not used
        }
        let values = [0.0, 1.0, -1.0 / 3.0, 1e-20, 3.3e37, -123456.79, f32::NAN, f32::INFINITY, 0.1];
        let mut split = Bf16SplitActivations::<2>::new(17, values.len()).unwrap();
        let x: Vec<f32> = std::iter::repeat_n(values, 17).flatten().collect();
        split.fill(&Pool::new(1).unwrap(), 17, values.len(), &x);
        let widen = |bits: u16| f32::from_bits(u32::from(bits) << 16);
        for row in 0..17 {
            for (i, value) in values.into_iter().enumerate() {
                let at = row / TILE * 2 * BLOCK + row % TILE * GROUP + i;
                let (high, low) = (widen(split.values[at]), widen(split.values[at + BLOCK]));
                match value.is_finite() {
                    true => assert!((high + low - value).abs() <= value.abs() / 65536.0, "{value}: {high} and {low}"),
                    false => assert!(high == value || high.is_nan() && value.is_nan()),
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn what_other_steps_left_beyond_the_last_column_is_zero() {
        if Level::detect() < Level::Avx512 {
            return; // as above
        }
        let (pool, cols) = (Pool::new(1).unwrap(), SUPER + 40);
        let mut split = Bf16SplitActivations::<2>::new(2 * TILE, cols).unwrap();
        split.fill(&pool, 2 * TILE, cols, &vec![f32::NAN; 2 * TILE * cols]);
        split.fill(&pool, TILE, cols, &vec![1.0; TILE * cols]);
        for (row, part) in (0..TILE).flat_map(|row| [(row, 0), (row, 1)]) {
            let at = split.target().at(row, SUPER + GROUP).addr() - split.values.as_ptr().addr();
            let group = &split.values[at / size_of::<u16>() + part * BLOCK..][..GROUP];
            let number = if part == 0 { 0x3f80 } else { 0 };
            assert_eq!(group, [[number; 8], [0; 8], [0; 8], [0; 8]].as_flattened(), "row {row}, part {part}");
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn rows_that_are_put_head_by_head_are_those_that_are_split_whole() {
        if Level::detect() < Level::Avx512 {
            return; // as above
        }
        let (pool, rows) = (Pool::new(1).unwrap(), TILE + 3);
        for (dim, heads) in [(2, 40), (16, 5), (20, 8), (24, 12), (100, 6), (120, 5)] {
            let cols = heads * dim;
            let x: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin() * 100.0).collect();
            let [mut whole, mut parts] = [(); 2].map(|()| Bf16SplitActivations::<2>::new(rows, cols).unwrap());
            whole.fill(&pool, rows, cols, &x);
            parts.begin(rows, cols);
            let places = parts.target();
            for (row, head) in (0..rows).flat_map(|row| (0..heads).map(move |head| (row, head))) {
                for first in (0..dim).step_by(16) {
                    let count = 16.min(dim - first);
                    let mut numbers = [f32::NAN; 16];
                    numbers[..count].copy_from_slice(&x[row * cols + head * dim + first..][..count]);
                    // SAFETY: the CPU has AVX-512; there is space for all rows and columns.
                    unsafe {
                        let numbers = std::arch::x86_64::_mm512_loadu_ps(numbers.as_ptr());
                        places.put(row, head * dim + first, count, numbers);
                    }
                }
            }
            assert!(*whole.values == *parts.values, "{heads} heads of {dim}");
        }
    }

    #[test]
    fn a_rebased_integer_times_a_scale_is_rounded_once() {
        for scale in [0.0, 1e-45, 3e-41, 1.0 / 127.0, 0.1, 7.3e12, f32::MAX] {
            let scale = short_scale(scale);
            let rebase = scale * REBASE;
            assert_eq!(f64::from(rebase), f64::from(scale) * f64::from(REBASE), "{scale}");
            for integer in [0, 1, -1, 12_345, -520_192, 520_192] {
                let float = integer as f32 - REBASE;
                assert_eq!(float.mul_add(scale, rebase), integer as f32 * scale, "{integer} times {scale}");
            }
        }
    }

    #[test]
    fn the_largest_magnitude_becomes_127_and_zeros_stay_zeros() {
        for level in Level::available() {
            let mut values = [0f32; GROUP];
            let (mut out, mut sums) = ([1i8; GROUP], [1i16; 2]);
            assert_eq!(round(level, &values, 1, &mut out, &mut sums), 0.0);
            assert_eq!((out, sums), ([0; GROUP], [0; 2]));
            (values[3], values[9], values[30]) = (-2.0, 1.0, 0.5);
            let scale = round(level, &values, 1, &mut out, &mut sums);
            assert_eq!((out[3], out[9], out[30], sums), (-127, 64, 32, [-63, 32]));
            assert!((scale - 2.0 / 127.0).abs() < 1e-9);
        }
    }

    /// Half a unit of the second part is `1 / (2 * 127 * 254)` of the largest magnitude.
    #[test]
    fn two_int8_parts_keep_sixteen_bits_in_both_layouts() {
        let (pool, cols) = (Pool::new(1).unwrap(), 2 * SUPER);
        let x: Vec<f32> = (0..3 * cols).map(|i| (i as f32 * 0.7).sin() * (i % 17) as f32).collect();
        for level in Level::available() {
            let mut group = Q8Activations::new(3 * PARTS_MAX, cols).unwrap();
            let mut superblock = Q8KActivations::new(3 * PARTS_MAX, cols).unwrap();
            group.fill(&pool, level, 3, 2, cols, &x);
            superblock.fill(&pool, level, 3, 2, cols, &x);
            for (index, value) in x.iter().enumerate() {
                let (row, col) = (index / cols, index % cols);
                let in_group = |part: usize| {
                    let at = group.at(col / GROUP, row * 2 + part);
                    f32::from(group.values[at * GROUP + col % GROUP]) * group.scales[at]
                };
                let in_superblock = |part: usize| {
                    let (at, lane) = (col / SUPER * superblock.tiles, row * 2 + part);
                    let value = superblock.values[at * BLOCK + col % SUPER / 64 * 64 * TILE + lane * 64 + col % 64];
                    f32::from(value) * superblock.scales[at * TILE + lane]
                };
                for [high, low] in [[0, 1].map(in_group), [0, 1].map(in_superblock)] {
                    let off = (high + low - value).abs();
                    assert!(off <= 17.0 / 64516.0 + 1e-5, "{level}, {index}: {high} and {low}, not {value}");
                }
            }
        }
    }
}
