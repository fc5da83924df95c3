//! Tile kernels for the K formats. The integer sub-block scales are multiplied into the weights, which then need two bytes,
//! `scale * q = 128 high + low`, each in its own tile. Integers are stored to memory once per superblock.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{BLOCK, Q8KActivations, TILE};
use super::super::matrix::{Bits, Blocks, Format, GROUPS_PER_SUPER, LINE, MatrixSegment, PANEL, SUPER, SuperScales};
use super::super::tiles::{TileConfig, release};
use super::amx::{
    Lines, PANELS_AT_ONCE, Sums, SuperblockPrefetcher, TileSums, batches, put_tiles, tile_store, tile_zero,
};
use super::avx512::{min_pair, sub_scale, unpack};
use super::{Inputs, Output};

/// # Safety
/// As for [`super::avx512::panels`], and this process may use tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &MatrixSegment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    let config = TileConfig::new([(16, 64); 8]);
    // SAFETY: the caller upholds the contract.
    unsafe {
        config.load();
        for (tiles, panels) in batches(inputs.rows * inputs.superblock.parts, segment.cols, panels, PANELS_AT_ONCE) {
            match segment.format {
                Format::Super { bits: Bits::B2, offset, .. } => {
                    super_batch::<2, 16, true>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Super { bits: Bits::B3, offset, .. } => {
                    super_batch::<3, 16, false>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Super { bits: Bits::B5, offset, .. } => {
                    super_batch::<5, 8, true>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Super { bits: Bits::B6, offset, .. } => {
                    super_batch::<6, 16, false>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Super { offset, .. } => {
                    super_batch::<4, 8, true>(segment, panels, tiles, offset, inputs, out);
                }
                _ => unreachable!("K formats"),
            }
        }
        release();
    }
}

/// A superblock of one panel with its scales folded in: `scale * (q - offset) = 128 high + low`.
struct ScaledWeights {
    high: Lines<64>,
    low: Lines<64>,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn super_batch<const BITS: usize, const SUBS: usize, const MINS: bool>(
    segment: &MatrixSegment,
    panels: Range<usize>,
    tiles: Range<usize>,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let acts = inputs.superblock;
    let supers = segment.cols / SUPER;
    let mut digits = MaybeUninit::<[ScaledWeights; PANELS_AT_ONCE]>::uninit();
    let digits = digits.as_mut_ptr().cast::<ScaledWeights>();
    let mut sums = MaybeUninit::<Sums>::uninit();
    let sums = sums.as_mut_ptr().cast::<TileSums>();
    for index in 0..supers {
        // SAFETY: the superblock is the segment's; the activations hold these tiles.
        unsafe {
            let blocks = const { Blocks::superblocks(BITS, SUBS, MINS) };
            let scales_at = blocks.scales(index);
            let steps = tiles.len().div_ceil(2) * panels.len() * 4;
            let mut ahead =
                SuperblockPrefetcher::new(segment, &panels, blocks.bytes(index + 1), blocks.bytes(1), steps);
            for (p, panel) in panels.clone().enumerate() {
                let weights = segment.panel(panel).as_ptr();
                let records = weights.add(blocks.weights(index));
                fold::<BITS, SUBS, MINS>(records, weights.add(scales_at), offset, digits.add(p));
            }
            for tile in tiles.clone().step_by(2) {
                // The last tile of an odd number is paired with itself.
                let second = (tile + 1).min(tiles.end - 1);
                for tile in tile..=second {
                    if index + 1 == supers {
                        out.prefetch(tile, panels.clone(), inputs.rows, inputs.superblock.parts);
                    }
                }
                let values = |tile: usize| acts.values.as_ptr().add((index * acts.tiles + tile) * BLOCK);
                for (p, panel) in panels.clone().enumerate() {
                    let mut integers = MaybeUninit::<[Lines<TILE>; 4]>::uninit();
                    let integers = integers.as_mut_ptr().cast::<i32>();
                    tile_zero();
                    for quarter in 0..4 {
                        let at = quarter * 64 * TILE;
                        ahead.step();
                        multiply_quarter(values(tile).add(at), values(second).add(at), digits.add(p), quarter);
                    }
                    tile_store(integers.cast());
                    let scales = segment.panel(panel).as_ptr().add(scales_at);
                    let block = SuperBlock::new::<SUBS, MINS>(scales, index == 0);
                    for (i, tile) in (tile..=second).enumerate() {
                        let (at, integers) = (index * acts.tiles + tile, integers.add(i * 2 * TILE * PANEL));
                        let sums = sums.add((tile - tiles.start) * PANELS_AT_ONCE + p);
                        super_tile::<SUBS, MINS>(&block, acts, at, integers, sums);
                    }
                }
            }
        }
    }
    // SAFETY: every sum of these tiles and panels was written above.
    unsafe { put_tiles(segment, panels, inputs.rows, inputs.superblock.parts, tiles, sums, out) };
}

/// The scales of one superblock of one panel, one lane per feature.
struct SuperBlock {
    d: __m512,
    dmin: __m512,
    /// Minimums of pairs of sub-blocks.
    mins: [__m512i; 8],
    /// Whether this is the first block, which initialises the sums.
    first: bool,
}

impl SuperBlock {
    /// # Safety
    /// `scales` points to the scales of a superblock.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn new<const SUBS: usize, const MINS: bool>(scales: *const u8, first: bool) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let halves = scales.add(SuperScales::integers(SUBS, MINS));
            let d = _mm512_cvtph_ps(_mm256_loadu_si256(halves.cast()));
            let mut block = Self { d, dmin: d, mins: [_mm512_setzero_si512(); 8], first };
            if MINS {
                block.dmin = _mm512_cvtph_ps(_mm256_loadu_si256(halves.add(32).cast()));
                for (i, pair) in block.mins[..SUBS / 2].iter_mut().enumerate() {
                    *pair = min_pair::<SUBS>(scales, i);
                }
            }
            block
        }
    }
}

/// Adds the integers `[high, low][16][16]` of one superblock to the sums of one tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn super_tile<const SUBS: usize, const MINS: bool>(
    block: &SuperBlock,
    acts: &Q8KActivations,
    at: usize,
    integers: *const i32,
    sums: *mut TileSums,
) {
    let sums = sums.cast::<f32>();
    for r in 0..TILE {
        // SAFETY: the caller's pointers refer to two tiles of integers, and to the sums and activations of one tile.
        unsafe {
            let high = _mm512_load_si512(integers.add(r * PANEL).cast());
            let low = _mm512_load_si512(integers.add((TILE + r) * PANEL).cast());
            let integer = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<7>(high), low));
            let row = at * TILE + r;
            let scale = _mm512_set1_ps(*acts.scales.as_ptr().add(row));
            let sum = sums.add(r * PANEL);
            let mut total = if block.first { _mm512_setzero_ps() } else { _mm512_load_ps(sum) };
            total = _mm512_fmadd_ps(_mm512_mul_ps(block.d, scale), integer, total);
            if MINS {
                let minimum = row_minimum::<SUBS>(&block.mins, acts, row);
                total = _mm512_fnmadd_ps(_mm512_mul_ps(block.dmin, scale), minimum, total);
            }
            _mm512_store_ps(sum, total);
        }
    }
}

