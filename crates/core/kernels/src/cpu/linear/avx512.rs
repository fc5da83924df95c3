//! Quantised weights with AVX-512 VNNI: one lane per feature, four inputs per instruction.
//!
//! `vpdpbusd` multiplies unsigned by signed bytes. Weights are the unsigned side, and the contribution of their offset (128
//! for 8-bit weights) is removed by starting the sum at `-offset * sum of the activations`.
//!
//! For few rows several panels are read together, line by line, because the hardware prefetchers follow slow parallel
//! streams better than bursts from one panel after the other.

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;
use std::ops::Range;

use super::super::activations::{BLOCK, Q8Activations, Q8KActivations, TILE};
use super::super::matrix::{
    Bits, Blocks, Format, GROUP, GROUPS_PER_SUPER, LINE, MatrixSegment, PANEL, Panels, SUPER, SuperScales,
};
use super::prefetch::{PanelPrefetcher, Prefetch};
use super::{Inputs, Output, PanelRange};

/// # Safety
/// The CPU has AVX-512 VNNI; the activations match the segment; no other thread writes these panels of `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &MatrixSegment, share: PanelRange, inputs: &Inputs<'_>, out: Output<'_>) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match segment.format {
            Format::Group { bits: Bits::B8, .. } => group::<8, false>(segment, share, 128, inputs, out),
            Format::Group { bits: Bits::B5, offset, mins: false } => {
                group::<5, false>(segment, share, offset, inputs, out)
            }
            Format::Group { bits: Bits::B5, offset, mins: true } => {
                group::<5, true>(segment, share, offset, inputs, out)
            }
            Format::Group { offset, mins: false, .. } => group::<4, false>(segment, share, offset, inputs, out),
            Format::Group { offset, mins: true, .. } => group::<4, true>(segment, share, offset, inputs, out),
            Format::Super { bits: Bits::B2, offset, .. } => {
                superblock::<2, 16, true>(segment, share, offset, inputs, out)
            }
            Format::Super { bits: Bits::B3, offset, .. } => {
                superblock::<3, 16, false>(segment, share, offset, inputs, out)
            }
            Format::Super { bits: Bits::B5, offset, .. } => {
                superblock::<5, 8, true>(segment, share, offset, inputs, out)
            }
            Format::Super { bits: Bits::B6, offset, .. } => {
                superblock::<6, 16, false>(segment, share, offset, inputs, out)
            }
            Format::Super { offset, .. } => superblock::<4, 8, true>(segment, share, offset, inputs, out),
            _ => unreachable!("`dense` handles float formats"),
        }
    }
}

/// The eight lines of a group as unsigned bytes (8-bit weights with their sign bit flipped).
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

/// The bits of `1.5 * 2^23`, at which integer sums start, as in the tile kernels.
const REBASE: i32 = 0x4b40_0000;

/// A compiler barrier: it keeps later loads from being moved up, which would spill registers.
#[inline(always)]
fn fence() {
    // SAFETY: there is no instruction.
    unsafe { asm!("", options(nostack, preserves_flags)) };
}

