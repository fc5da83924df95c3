//! Quantised weights with AVX2: half a panel (8 features) at a time.
//!
//! `vpmaddubsw` multiplies unsigned by signed bytes and adds pairs into 16 bits. Weights of up to 6 bits are used directly
//! as the unsigned side, and as many lines are summed as cannot overflow 16 bits. For 8-bit weights the unsigned side is
//! their magnitude, and their sign is applied to the activation.
//!
//! One panel is processed at a time, because registers hold no more; meanwhile the next four are prefetched.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::activations::{BLOCK, TILE};
use super::super::matrix::{
    Bits, Blocks, Format, GROUP, GROUPS_PER_SUPER, LINE, MatrixSegment, PANEL, SUPER, SuperScales,
};
use super::prefetch::PanelPrefetcher;
use super::{Inputs, Output};

/// Features of half a panel: the lanes of a 256-bit vector of f32.
const HALF: usize = PANEL / 2;

/// # Safety
/// The CPU has AVX2, FMA and F16C; the activations match the segment; no other thread writes these panels of `out`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn panels(segment: &MatrixSegment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match segment.format {
            Format::Group { bits: Bits::B8, .. } => group::<8, false>(segment, panels, 0, inputs, out),
            Format::Group { bits: Bits::B5, offset, mins: false } => {
                group::<5, false>(segment, panels, offset, inputs, out)
            }
            Format::Group { bits: Bits::B5, offset, mins: true } => {
                group::<5, true>(segment, panels, offset, inputs, out)
            }
            Format::Group { offset, mins: false, .. } => group::<4, false>(segment, panels, offset, inputs, out),
            Format::Group { offset, mins: true, .. } => group::<4, true>(segment, panels, offset, inputs, out),
            Format::Super { bits: Bits::B2, offset, .. } => {
                superblock::<2, 16, true>(segment, panels, offset, inputs, out)
            }
            Format::Super { bits: Bits::B3, offset, .. } => {
                superblock::<3, 16, false>(segment, panels, offset, inputs, out)
            }
            Format::Super { bits: Bits::B5, offset, .. } => {
                superblock::<5, 8, true>(segment, panels, offset, inputs, out)
            }
            Format::Super { bits: Bits::B6, offset, .. } => {
                superblock::<6, 16, false>(segment, panels, offset, inputs, out)
            }
            Format::Super { offset, .. } => superblock::<4, 8, true>(segment, panels, offset, inputs, out),
            _ => unreachable!("`dense` handles float formats"),
        }
    }
}

/// One half (0 or 1) of the eight lines of a group: unsigned bytes, or signed ones for 8-bit weights.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<const BITS: usize>(record: *const u8, half: usize) -> [__m256i; 8] {
    let mut lines = [_mm256_setzero_si256(); 8];
    // SAFETY: all reads lie within the record's `64 * BITS` bytes.
    unsafe {
        let line = |at: usize| _mm256_loadu_si256(record.add(at * LINE + half * 32).cast());
        match BITS {
            8 => {
                for (r, out) in lines.iter_mut().enumerate() {
                    *out = line(r);
                }
            }
            4..=6 => {
                let nibble = _mm256_set1_epi8(15);
                for r in 0..4 {
                    let both = line(r);
                    lines[r] = _mm256_and_si256(both, nibble);
                    lines[r + 4] = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
                }
            }
            _ => {
                let pair = _mm256_set1_epi8(3);
                for r in 0..2 {
                    let all = line(r);
                    lines[4 * r] = _mm256_and_si256(all, pair);
                    lines[4 * r + 1] = _mm256_and_si256(_mm256_srli_epi16::<2>(all), pair);
                    lines[4 * r + 2] = _mm256_and_si256(_mm256_srli_epi16::<4>(all), pair);
                    lines[4 * r + 3] = _mm256_and_si256(_mm256_srli_epi16::<6>(all), pair);
                }
            }
        }
        if BITS == 6 {
            let pair = _mm256_set1_epi8(0x30);
            for r in 0..2 {
                let all = line(4 + r);
                let parts =
                    [_mm256_slli_epi16::<4>(all), _mm256_slli_epi16::<2>(all), all, _mm256_srli_epi16::<2>(all)];
                for (f, part) in parts.into_iter().enumerate() {
                    lines[4 * r + f] = _mm256_or_si256(lines[4 * r + f], _mm256_and_si256(part, pair));
                }
            }
        }
        if BITS == 3 || BITS == 5 {
            let (at, top) = if BITS == 3 { (2, _mm256_set1_epi8(4)) } else { (4, _mm256_set1_epi8(16)) };
            // Byte `i` of a half takes bit `i` of its 32-bit word: spread the bytes, pick the bits.
            let spread = _mm256_setr_epi8(
                0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3,
            );
            let pick = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            for (r, out) in lines.iter_mut().enumerate() {
                let word = record.add(at * LINE + r * 8 + half * 4).cast::<i32>().read_unaligned();
                let bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), spread), pick);
                *out = _mm256_or_si256(*out, _mm256_and_si256(_mm256_cmpeq_epi8(bits, pick), top));
            }
        }
    }
    lines
}