/// `sum over sub-blocks of min * sum of activations` of one row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn row_minimum<const SUBS: usize>(mins: &[__m512i; 8], acts: &Q8KActivations, row: usize) -> __m512 {
    let mut minimum = _mm512_setzero_si512();
    for (i, pair) in mins[..SUBS / 2].iter().enumerate() {
        // SAFETY: the caller's row has `SUBS` sums of as many sub-blocks.
        let two = unsafe {
            let sums = if SUBS == 8 { acts.sums32.as_ptr().add(row * 8) } else { acts.sums.as_ptr().add(row * 16) };
            sums.add(2 * i).cast::<i32>().read_unaligned()
        };
        minimum = _mm512_dpwssd_epi32(minimum, *pair, _mm512_set1_epi32(two));
    }
    _mm512_cvtepi32_ps(minimum)
}

/// Unpacks a superblock and multiplies it with its integer scales.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn fold<const BITS: usize, const SUBS: usize, const MINS: bool>(
    records: *const u8,
    scales: *const u8,
    offset: i32,
    digits: *mut ScaledWeights,
) {
    let (offset, low_bits) = (_mm512_set1_epi8(offset as i8), _mm512_set1_epi16(127));
    let low_byte = _mm512_set1_epi16(255);
    for g in 0..GROUPS_PER_SUPER {
        // SAFETY: the caller's pointers refer to a superblock's records and scales.
        unsafe {
            let lines = unpack::<BITS>(records.add(g * BITS * LINE));
            for (r, line) in lines.into_iter().enumerate() {
                let sub = (g * 8 + r) * SUBS / 64;
                let scale = sub_scale::<SUBS, MINS>(scales, sub);
                // The scale of a feature in both 16-bit halves of its lane.
                let scale =
                    _mm512_or_si512(_mm512_slli_epi32::<16>(scale), _mm512_and_si512(scale, _mm512_set1_epi32(0xffff)));
                let weight = _mm512_sub_epi8(line, offset);
                let even = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(weight)), scale);
                let odd = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(weight), scale);
                let join = |even, odd| _mm512_or_si512(_mm512_and_si512(even, low_byte), _mm512_slli_epi16::<8>(odd));
                let low = join(_mm512_and_si512(even, low_bits), _mm512_and_si512(odd, low_bits));
                let high = join(_mm512_srai_epi16::<7>(even), _mm512_srai_epi16::<7>(odd));
                _mm512_store_si512((&raw mut (*digits).low.0[g * 8 + r]).cast(), low);
                _mm512_store_si512((&raw mut (*digits).high.0[g * 8 + r]).cast(), high);
            }
        }
    }
}

/// Adds the products of two tiles of rows and a quarter of a superblock: high and low digits of the first tile, then of the
/// second.
#[inline(always)]
unsafe fn multiply_quarter(a0: *const i8, a1: *const i8, digits: *const ScaledWeights, quarter: usize) {
    // SAFETY: the caller's pointers refer to two tiles of 16 rows by 64 inputs and to a superblock's digits.
    unsafe {
        let high = (&raw const (*digits).high).cast::<u8>().add(quarter * TILE * LINE);
        let low = (&raw const (*digits).low).cast::<u8>().add(quarter * TILE * LINE);
        asm!(
            "tileloadd tmm4, [{a0} + {stride}]",
            "tileloadd tmm6, [{high} + {stride}]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{low} + {stride}]",
            "tdpbssd tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a1} + {stride}]",
            "tdpbssd tmm2, tmm5, tmm6",
            "tdpbssd tmm3, tmm5, tmm7",
            a0 = in(reg) a0, a1 = in(reg) a1, high = in(reg) high, low = in(reg) low,
            stride = in(reg) LINE, options(nostack, readonly),
        );
    }
}