/// Lines `j` and `j + 4` of a group as unsigned bytes (8-bit weights with their sign bit flipped). With 4 bits and more,
/// these two lines share bytes in the nibble plane.
///
/// # Safety
/// `record` points to the record of a group of `BITS`-bit weights.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn unpack_pair<const BITS: usize>(record: *const u8, j: usize) -> [__m512i; 2] {
    // SAFETY: all reads lie within the record's `64 * BITS` bytes.
    unsafe {
        let line = |at: usize| _mm512_loadu_si512(record.add(at * LINE).cast());
        let mut pair = match BITS {
            8 => {
                let flip = _mm512_set1_epi8(-128);
                [_mm512_xor_si512(line(j), flip), _mm512_xor_si512(line(j + 4), flip)]
            }
            4..=6 => {
                let (both, nibble) = (line(j), _mm512_set1_epi8(15));
                [_mm512_and_si512(both, nibble), _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble)]
            }
            _ => {
                let mask = _mm512_set1_epi8(3);
                [line(0), line(1)].map(|all| {
                    let field = match j {
                        0 => all,
                        1 => _mm512_srli_epi16::<2>(all),
                        2 => _mm512_srli_epi16::<4>(all),
                        _ => _mm512_srli_epi16::<6>(all),
                    };
                    _mm512_and_si512(field, mask)
                })
            }
        };
        for (half, out) in pair.iter_mut().enumerate() {
            if BITS == 6 {
                let all = line(4 + half);
                let field = match j {
                    0 => _mm512_slli_epi16::<4>(all),
                    1 => _mm512_slli_epi16::<2>(all),
                    2 => all,
                    _ => _mm512_srli_epi16::<2>(all),
                };
                *out = _mm512_or_si512(*out, _mm512_and_si512(field, _mm512_set1_epi8(0x30)));
            }
            if BITS == 3 || BITS == 5 {
                let (at, top) = if BITS == 3 { (2, _mm512_set1_epi8(4)) } else { (4, _mm512_set1_epi8(16)) };
                let mask = record.add(at * LINE + (j + 4 * half) * 8).cast::<u64>().read_unaligned();
                *out = _mm512_mask_add_epi8(*out, mask, *out, top);
            }
        }
        pair
    }
}

/// Panels that are processed together, from `panel` on.
#[derive(Clone, Copy)]
struct PanelBlock {
    /// The first panel of the chunk.
    first: usize,
    panel: usize,
    /// The panels that are processed after these, if they are not the next ones of the segment.
    next: Option<Panels>,
}

