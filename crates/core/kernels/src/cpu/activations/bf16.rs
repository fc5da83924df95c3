//! An f32 row as the sum of bf16 parts, for tiles: one part keeps 8 bits, two keep 16.

use super::super::matrix::{GROUP, GROUPS_PER_SUPER, SendPtr};
use super::super::memory::Aligned;
use super::super::pool::Pool;
use super::super::rows::for_row_chunks;
use super::{BLOCK, TILE, supers};
use crate::BackendError;

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
    pub(in super::super) fn at(&self, row: usize, first: usize) -> *mut u16 {
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
    pub(in super::super) unsafe fn put(
        &self,
        row: usize,
        first: usize,
        count: usize,
        values: std::arch::x86_64::__m512,
    ) {
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
pub(in super::super) fn round_bf16(values: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512i {
    use std::arch::x86_64::*;
    let bits = _mm512_castps_si512(values);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
    _mm512_srli_epi32::<16>(_mm512_mask_set1_epi32(rounded, nan, 0x7fc0_0000))
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::super::level::Level;
    use super::super::super::matrix::SUPER;
    use super::*;

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
}
