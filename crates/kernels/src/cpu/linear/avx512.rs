//! Quantised weights with AVX-512 VNNI: one lane per feature, four inputs per instruction.
//!
//! `vpdpbusd` multiplies unsigned by signed bytes: weights are the unsigned side, and what an offset (128 for whole bytes)
//! added is taken off beforehand, by starting the sum at `-offset * sum of the activations`.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::activations::{BLOCK, TILE};
use super::super::matrix::{
    Bits, Format, GROUP, GROUPS_PER_SUPER, GroupScales, LINE, PANEL, SUPER, Segment, SuperScales,
};
use super::{Inputs, Output};

/// # Safety
/// The CPU has AVX-512 VNNI; the activations fit the segment; nobody else writes these panels of `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    // SAFETY: passed on.
    unsafe {
        match segment.format {
            Format::Group { bits: Bits::B8, .. } => group::<8, false>(segment, panels, 128, inputs, out),
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
            _ => unreachable!("dense formats have a kernel of their own"),
        }
    }
}

/// The eight lines of a group as unsigned bytes (whole bytes with their sign bit flipped).
///
/// # Safety
/// `record` points to the record of a group of `BITS`-bit weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn unpack<const BITS: usize>(record: *const u8) -> [__m512i; 8] {
    let zero = _mm512_setzero_si512();
    let mut lines = [zero; 8];
    // SAFETY: all reads lie within the record's `64 * BITS` bytes.
    unsafe {
        let line = |at: usize| _mm512_loadu_si512(record.add(at * LINE).cast());
        match BITS {
            8 => {
                let flip = _mm512_set1_epi8(-128);
                for (r, out) in lines.iter_mut().enumerate() {
                    *out = _mm512_xor_si512(line(r), flip);
                }
            }
            4..=6 => {
                let nibble = _mm512_set1_epi8(15);
                for r in 0..4 {
                    let both = line(r);
                    lines[r] = _mm512_and_si512(both, nibble);
                    lines[r + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble);
                }
            }
            _ => {
                let pair = _mm512_set1_epi8(3);
                for r in 0..2 {
                    let all = line(r);
                    lines[4 * r] = _mm512_and_si512(all, pair);
                    lines[4 * r + 1] = _mm512_and_si512(_mm512_srli_epi16::<2>(all), pair);
                    lines[4 * r + 2] = _mm512_and_si512(_mm512_srli_epi16::<4>(all), pair);
                    lines[4 * r + 3] = _mm512_and_si512(_mm512_srli_epi16::<6>(all), pair);
                }
            }
        }
        if BITS == 6 {
            let pair = _mm512_set1_epi8(0x30);
            for r in 0..2 {
                let all = line(4 + r);
                let parts =
                    [_mm512_slli_epi16::<4>(all), _mm512_slli_epi16::<2>(all), all, _mm512_srli_epi16::<2>(all)];
                for (f, part) in parts.into_iter().enumerate() {
                    lines[4 * r + f] = _mm512_or_si512(lines[4 * r + f], _mm512_and_si512(part, pair));
                }
            }
        }
        if BITS == 3 || BITS == 5 {
            let (at, top) = if BITS == 3 { (2, _mm512_set1_epi8(4)) } else { (4, _mm512_set1_epi8(16)) };
            for (r, out) in lines.iter_mut().enumerate() {
                let mask = record.add(at * LINE + r * 8).cast::<u64>().read_unaligned();
                *out = _mm512_mask_add_epi8(*out, mask, *out, top);
            }
        }
    }
    lines
}

/// Adds the products of one line of weights with four activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn dot(sum: __m512i, weights: __m512i, activations: *const i8) -> __m512i {
    // SAFETY: the caller points at four activations.
    _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(unsafe { activations.cast::<i32>().read_unaligned() }))
}