/// Splits panels and rows into blocks that fill the registers: `$sums` sums (16, or 8 of two parts), of up to four panels
/// (for one row, eight). Rows after the last one are padding of its tile; they are computed and discarded, because the time
/// is bound by the weights.
macro_rules! blocks {
    ($block:ident::<$($c:tt),*>, $sums:expr, $segment:expr, $share:expr, $offset:expr, $inputs:expr, $parts:expr, $out:expr) => {{
        let (rows, Range { start: first, end }) = ($inputs.rows * $parts, $share.panels);
        let mut panel = first;
        while panel < end {
            let left = end - panel;
            let wide = match left {
                // Blocks of about the same width, because a narrow block takes almost as long as a wide one.
                _ if rows == 1 => left.div_ceil(left.div_ceil(8)).next_multiple_of(2).min(left & !1).max(1),
                4.. if rows * 4 <= $sums => 4,
                2.. if rows * 2 <= $sums => 2,
                _ => 1,
            };
            let walk = PanelBlock { first, panel, next: $share.next.filter(|_| wide == left) };
            let mut row = 0;
            while row < rows {
                row += match (wide, rows - row) {
                    (8, _) => { $block::<$($c),*, 1, 8>($segment, walk, row, $offset, $inputs, $out); 1 }
                    (6, _) => { $block::<$($c),*, 1, 6>($segment, walk, row, $offset, $inputs, $out); 1 }
                    (4, 1) => { $block::<$($c),*, 1, 4>($segment, walk, row, $offset, $inputs, $out); 1 }
                    (4, 2) => { $block::<$($c),*, 2, 4>($segment, walk, row, $offset, $inputs, $out); 2 }
                    (4, _) if $sums == 16 => { $block::<$($c),*, 4, 4>($segment, walk, row, $offset, $inputs, $out); 4 }
                    (2, 1) => { $block::<$($c),*, 1, 2>($segment, walk, row, $offset, $inputs, $out); 1 }
                    (2, _) if $sums == 16 => { $block::<$($c),*, 8, 2>($segment, walk, row, $offset, $inputs, $out); 8 }
                    (2, _) => { $block::<$($c),*, 4, 2>($segment, walk, row, $offset, $inputs, $out); 4 }
                    _ if $sums == 16 => { $block::<$($c),*, 16, 1>($segment, walk, row, $offset, $inputs, $out); 16 }
                    _ => { $block::<$($c),*, 8, 1>($segment, walk, row, $offset, $inputs, $out); 8 }
                };
            }
            panel += wide;
        }
    }};
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group<const BITS: usize, const MINS: bool>(
    segment: &MatrixSegment,
    share: PanelRange,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    if inputs.rows == 1 {
        inputs.group.prefetch(segment.cols);
    }
    // SAFETY: the caller upholds the contract; rows of a block never cross a tile because block sizes divide 16.
    unsafe { blocks!(group_block::<BITS, MINS>, 16, segment, share, offset, inputs, inputs.group.parts, out) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn superblock<const BITS: usize, const SUBS: usize, const MINS: bool>(
    segment: &MatrixSegment,
    share: PanelRange,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let parts = inputs.superblock.parts;
    // SAFETY: as for `group`.
    unsafe { blocks!(super_block::<BITS, SUBS, MINS>, 128 / SUBS, segment, share, offset, inputs, parts, out) }
}

/// `R` rows by `P` panels of a format with a scale per group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group_block<const BITS: usize, const MINS: bool, const R: usize, const P: usize>(
    segment: &MatrixSegment,
    walk: PanelBlock,
    row: usize,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let (acts, lane) = (inputs.group, row % TILE);
    let weights: [*const u8; P] = std::array::from_fn(|p| segment.panel(walk.panel + p).as_ptr());
    // With few sums, each has two independent accumulators in registers; with many, the sums are kept in the first-level
    // cache.
    let parts = if R * P > 4 { 1 } else { 2 };
    let mut sums = [[_mm512_setzero_ps(); R]; P];
    let sums = if R * P > 4 { black_box(&mut sums) } else { &mut sums };
    // Kept in memory, because broadcasting a lane from memory is free.
    let mut start = _mm512_setzero_si512();
    let start = black_box(&raw mut start).cast::<i32>();
    let ahead = PanelPrefetcher::new(segment, walk.first, walk.panel);
    let prefetch = Prefetch::new(segment, weights, walk.next);
    let places = const { Blocks::groups(BITS, MINS) };
    for g in 0..segment.cols / GROUP {
        let at = acts.at(g, row);
        // SAFETY: the group is one of the segment's, and sixteen rows may be read.
        unsafe {
            let values = acts.values.as_ptr().add(at * GROUP);
            let mut integers = [[[_mm512_setzero_si512(); R]; P]; 2];
            // Subtract the contribution of the offset in advance. Formats with minimums have no offset.
            if !MINS {
                let sums = _mm512_loadu_si512(acts.sums.as_ptr().add(at - lane).cast());
                let added = _mm512_mullo_epi32(sums, _mm512_set1_epi32(offset));
                _mm512_store_si512(start.cast(), _mm512_sub_epi32(_mm512_set1_epi32(REBASE), added));
            }
            for r in 0..R {
                let start = _mm512_set1_epi32(if MINS { REBASE } else { *start.add(lane + r) });
                integers[0].iter_mut().for_each(|rows| rows[r] = start);
            }
            let (record, scales) = (places.weights(g), places.scales(g));
            if row == 0 {
                if P < 4 {
                    ahead.step::<P>(scales, places.start(2) / 2);
                }
                for p in 0..P {
                    prefetch.prefetch(p, scales);
                }
            }
            for j in 0..4 {
                let mut pairs = [[_mm512_setzero_si512(); 2]; P];
                for p in 0..P {
                    pairs[p] = unpack_pair::<BITS>(weights[p].add(record), j);
                    if row == 0 {
                        prefetch.prefetch(p, record + j * LINE);
                        if BITS == 8 {
                            prefetch.prefetch(p, record + (j + 4) * LINE);
                        } else if BITS == 5 && j == 0 {
                            prefetch.prefetch(p, record + 4 * LINE);
                        }
                    }
                }
                for half in 0..2 {
                    for r in 0..R {
                        let four = values.add(r * GROUP + j * 4 + half * 16).cast::<i32>().read_unaligned();
                        for p in 0..P {
                            let sum = &mut integers[half % parts][p][r];
                            *sum = _mm512_dpbusd_epi32(*sum, pairs[p][half], _mm512_set1_epi32(four));
                        }
                    }
                }
                fence();
            }
            if parts == 2 {
                for p in 0..P {
                    for r in 0..R {
                        integers[0][p][r] = _mm512_add_epi32(integers[0][p][r], integers[1][p][r]);
                    }
                }
            }
            for p in 0..P {
                scale_group::<MINS, R>(integers[0][p], acts, at, weights[p].add(scales), &mut sums[p]);
            }
        }
    }
    // SAFETY: the caller guarantees the contract of `Output::put`.
    unsafe { put(segment, walk.panel, row, inputs.rows * acts.parts, acts.parts, out, sums) };
}

/// Adds the products of a group of one panel to its sums.
///
/// # Safety
/// `scales` points to the group's scales, and `at` is its first row in the activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn scale_group<const MINS: bool, const R: usize>(
    integers: [__m512i; R],
    acts: &Q8Activations,
    at: usize,
    scales: *const u8,
    sums: &mut [__m512; R],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
        for r in 0..R {
            let [factor, rebase] = [&acts.scales, &acts.rebase].map(|v| _mm512_set1_ps(*v.as_ptr().add(at + r)));
            let scaled = _mm512_fmadd_ps(_mm512_castsi512_ps(integers[r]), factor, rebase);
            sums[r] = _mm512_fmadd_ps(scaled, scale, sums[r]);
            if MINS {
                let min = _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(32).cast()));
                let weighted = _mm512_set1_ps(*acts.weighted.as_ptr().add(at + r));
                sums[r] = _mm512_fmadd_ps(weighted, min, sums[r]);
            }
        }
    }
}

