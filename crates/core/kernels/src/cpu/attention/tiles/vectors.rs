//! AVX-512 helpers of the tile kernels: powers of two, bf16 parts, transposition.

use std::arch::x86_64::*;

use super::STEP;

/// `2^x` for `x` up to 127, with an error below 5e-7; exactly zero for minus infinity, NaN and `x` below -127.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn exp2(x: __m512) -> __m512 {
    /// A polynomial with a small relative error between -1/2 and 1/2, exact at zero; highest power first.
    const POLY: [f32; 6] = [0.001_112_550_7, 0.009_666_283, 0.055_574_004, 0.240_223_51, 0.693_142_83, 1.0];
    /// Adding this leaves the nearest integer in the last bits of the mantissa.
    const ROUND: f32 = 1.5 * (1 << 23) as f32;
    let x = _mm512_max_ps(x, _mm512_set1_ps(-127.0));
    let shifted = _mm512_add_ps(x, _mm512_set1_ps(ROUND));
    let rest = _mm512_sub_ps(x, _mm512_sub_ps(shifted, _mm512_set1_ps(ROUND)));
    let mut power = _mm512_set1_ps(POLY[0]);
    for c in &POLY[1..] {
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(*c));
    }
    // The integer is added to the exponent; 1 times 2^-127 gives the bits of zero.
    let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(power), exponent))
}

/// The bf16 parts of 16 values, high and low, each in the upper half of its lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn parts(x: __m512) -> [__m512i; 2] {
    let half = _mm512_set1_epi32(0x8000);
    let high = _mm512_add_epi32(_mm512_castps_si512(x), half);
    let whole = _mm512_castsi512_ps(_mm512_and_si512(high, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
    [high, _mm512_add_epi32(_mm512_castps_si512(_mm512_sub_ps(x, whole)), half)]
}

/// Interleaves the upper halves of two vectors' lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn pair_up(even: __m512i, odd: __m512i) -> __m512i {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    _mm512_or_si512(_mm512_srli_epi32::<16>(even), _mm512_and_si512(odd, upper))
}

/// A mask of the first `count` lanes, or of all 16.
#[inline]
pub(super) fn first_lanes(count: usize) -> __mmask16 {
    ((1u32 << count.min(16)) - 1) as __mmask16
}

/// The parts of up to 32 values times `scale`, in their order, padded with zeros.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn row_parts(numbers: &[f32], scale: __m512) -> [__m512i; 2] {
    let count = numbers.len();
    debug_assert!(count <= STEP);
    // SAFETY: the masks have no more lanes than there are elements.
    let [first, second] = unsafe {
        [
            _mm512_maskz_loadu_ps(first_lanes(count), numbers.as_ptr()),
            _mm512_maskz_loadu_ps(first_lanes(count.saturating_sub(16)), numbers.as_ptr().wrapping_add(16)),
        ]
    };
    let (first, second) = (parts(_mm512_mul_ps(first, scale)), parts(_mm512_mul_ps(second, scale)));
    const UPPER: [u16; 32] = {
        let mut index = [0; 32];
        let mut i = 0;
        while i < 32 {
            index[i] = 2 * i as u16 + 1;
            i += 1;
        }
        index
    };
    // SAFETY: 64 bytes.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    [_mm512_permutex2var_epi16(first[0], upper, second[0]), _mm512_permutex2var_epi16(first[1], upper, second[1])]
}

/// Transposes a 16x16 matrix of 32-bit words.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = rows;
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // Vector `4 q + j` gets, in its 128-bit lane `l`, column `4 l + j` of rows `4 q..4 q + 4`.
    let mut quads = pairs;
    for q in (0..16).step_by(4) {
        for j in 0..2 {
            quads[q + 2 * j] = _mm512_unpacklo_epi64(pairs[q + j], pairs[q + j + 2]);
            quads[q + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[q + j], pairs[q + j + 2]);
        }
    }
    let mut columns = quads;
    for j in 0..4 {
        const EVEN: i32 = 0b10_00_10_00;
        const ODD: i32 = 0b11_01_11_01;
        let even = [0, 8].map(|q| _mm512_shuffle_i32x4::<EVEN>(quads[q + j], quads[q + 4 + j]));
        let odd = [0, 8].map(|q| _mm512_shuffle_i32x4::<ODD>(quads[q + j], quads[q + 4 + j]));
        columns[j] = _mm512_shuffle_i32x4::<EVEN>(even[0], even[1]);
        columns[4 + j] = _mm512_shuffle_i32x4::<EVEN>(odd[0], odd[1]);
        columns[8 + j] = _mm512_shuffle_i32x4::<ODD>(even[0], even[1]);
        columns[12 + j] = _mm512_shuffle_i32x4::<ODD>(odd[0], odd[1]);
    }
    columns
}