/// Cuts panels and rows into blocks that fill the registers: four panels for one row, one panel for eight.
macro_rules! blocks {
    ($block:ident::<$($c:tt),*>, $segment:expr, $panels:expr, $offset:expr, $inputs:expr, $out:expr) => {{
        let (rows, mut panel) = ($inputs.rows, $panels.start);
        while panel < $panels.end {
            let wide = if $panels.end - panel >= 4 && rows < 4 { 4 } else { 1 };
            let mut row = 0;
            while row < rows {
                row += match (wide, rows - row) {
                    (4, 2..) => { $block::<$($c),*, 2, 4>($segment, panel, row, $offset, $inputs, $out); 2 }
                    (4, _) => { $block::<$($c),*, 1, 4>($segment, panel, row, $offset, $inputs, $out); 1 }
                    (_, 8..) => { $block::<$($c),*, 8, 1>($segment, panel, row, $offset, $inputs, $out); 8 }
                    (_, 4..) => { $block::<$($c),*, 4, 1>($segment, panel, row, $offset, $inputs, $out); 4 }
                    (_, 2..) => { $block::<$($c),*, 2, 1>($segment, panel, row, $offset, $inputs, $out); 2 }
                    _ => { $block::<$($c),*, 1, 1>($segment, panel, row, $offset, $inputs, $out); 1 }
                };
            }
            panel += wide;
        }
    }};
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group<const BITS: usize, const MINS: bool>(
    segment: &Segment,
    panels: Range<usize>,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    // SAFETY: passed on; rows of a block never cross a tile because blocks divide 16.
    unsafe { blocks!(group_block::<BITS, MINS>, segment, panels, offset, inputs, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn superblock<const BITS: usize, const SUBS: usize, const MINS: bool>(
    segment: &Segment,
    panels: Range<usize>,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    // SAFETY: as for `group`.
    unsafe { blocks!(super_block::<BITS, SUBS, MINS>, segment, panels, offset, inputs, out) }
}

/// `R` rows by `P` panels of a format with a scale per group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group_block<const BITS: usize, const MINS: bool, const R: usize, const P: usize>(
    segment: &Segment,
    panel: usize,
    row: usize,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let (acts, tile, lane) = (inputs.group, row / TILE, row % TILE);
    let weights: [*const u8; P] = std::array::from_fn(|p| segment.panel(panel + p).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); P]; R];
    for g in 0..segment.cols / GROUP {
        let at = ((g / GROUPS_PER_SUPER * acts.tiles + tile) * GROUPS_PER_SUPER + g % GROUPS_PER_SUPER) * TILE + lane;
        // SAFETY: the group is one of the segment's, and the rows were filled into the activations.
        unsafe {
            let values = acts.values.as_ptr().add(at * GROUP);
            for p in 0..P {
                let lines = unpack::<BITS>(weights[p].add(g * BITS * LINE));
                let scales = weights[p].add(segment.scales_at + g * GroupScales::bytes(MINS));
                let scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
                for r in 0..R {
                    let mut integer = _mm512_set1_epi32(-offset * *acts.sums.get_unchecked(at + r));
                    for (i, line) in lines.into_iter().enumerate() {
                        integer = dot(integer, line, values.add(r * GROUP + i * 4));
                    }
                    let scaled =
                        _mm512_mul_ps(_mm512_cvtepi32_ps(integer), _mm512_set1_ps(*acts.scales.get_unchecked(at + r)));
                    sums[r][p] = _mm512_fmadd_ps(scaled, scale, sums[r][p]);
                    if MINS {
                        let min = _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(32).cast()));
                        let weighted = _mm512_set1_ps(*acts.weighted.get_unchecked(at + r));
                        sums[r][p] = _mm512_fmadd_ps(weighted, min, sums[r][p]);
                    }
                }
            }
        }
    }
    // SAFETY: the caller's promise about `out`.
    unsafe { put(segment, panel, row, out, sums) };
}