/// `R` rows by `P` panels of a K format.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn super_block<const BITS: usize, const SUBS: usize, const MINS: bool, const R: usize, const P: usize>(
    segment: &MatrixSegment,
    walk: PanelBlock,
    row: usize,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let (acts, tile, lane) = (inputs.superblock, row / TILE, row % TILE);
    let weights: [*const u8; P] = std::array::from_fn(|p| segment.panel(walk.panel + p).as_ptr());
    // As in `group_block`. With 16 sub-blocks, the two accumulators are two sub-blocks and are scaled separately.
    let many = SUBS == 8 && R * P > 4;
    let mut sums = [[_mm512_setzero_ps(); R]; P];
    let sums = if many { black_box(&mut sums) } else { &mut sums };
    let mut totals = [[_mm512_setzero_si512(); R]; P];
    let totals = if many { black_box(&mut totals) } else { &mut totals };
    let ahead = PanelPrefetcher::new(segment, walk.first, walk.panel);
    let prefetch = Prefetch::new(segment, weights, walk.next);
    let places = const { Blocks::superblocks(BITS, SUBS, MINS) };
    for index in 0..segment.cols / SUPER {
        let at = index * acts.tiles + tile;
        // SAFETY: the superblock is one of the segment's, and all rows of a tile are allocated, filled or not.
        unsafe {
            let values = acts.values.as_ptr().add(at * BLOCK + lane * 64);
            let act_sums = acts.sums.as_ptr().add((at * TILE + lane) * 16);
            let scales: [*const u8; P] = std::array::from_fn(|p| weights[p].add(places.scales(index)));
            *totals = [[_mm512_setzero_si512(); R]; P];
            for g in 0..GROUPS_PER_SUPER {
                let record = places.weights(index) + g * BITS * LINE;
                let mut integers = [[[_mm512_setzero_si512(); R]; P]; 2];
                if !MINS {
                    for r in 0..R {
                        for half in 0..2 {
                            let sum = i32::from(*act_sums.add(r * 16 + 2 * g + half));
                            integers[half].iter_mut().for_each(|rows| rows[r] = _mm512_set1_epi32(-offset * sum));
                        }
                    }
                }
                if row == 0 {
                    if P < 4 {
                        let bytes = places.start(2) / 2;
                        ahead.step::<P>(index * bytes + g * bytes / GROUPS_PER_SUPER, bytes.div_ceil(GROUPS_PER_SUPER));
                    }
                    if g * LINE < SuperScales::bytes(SUBS, MINS) {
                        for p in 0..P {
                            prefetch.prefetch(p, places.scales(index) + g * LINE);
                        }
                    }
                }
                for j in 0..4 {
                    let mut pairs = [[_mm512_setzero_si512(); 2]; P];
                    for p in 0..P {
                        pairs[p] = unpack_pair::<BITS>(weights[p].add(record), j);
                        if row == 0 {
                            if j < BITS {
                                prefetch.prefetch(p, record + j * LINE);
                            }
                            if j + 4 < BITS {
                                prefetch.prefetch(p, record + (j + 4) * LINE);
                            }
                        }
                    }
                    for half in 0..2 {
                        for r in 0..R {
                            let at = g / 2 * 64 * TILE + r * 64 + g % 2 * 32 + half * 16 + j * 4;
                            let four = _mm512_set1_epi32(values.add(at).cast::<i32>().read_unaligned());
                            for p in 0..P {
                                let sum = &mut integers[if many { 0 } else { half }][p][r];
                                *sum = _mm512_dpbusd_epi32(*sum, pairs[p][half], four);
                            }
                        }
                    }
                    if SUBS == 8 {
                        fence();
                    }
                }
                let [first, second] = integers;
                for p in 0..P {
                    scale_sub::<SUBS, MINS, R>(first[p], second[p], g, scales[p], &mut totals[p]);
                }
            }
            for p in 0..P {
                let halves = scales[p].add(SuperScales::integers(SUBS, MINS));
                let d = _mm512_cvtph_ps(_mm256_loadu_si256(halves.cast()));
                for r in 0..R {
                    let row = at * TILE + lane + r;
                    let scale = _mm512_set1_ps(*acts.scales.get_unchecked(row));
                    sums[p][r] = _mm512_fmadd_ps(_mm512_mul_ps(d, scale), _mm512_cvtepi32_ps(totals[p][r]), sums[p][r]);
                    if MINS {
                        let dmin = _mm512_cvtph_ps(_mm256_loadu_si256(halves.add(32).cast()));
                        let minimum = _mm512_cvtepi32_ps(minimums::<SUBS>(scales[p], acts, row));
                        sums[p][r] = _mm512_fnmadd_ps(_mm512_mul_ps(dmin, scale), minimum, sums[p][r]);
                    }
                }
            }
        }
    }
    // SAFETY: the caller guarantees the contract of `Output::put`.
    unsafe { put(segment, walk.panel, row, inputs.rows * acts.parts, acts.parts, out, sums) };
}