/// `factor * sum over lines of weights . activations`, exact; each lane has its factor in both 16-bit halves.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dots<const BITS: usize, const LINES: usize>(
    lines: &[__m256i],
    activations: *const i8,
    factor: __m256i,
) -> __m256i {
    // Lines whose pair sums fit together in 16 bits: `2 * 127 * (2^BITS - 1) * lines <= 32767`.
    let together = match BITS {
        2..=4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    };
    let (mut total, mut short) = (_mm256_setzero_si256(), _mm256_setzero_si256());
    for i in 0..LINES {
        // SAFETY: the caller's pointer refers to `4 * LINES` activations.
        let a = _mm256_set1_epi32(unsafe { activations.add(4 * i).cast::<i32>().read_unaligned() });
        let products = if BITS == 8 {
            _mm256_maddubs_epi16(_mm256_abs_epi8(lines[i]), _mm256_sign_epi8(a, lines[i]))
        } else {
            _mm256_maddubs_epi16(lines[i], a)
        };
        short = _mm256_add_epi16(short, products);
        if (i + 1) % together == 0 || i + 1 == LINES {
            total = _mm256_add_epi32(total, _mm256_madd_epi16(short, factor));
            short = _mm256_setzero_si256();
        }
    }
    total
}

/// Splits rows into blocks of four, two and one; the first block prefetches the weights of later panels.
macro_rules! blocks {
    ($block:ident::<$($c:tt),*>, $segment:expr, $panels:expr, $offset:expr, $inputs:expr, $parts:expr, $out:expr) => {{
        let (first, rows) = ($panels.start, $inputs.rows * $parts);
        for panel in $panels {
            let ahead = PanelPrefetcher::new($segment, first, panel);
            let mut row = 0;
            while row < rows {
                row += match rows - row {
                    4.. => { $block::<$($c),*, 4>($segment, panel, row, $offset, &ahead, $inputs, $out); 4 }
                    2.. => { $block::<$($c),*, 2>($segment, panel, row, $offset, &ahead, $inputs, $out); 2 }
                    _ => { $block::<$($c),*, 1>($segment, panel, row, $offset, &ahead, $inputs, $out); 1 }
                };
            }
        }
    }};
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn group<const BITS: usize, const MINS: bool>(
    segment: &MatrixSegment,
    panels: Range<usize>,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    // SAFETY: the caller upholds the contract; rows of a block never cross a tile because block sizes divide 16.
    unsafe { blocks!(group_block::<BITS, MINS>, segment, panels, offset, inputs, inputs.group.parts, out) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn superblock<const BITS: usize, const SUBS: usize, const MINS: bool>(
    segment: &MatrixSegment,
    panels: Range<usize>,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    // SAFETY: as for `group`.
    unsafe { blocks!(super_block::<BITS, SUBS, MINS>, segment, panels, offset, inputs, inputs.superblock.parts, out) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load_half(from: *const u8, half: usize) -> __m256 {
    // SAFETY: the caller's pointer refers to 16 f16.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.add(half * 16).cast())) }
}

/// `R` rows of one panel of a format with a scale per group.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn group_block<const BITS: usize, const MINS: bool, const R: usize>(
    segment: &MatrixSegment,
    panel: usize,
    row: usize,
    offset: i32,
    ahead: &PanelPrefetcher,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let acts = inputs.group;
    let (weights, blocks) = (segment.panel(panel).as_ptr(), const { Blocks::groups(BITS, MINS) });
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for g in 0..segment.cols / GROUP {
        let at = acts.at(g, row);
        // SAFETY: the group is one of the segment's, and the rows were filled into the activations.
        unsafe {
            let values = acts.values.as_ptr().add(at * GROUP);
            let scales = weights.add(blocks.scales(g));
            if row == 0 {
                ahead.step::<1>(blocks.weights(g), BITS * LINE);
            }
            for half in 0..2 {
                let lines = unpack::<BITS>(weights.add(blocks.weights(g)), half);
                let scale = load_half(scales, half);
                for r in 0..R {
                    let mut integer = dots::<BITS, 8>(&lines, values.add(r * GROUP), _mm256_set1_epi16(1));
                    if offset != 0 {
                        let correction = _mm256_set1_epi32(offset * *acts.sums.get_unchecked(at + r));
                        integer = _mm256_sub_epi32(integer, correction);
                    }
                    let scaled =
                        _mm256_mul_ps(_mm256_cvtepi32_ps(integer), _mm256_set1_ps(*acts.scales.get_unchecked(at + r)));
                    sums[r][half] = _mm256_fmadd_ps(scaled, scale, sums[r][half]);
                    if MINS {
                        let weighted = _mm256_set1_ps(*acts.weighted.get_unchecked(at + r));
                        sums[r][half] = _mm256_fmadd_ps(weighted, load_half(scales.add(32), half), sums[r][half]);
                    }
                }
            }
        }
    }
    // SAFETY: the caller guarantees the contract of `Output::put`.
    unsafe { put(segment, panel, row, acts.parts, out, sums) };
}

/// `R` rows of one panel of a K format.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn super_block<const BITS: usize, const SUBS: usize, const MINS: bool, const R: usize>(
    segment: &MatrixSegment,
    panel: usize,
    row: usize,
    offset: i32,
    ahead: &PanelPrefetcher,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let (acts, tile, lane) = (inputs.superblock, row / TILE, row % TILE);
    let (weights, blocks) = (segment.panel(panel).as_ptr(), const { Blocks::superblocks(BITS, SUBS, MINS) });
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for index in 0..segment.cols / SUPER {
        let at = index * acts.tiles + tile;
        // SAFETY: the superblock is one of the segment's, and the rows were filled into the activations.
        unsafe {
            let values = acts.values.as_ptr().add(at * BLOCK + lane * 64);
            let act_sums = acts.sums.as_ptr().add((at * TILE + lane) * 16);
            let (records, scales) = (weights.add(blocks.weights(index)), weights.add(blocks.scales(index)));
            let halves = scales.add(SuperScales::integers(SUBS, MINS));
            for half in 0..2 {
                // The integers, and the amount that each unit of the offset adds. Formats with an offset have a scale per
                // 16 inputs.
                let mut integers = [_mm256_setzero_si256(); R];
                let mut added = [_mm256_setzero_si256(); R];
                for g in 0..GROUPS_PER_SUPER {
                    if row == 0 && half == 0 {
                        ahead.step::<1>(blocks.weights(index) + g * BITS * LINE, BITS * LINE);
                    }
                    let lines = unpack::<BITS>(records.add(g * BITS * LINE), half);
                    let parts = SUBS / GROUPS_PER_SUPER;
                    let scale = |part: usize| sub_scale::<SUBS, MINS>(scales, g * parts + part, half);
                    for part in 0..parts {
                        let scale = in_halves(scale(part), scale(part));
                        for r in 0..R {
                            let values = values.add(g / 2 * 64 * TILE + r * 64 + g % 2 * 32 + part * 16);
                            let integer = if SUBS == 8 {
                                dots::<BITS, 8>(&lines, values, scale)
                            } else {
                                dots::<BITS, 4>(&lines[part * 4..], values, scale)
                            };
                            integers[r] = _mm256_add_epi32(integers[r], integer);
                        }
                    }
                    if SUBS == 16 && !MINS {
                        let scales = in_halves(scale(0), scale(1));
                        for r in 0..R {
                            let sums = act_sums.add(r * 16 + 2 * g).cast::<i32>().read_unaligned();
                            added[r] = _mm256_add_epi32(added[r], _mm256_madd_epi16(scales, _mm256_set1_epi32(sums)));
                        }
                    }
                }
                if SUBS == 16 && !MINS {
                    for r in 0..R {
                        let added = _mm256_mullo_epi32(added[r], _mm256_set1_epi32(offset));
                        integers[r] = _mm256_sub_epi32(integers[r], added);
                    }
                }
                for r in 0..R {
                    let scale = _mm256_set1_ps(*acts.scales.get_unchecked(at * TILE + lane + r));
                    let d = _mm256_mul_ps(load_half(halves, half), scale);
                    sums[r][half] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(integers[r]), sums[r][half]);
                    if MINS {
                        let dmin = _mm256_mul_ps(load_half(halves.add(32), half), scale);
                        let minimum = _mm256_cvtepi32_ps(minimums::<SUBS>(scales, act_sums.add(r * 16), half));
                        sums[r][half] = _mm256_fnmadd_ps(dmin, minimum, sums[r][half]);
                    }
                }
            }
        }
    }
    // SAFETY: the caller guarantees the contract of `Output::put`.
    unsafe { put(segment, panel, row, acts.parts, out, sums) };
}

/// The low 16 bits of each lane of `low` and `high`, in the two halves of the lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn in_halves(low: __m256i, high: __m256i) -> __m256i {
    _mm256_blend_epi16::<0xaa>(low, _mm256_slli_epi32::<16>(high))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sub_scale<const SUBS: usize, const MINS: bool>(scales: *const u8, sub: usize, half: usize) -> __m256i {
    // SAFETY: the caller's pointer refers to the scales of a superblock.
    let bytes = unsafe { _mm_loadl_epi64(scales.add(sub * PANEL + half * HALF).cast()) };
    match (SUBS, MINS) {
        (8, _) => _mm256_cvtepu8_epi32(bytes),
        (_, true) => _mm256_cvtepu8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15))),
        (_, false) => _mm256_cvtepi8_epi32(bytes),
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn minimums<const SUBS: usize>(scales: *const u8, sums: *const i16, half: usize) -> __m256i {
    let mut total = _mm256_setzero_si256();
    for sub in 0..SUBS {
        // SAFETY: the caller's pointers refer to the scales of a superblock and to 16 sums.
        unsafe {
            let (min, sum) = if SUBS == 8 {
                let bytes = _mm_loadl_epi64(scales.add((8 + sub) * PANEL + half * HALF).cast());
                (bytes, i32::from(*sums.add(2 * sub)) + i32::from(*sums.add(2 * sub + 1)))
            } else {
                let bytes = _mm_loadl_epi64(scales.add(sub * PANEL + half * HALF).cast());
                (_mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15)), i32::from(*sums.add(sub)))
            };
            let sum = _mm256_set1_epi32(sum & 0xffff);
            total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_cvtepu8_epi32(min), sum));
        }
    }
    total
}

/// Writes the sums of rows from `row` on: `parts` are added for each row of `out`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn put<const R: usize>(
    segment: &MatrixSegment,
    panel: usize,
    row: usize,
    parts: usize,
    out: Output<'_>,
    sums: [[__m256; 2]; R],
) {
    for (r, sums) in sums.chunks_exact(parts).enumerate() {
        let mut values = [0f32; PANEL];
        let sums: [__m256; 2] = match sums {
            [high, low] => [_mm256_add_ps(high[0], low[0]), _mm256_add_ps(high[1], low[1])],
            _ => sums[0],
        };
        // SAFETY: two halves of 8 lanes; the caller guarantees the contract of `Output::put`.
        unsafe {
            _mm256_storeu_ps(values.as_mut_ptr(), sums[0]);
            _mm256_storeu_ps(values.as_mut_ptr().add(HALF), sums[1]);
            out.put(row / parts + r, panel, segment.rows, &values);
        }
    }
}