/// `R` rows by `P` panels of a K format.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn super_block<const BITS: usize, const SUBS: usize, const MINS: bool, const R: usize, const P: usize>(
    segment: &Segment,
    panel: usize,
    row: usize,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let (acts, tile, lane) = (inputs.superblock, row / TILE, row % TILE);
    let weights: [*const u8; P] = std::array::from_fn(|p| segment.panel(panel + p).as_ptr());
    let mut sums = [[_mm512_setzero_ps(); P]; R];
    for index in 0..segment.cols / SUPER {
        let at = index * acts.tiles + tile;
        // SAFETY: the superblock is one of the segment's, and the rows were filled into the activations.
        unsafe {
            let values = acts.values.as_ptr().add(at * BLOCK + lane * 64);
            let act_sums = acts.sums.as_ptr().add((at * TILE + lane) * 16);
            for p in 0..P {
                let scales = weights[p].add(segment.scales_at + index * SuperScales::bytes(SUBS, MINS));
                let mut integers = [_mm512_setzero_si512(); R];
                for g in 0..GROUPS_PER_SUPER {
                    let lines = unpack::<BITS>(weights[p].add((index * GROUPS_PER_SUPER + g) * BITS * LINE));
                    for half in 0..SUBS / GROUPS_PER_SUPER {
                        let sub = g * (SUBS / GROUPS_PER_SUPER) + half;
                        let count = 64 / SUBS;
                        let scale = sub_scale::<SUBS, MINS>(scales, sub);
                        for r in 0..R {
                            let values = values.add(g / 2 * 64 * TILE + r * 64 + g % 2 * 32 + half * 16);
                            let mut integer = if offset == 0 {
                                _mm512_setzero_si512()
                            } else {
                                _mm512_set1_epi32(-offset * i32::from(*act_sums.add(r * 16 + sub)))
                            };
                            for i in 0..count {
                                integer = dot(integer, lines[half * count + i], values.add(i * 4));
                            }
                            integers[r] = _mm512_add_epi32(integers[r], _mm512_mullo_epi32(integer, scale));
                        }
                    }
                }
                let halves = scales.add(SuperScales::integers(SUBS, MINS));
                let d = _mm512_cvtph_ps(_mm256_loadu_si256(halves.cast()));
                for r in 0..R {
                    let scale = _mm512_set1_ps(*acts.scales.get_unchecked(at * TILE + lane + r));
                    let integer = _mm512_cvtepi32_ps(integers[r]);
                    sums[r][p] = _mm512_fmadd_ps(_mm512_mul_ps(d, scale), integer, sums[r][p]);
                    if MINS {
                        let dmin = _mm512_cvtph_ps(_mm256_loadu_si256(halves.add(32).cast()));
                        let minimum = _mm512_cvtepi32_ps(minimums::<SUBS>(scales, act_sums.add(r * 16)));
                        sums[r][p] = _mm512_fnmadd_ps(_mm512_mul_ps(dmin, scale), minimum, sums[r][p]);
                    }
                }
            }
        }
    }
    // SAFETY: the caller's promise about `out`.
    unsafe { put(segment, panel, row, out, sums) };
}

/// The integer scales of sub-block `sub`, one lane per feature.
///
/// # Safety
/// `scales` points to the scales of a superblock.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn sub_scale<const SUBS: usize, const MINS: bool>(scales: *const u8, sub: usize) -> __m512i {
    // SAFETY: the caller's promise.
    let bytes = unsafe { _mm_loadu_si128(scales.add(sub * PANEL).cast()) };
    match (SUBS, MINS) {
        (8, _) => _mm512_cvtepu8_epi32(bytes),
        (_, true) => _mm512_cvtepu8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15))),
        (_, false) => _mm512_cvtepi8_epi32(bytes),
    }
}

/// `sum over sub-blocks of min * sum of activations`, one lane per feature.
///
/// # Safety
/// `scales` points to the scales of a superblock, `sums` to its 16 sums of one row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn minimums<const SUBS: usize>(scales: *const u8, sums: *const i16) -> __m512i {
    let mut total = _mm512_setzero_si512();
    for sub in 0..SUBS {
        // SAFETY: the caller's promise.
        unsafe {
            let (min, sum) = if SUBS == 8 {
                let bytes = _mm_loadu_si128(scales.add((8 + sub) * PANEL).cast());
                (bytes, i32::from(*sums.add(2 * sub)) + i32::from(*sums.add(2 * sub + 1)))
            } else {
                let bytes = _mm_loadu_si128(scales.add(sub * PANEL).cast());
                let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15));
                (high, i32::from(*sums.add(sub)))
            };
            // Both factors fit in 16 bits, so a pair product (with zero beside it) is exact and cheap.
            let sum = _mm512_set1_epi32(sum & 0xffff);
            total = _mm512_add_epi32(total, _mm512_madd_epi16(_mm512_cvtepu8_epi32(min), sum));
        }
    }
    total
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn put<const R: usize, const P: usize>(
    segment: &Segment,
    panel: usize,
    row: usize,
    out: Output<'_>,
    sums: [[__m512; P]; R],
) {
    for (r, sums) in sums.into_iter().enumerate() {
        for (p, sum) in sums.into_iter().enumerate() {
            let mut values = [0f32; PANEL];
            // SAFETY: 16 lanes; the caller's promise about `out`.
            unsafe {
                _mm512_storeu_ps(values.as_mut_ptr(), sum);
                out.put(row + r, panel + p, segment.rows, &values);
            }
        }
    }
}