/// Scales the products of the first and the second 16 of 32 inputs and adds them to the integers of a superblock.
///
/// # Safety
/// `scales` points to the scales of a superblock.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn scale_sub<const SUBS: usize, const MINS: bool, const R: usize>(
    first: [__m512i; R],
    second: [__m512i; R],
    group: usize,
    scales: *const u8,
    totals: &mut [__m512i; R],
) {
    for r in 0..R {
        // SAFETY: guaranteed by the caller.
        let scaled = unsafe {
            if SUBS == 8 {
                let scale = sub_scale::<SUBS, MINS>(scales, group);
                _mm512_mullo_epi32(_mm512_add_epi32(first[r], second[r]), scale)
            } else {
                let [low, high] = [2 * group, 2 * group + 1].map(|sub| sub_scale::<SUBS, MINS>(scales, sub));
                _mm512_add_epi32(_mm512_mullo_epi32(first[r], low), _mm512_mullo_epi32(second[r], high))
            }
        };
        totals[r] = _mm512_add_epi32(totals[r], scaled);
    }
}

/// The integer scales of sub-block `sub`, one lane per feature.
///
/// # Safety
/// `scales` points to the scales of a superblock.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn sub_scale<const SUBS: usize, const MINS: bool>(scales: *const u8, sub: usize) -> __m512i {
    // SAFETY: guaranteed by the caller.
    let bytes = unsafe { _mm_loadu_si128(scales.add(sub * PANEL).cast()) };
    match (SUBS, MINS) {
        (8, _) => _mm512_cvtepu8_epi32(bytes),
        (_, true) => _mm512_cvtepu8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15))),
        (_, false) => _mm512_cvtepi8_epi32(bytes),
    }
}

