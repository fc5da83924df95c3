//! Unpacks quantised and 12-bit bf16 panels to bf16 tiles: 32 inputs of 16 features are one kilobyte,
//! `[input pair][feature][2]`.
//!
//! A stored byte becomes a float without a conversion: inserted into the mantissa of a power of two, it is that power plus
//! the byte, and one multiply-add subtracts the power and applies scale and minimum. For bytes of up to seven bits the power
//! is 128, for eight bits 32768, where the multiply-add is exact because scales have eleven bits. The result is rounded to
//! the nearest bf16, ties away from zero.

use std::arch::x86_64::*;

use super::super::matrix::{
    Bits, Blocks, Format, GROUP, GROUPS_PER_SUPER, LINE, MatrixSegment, PANEL, SUPER, SuperScales,
};
use super::super::packed12::{PACKED, PLAIN, QUARTERS_PER_GROUP};
use super::avx512::{sub_minimum, sub_scale, unpack};
use super::packed12_panel::Packed12Panel;

/// Bytes of a tile of 32 inputs by 16 features.
pub(super) const TILE_BYTES: usize = GROUP * PANEL * 2;

/// Bytes between the weights in use and the weights that are prefetched. Past the end of a panel this is the next panel.
const AHEAD: usize = 4096;

/// Unpacks a panel, one tile after the other.
///
/// # Safety
/// The CPU has AVX-512; `out` has space for one tile per group and is aligned to lines.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn unpack_panel(segment: &MatrixSegment, panel: usize, out: *mut u8) {
    let weights = segment.panel(panel).as_ptr();
    // SAFETY: the caller upholds the contract.
    unsafe {
        match segment.format {
            Format::Group { bits: Bits::B8, .. } => group::<8, false>(segment, weights, 0, out),
            Format::Group { bits: Bits::B5, offset, mins: false } => {
                group::<5, false>(segment, weights, offset, out);
            }
            Format::Group { bits: Bits::B5, offset, mins: true } => {
                group::<5, true>(segment, weights, offset, out);
            }
            Format::Group { offset, mins: false, .. } => group::<4, false>(segment, weights, offset, out),
            Format::Group { offset, mins: true, .. } => group::<4, true>(segment, weights, offset, out),
            Format::Super { bits: Bits::B2, offset, .. } => {
                superblock::<2, 16, true>(segment, weights, offset, out);
            }
            Format::Super { bits: Bits::B3, offset, .. } => {
                superblock::<3, 16, false>(segment, weights, offset, out);
            }
            Format::Super { bits: Bits::B4, offset, .. } => {
                superblock::<4, 8, true>(segment, weights, offset, out);
            }
            Format::Super { bits: Bits::B5, offset, .. } => {
                superblock::<5, 8, true>(segment, weights, offset, out);
            }
            Format::Super { offset, .. } => superblock::<6, 16, false>(segment, weights, offset, out),
            Format::Bf16Packed12 => short(segment, panel, out),
            Format::F32 | Format::F16 | Format::Bf16 => unreachable!("nothing to unpack"),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn short(segment: &MatrixSegment, panel: usize, out: *mut u8) {
    let mut weights = Packed12Panel::new(segment, panel);
    for quarter in 0..segment.cols.div_ceil(GROUP) * QUARTERS_PER_GROUP {
        with_prefetch(segment.panel(panel).as_ptr().wrapping_add(Packed12Panel::at(quarter)), PACKED / LINE);
        // SAFETY: the quarter is within the segment, and the caller provides space for it.
        unsafe { weights.unpack(quarter, out.add(quarter * PLAIN)) };
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group<const BITS: usize, const MINS: bool>(
    segment: &MatrixSegment,
    weights: *const u8,
    offset: i32,
    out: *mut u8,
) {
    for group in 0..segment.cols / GROUP {
        // SAFETY: the group is within the segment, and the caller provides space for its tile.
        unsafe {
            let blocks = const { Blocks::groups(BITS, MINS) };
            let scales = with_prefetch(weights.add(blocks.scales(group)), 1);
            let halves = |at: usize| _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(at).cast()));
            let scale = halves(0);
            let shift =
                _mm512_fnmadd_ps(scale, power::<BITS>(offset), if MINS { halves(32) } else { _mm512_setzero_ps() });
            let lines = unpack::<BITS>(with_prefetch(weights.add(blocks.weights(group)), BITS));
            let tile = out.add(group * TILE_BYTES);
            for (r, line) in lines.into_iter().enumerate() {
                put_line::<BITS>(line, scale, shift, tile.add(r * 2 * LINE));
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn superblock<const BITS: usize, const SUBS: usize, const MINS: bool>(
    segment: &MatrixSegment,
    weights: *const u8,
    offset: i32,
    out: *mut u8,
) {
    /// Lines of four inputs in a sub-block.
    const fn lines(subs: usize) -> usize {
        SUPER / subs / 4
    }
    for group in 0..segment.cols / GROUP {
        // SAFETY: the group is within the segment, and the caller provides space for its tile.
        unsafe {
            let blocks = const { Blocks::superblocks(BITS, SUBS, MINS) };
            let (superblock, within) = (group / GROUPS_PER_SUPER, group % GROUPS_PER_SUPER);
            let scales = weights.add(blocks.scales(superblock));
            let halves = |at: usize| {
                let at = SuperScales::integers(SUBS, MINS) + at;
                _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(at).cast()))
            };
            let (d, dmin) = (halves(0), if MINS { halves(32) } else { _mm512_setzero_ps() });
            with_prefetch(scales.add(within * LINE), 1);
            let record = weights.add(blocks.weights(superblock) + within * BITS * LINE);
            let unpacked = unpack::<BITS>(with_prefetch(record, BITS));
            let tile = out.add(group * TILE_BYTES);
            for half in 0..8 / lines(SUBS) {
                let sub = within * (8 / lines(SUBS)) + half;
                let scale = _mm512_mul_ps(d, _mm512_cvtepi32_ps(sub_scale::<SUBS, MINS>(scales, sub)));
                let mut shift = _mm512_mul_ps(scale, _mm512_sub_ps(_mm512_setzero_ps(), power::<BITS>(offset)));
                if MINS {
                    shift = _mm512_fnmadd_ps(dmin, _mm512_cvtepi32_ps(sub_minimum::<SUBS>(scales, sub)), shift);
                }
                for r in half * lines(SUBS)..(half + 1) * lines(SUBS) {
                    put_line::<BITS>(unpacked[r], scale, shift, tile.add(r * 2 * LINE));
                }
            }
        }
    }
}

/// Prefetches `lines` lines, [`AHEAD`] bytes after `start`, and returns `start`.
#[inline]
fn with_prefetch(start: *const u8, lines: usize) -> *const u8 {
    for line in 0..lines {
        // SAFETY: a prefetch reads nothing and may point anywhere; SSE is part of the architecture.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(AHEAD + line * LINE).cast()) };
    }
    start
}

/// The difference between the float made of a stored byte and the weight's integer: the power of two plus the offset.
#[inline]
#[target_feature(enable = "avx512f")]
fn power<const BITS: usize>(offset: i32) -> __m512 {
    _mm512_set1_ps(if BITS == 8 { 32768.0 + 128.0 } else { 128.0 + offset as f32 })
}

/// Unpacks four consecutive inputs of 16 features to two rows of pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn put_line<const BITS: usize>(line: __m512i, scale: __m512, shift: __m512, out: *mut u8) {
    let (half, high) = (_mm512_set1_epi32(0x8000), _mm512_set1_epi32(0xffff_0000_u32 as i32));
    let (mask, power) = if BITS == 8 { (0xff00, 0x4700_0000) } else { (0xff_0000, 0x4300_0000) };
    // `(bytes & mask) | power` is a float; the multiply-add gives the weight.
    let weight = |bytes: __m512i| {
        let number = _mm512_ternarylogic_epi32::<0xea>(bytes, _mm512_set1_epi32(mask), _mm512_set1_epi32(power));
        _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(number), scale, shift))
    };
    // Shift the byte of each input, in 32-bit words, to the position of the mask.
    let [a, b, c, d] = if BITS == 8 {
        [_mm512_slli_epi32::<8>(line), line, _mm512_srli_epi32::<8>(line), _mm512_srli_epi32::<16>(line)]
    } else {
        [_mm512_slli_epi32::<16>(line), _mm512_slli_epi32::<8>(line), line, _mm512_srli_epi32::<8>(line)]
    };
    let round = |bytes: __m512i| _mm512_add_epi32(weight(bytes), half);
    let pair = |even: __m512i, odd: __m512i| {
        _mm512_ternarylogic_epi32::<0xd8>(_mm512_srli_epi32::<16>(round(even)), round(odd), high)
    };
    // SAFETY: the caller provides space for two lines.
    unsafe {
        _mm512_store_si512(out.cast(), pair(a, b));
        _mm512_store_si512(out.add(LINE).cast(), pair(c, d));
    }
}