/// The integer minimums of sub-block `sub`, one lane per feature.
///
/// # Safety
/// `scales` points to the scales of a superblock with minimums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn sub_minimum<const SUBS: usize>(scales: *const u8, sub: usize) -> __m512i {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if SUBS == 8 {
            _mm512_cvtepu8_epi32(_mm_loadu_si128(scales.add((8 + sub) * PANEL).cast()))
        } else {
            let bytes = _mm_loadu_si128(scales.add(sub * PANEL).cast());
            _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15)))
        }
    }
}

/// Minimums of sub-blocks `2 i` and `2 i + 1` in the 16-bit halves of each feature's lane.
///
/// # Safety
/// `scales` points to the scales of a superblock.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn min_pair<const SUBS: usize>(scales: *const u8, i: usize) -> __m512i {
    // SAFETY: guaranteed by the caller.
    let bytes = |row: usize| unsafe { _mm_loadu_si128(scales.add(row * PANEL).cast()) };
    let (first, second) = if SUBS == 8 {
        (bytes(8 + 2 * i), bytes(9 + 2 * i))
    } else {
        let high = |bytes| _mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15));
        (high(bytes(2 * i)), high(bytes(2 * i + 1)))
    };
    let both = _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second));
    _mm512_cvtepu8_epi16(both)
}

/// `sum over sub-blocks of min * sum of activations` of one row, one lane per feature.
///
/// # Safety
/// `scales` points to the scales of a superblock; `row` is a row of the activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn minimums<const SUBS: usize>(scales: *const u8, acts: &Q8KActivations, row: usize) -> __m512i {
    let mut total = _mm512_setzero_si512();
    for i in 0..SUBS / 2 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let sums = if SUBS == 8 { acts.sums32.as_ptr().add(row * 8) } else { acts.sums.as_ptr().add(row * 16) };
            let two = _mm512_set1_epi32(sums.add(2 * i).cast::<i32>().read_unaligned());
            total = _mm512_dpwssd_epi32(total, min_pair::<SUBS>(scales, i), two);
        }
    }
    total
}

/// Writes the sums of rows from `row` on, of `rows`: `parts` are added for each row of `out`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn put<const R: usize, const P: usize>(
    segment: &MatrixSegment,
    panel: usize,
    row: usize,
    rows: usize,
    parts: usize,
    out: Output<'_>,
    sums: &[[__m512; R]; P],
) {
    for (p, sums) in sums.iter().enumerate() {
        for (r, sums) in sums[..R.min(rows - row)].chunks_exact(parts).enumerate() {
            let mut values = [0f32; PANEL];
            let sum = match *sums {
                [high, low] => _mm512_add_ps(high, low),
                _ => sums[0],
            };
            // SAFETY: 16 lanes; the caller guarantees the contract of `Output::put`.
            unsafe {
                _mm512_storeu_ps(values.as_mut_ptr(), sum);
                out.put(row / parts + r, panel + p, segment.rows, &values);
            }
        }
    }
}
