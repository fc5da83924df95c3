//! Quantises f32 weights to stored bytes.
//!
//! Q8_0 and Q4_0 give the same bits as the reference; the other formats with blocks of 32 use the same rounding. The K
//! formats search for good scales (see `superblock_fit`).
//!
//! Any input gives finite scales: a NaN is treated as 0, and a value that the format cannot represent (an infinity, a number
//! beyond its largest scale) as the nearest one that it can. Every CPU writes the same bytes, because sums have a fixed
//! order and no multiplication is fused. So all machines that quantise the same file have the same model.

use half::f16;
use types::DType;

use super::superblock_fit::{self, Affine, Symmetric};

/// The largest finite f16.
const F16_MAX: f32 = 65504.0;
/// The largest weight of a K format: mins are at most `63 * dmin`.
const SUPERBLOCK_LIMIT: f32 = 63.0 * F16_MAX;
/// The largest weight of Q2_K, whose mins are at most `15 * dmin`.
const Q2_K_LIMIT: f32 = 15.0 * F16_MAX;

/// Whether [`quantise`] can write this format: all but plain floats.
pub const fn can_quantise(dtype: DType) -> bool {
    dtype.is_quantised()
}

/// Writes `values` as blocks of `dtype`, for which [`can_quantise`] must hold. `out` must have exactly the bytes that the
/// values need.
pub fn quantise(dtype: DType, values: &[f32], out: &mut [u8]) {
    assert!(can_quantise(dtype), "weights cannot be quantised to {dtype}");
    assert_eq!(dtype.row_bytes(values.len()), Some(out.len()), "bytes of {} {dtype} weights", values.len());
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has AVX2, as was just checked.
        unsafe { each_block_avx2(dtype, values, out) };
        return;
    }
    each_block(dtype, values, out);
}

/// The same code, compiled for wider vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn each_block_avx2(dtype: DType, values: &[f32], out: &mut [u8]) {
    each_block(dtype, values, out);
}

#[inline(always)]
fn each_block(dtype: DType, values: &[f32], out: &mut [u8]) {
    match dtype {
        DType::Q8_0 => {
            for (values, out) in blocks(values, out) {
                q8_0(values, out);
            }
        }
        DType::Q4_0 => {
            for (values, out) in blocks(values, out) {
                q4_0(values, out);
            }
        }
        DType::Q5_0 => {
            for (values, out) in blocks(values, out) {
                q5_0(values, out);
            }
        }
        DType::Q4_1 => {
            for (values, out) in blocks(values, out) {
                q4_1(values, out);
            }
        }
        DType::Q5_1 => {
            for (values, out) in blocks(values, out) {
                q5_1(values, out);
            }
        }
        DType::Q2_K => {
            for (values, out) in blocks(values, out) {
                q2_k(values, out);
            }
        }
        DType::Q3_K => {
            for (values, out) in blocks(values, out) {
                q3_k(values, out);
            }
        }
        DType::Q4_K => {
            for (values, out) in blocks(values, out) {
                q4_k(values, out);
            }
        }
        DType::Q5_K => {
            for (values, out) in blocks(values, out) {
                q5_k(values, out);
            }
        }
        DType::Q6_K => {
            for (values, out) in blocks(values, out) {
                q6_k(values, out);
            }
        }
        DType::F32 | DType::F16 | DType::BF16 => unreachable!("`quantise` checks `can_quantise`"),
    }
}

#[inline(always)]
fn blocks<'a, const ELEMENTS: usize, const BYTES: usize>(
    values: &'a [f32],
    out: &'a mut [u8],
) -> impl Iterator<Item = (&'a [f32; ELEMENTS], &'a mut [u8; BYTES])> {
    values.as_chunks().0.iter().zip(out.as_chunks_mut().0)
}

/// The largest magnitude becomes 127; halves are rounded away from zero.
#[inline(always)]
fn q8_0(values: &[f32; 32], out: &mut [u8; 34]) {
    let values = bounded(values, 127.0 * F16_MAX);
    let scale = magnitude(&values) / 127.0;
    let inverse = inverse(scale);
    out[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    for (out, value) in out[2..].iter_mut().zip(values) {
        *out = away_from_zero(value * inverse) as u8;
    }
}

#[inline(always)]
fn q4_0(values: &[f32; 32], out: &mut [u8; 18]) {
    let (scale, quants) = symmetric::<8>(values);
    out[..2].copy_from_slice(&scale.to_le_bytes());
    low_nibbles(&quants, &mut out[2..]);
}

#[inline(always)]
fn q5_0(values: &[f32; 32], out: &mut [u8; 22]) {
    let (scale, quants) = symmetric::<16>(values);
    out[..2].copy_from_slice(&scale.to_le_bytes());
    fifth_bits(&quants, &mut out[2..6]);
    low_nibbles(&quants, &mut out[6..]);
}

#[inline(always)]
fn q4_1(values: &[f32; 32], out: &mut [u8; 20]) {
    let (scale, min, quants) = affine::<15>(values);
    out[..2].copy_from_slice(&scale.to_le_bytes());
    out[2..4].copy_from_slice(&min.to_le_bytes());
    low_nibbles(&quants, &mut out[4..]);
}

#[inline(always)]
fn q5_1(values: &[f32; 32], out: &mut [u8; 24]) {
    let (scale, min, quants) = affine::<31>(values);
    out[..2].copy_from_slice(&scale.to_le_bytes());
    out[2..4].copy_from_slice(&min.to_le_bytes());
    fifth_bits(&quants, &mut out[4..8]);
    low_nibbles(&quants, &mut out[8..]);
}

/// `2 * ZERO` levels around `ZERO`. The value of largest magnitude (the first, if there are several) becomes 0, so the scale
/// has the opposite sign.
#[inline(always)]
fn symmetric<const ZERO: u8>(values: &[f32; 32]) -> (f16, [u8; 32]) {
    let zero = f32::from(ZERO);
    let values = bounded(values, zero * F16_MAX);
    let magnitude = magnitude(&values);
    let extreme = values.iter().copied().find(|value| value.abs() == magnitude).unwrap_or(0.0);
    let scale = extreme / -zero;
    let inverse = inverse(scale);
    // A value near `-extreme` is above the last level and is clamped.
    let top = i32::from(2 * ZERO - 1);
    (f16::from_f32(scale), values.map(|value| ((value * inverse + (zero + 0.5)) as i32).min(top) as u8))
}

/// `TOP + 1` levels from the lowest value to the highest. If the lowest is below the range of f16, they start at the highest
/// value and go down.
#[inline(always)]
fn affine<const TOP: u8>(values: &[f32; 32]) -> (f16, f16, [u8; 32]) {
    let top = f32::from(TOP);
    // `top - 1`, so that the range from the lowest f16 to this limit fits `top` steps of an f16 scale.
    let values = bounded(values, (top - 1.0) * F16_MAX);
    let low = values.iter().copied().fold(f32::INFINITY, |low, value| if value < low { value } else { low });
    let high = values.iter().copied().fold(f32::NEG_INFINITY, |high, value| if value > high { value } else { high });
    let (first, last) = if low < -F16_MAX && high.abs() < low.abs() { (high, low) } else { (low, high) };
    let first = first.clamp(-F16_MAX, F16_MAX);
    let scale = (last - first) / top;
    let inverse = inverse(scale);
    let level = |value: f32| (((value - first) * inverse + 0.5) as i32).clamp(0, i32::from(TOP)) as u8;
    (f16::from_f32(scale), f16::from_f32(first), values.map(level))
}

/// Packs the low nibbles of the first 16 weights in the low halves of the bytes, those of the other 16 in the high halves.
#[inline(always)]
fn low_nibbles(quants: &[u8; 32], out: &mut [u8]) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = quants[i] & 15 | quants[i + 16] << 4;
    }
}

/// Bit `k` of the 32 is the fifth bit of weight `k`.
#[inline(always)]
fn fifth_bits(quants: &[u8; 32], out: &mut [u8]) {
    for (out, quants) in out.iter_mut().zip(quants.as_chunks::<8>().0) {
        *out = quants.iter().enumerate().fold(0, |bits, (i, quant)| bits | (quant >> 4) << i);
    }
}

#[inline(always)]
fn q2_k(values: &[f32; 256], out: &mut [u8; 84]) {
    let block = superblock_fit::affine::<3, 15, 16, 16>(&bounded(values, Q2_K_LIMIT));
    let mut quants = [0; 256];
    for (element, levels) in block.quants.iter().enumerate() {
        for (group, level) in levels.iter().enumerate() {
            quants[16 * group + element] = *level;
        }
    }
    for (out, (scale, min)) in out[..16].iter_mut().zip(block.scales.iter().zip(block.mins)) {
        *out = scale | min << 4;
    }
    pairs_of_bits(&quants, &mut out[16..80]);
    out[80..82].copy_from_slice(&block.d.to_le_bytes());
    out[82..].copy_from_slice(&block.dmin.to_le_bytes());
}

#[inline(always)]
fn q3_k(values: &[f32; 256], out: &mut [u8; 110]) {
    let Symmetric { quants, scales, d } = superblock_fit::symmetric::<4, 32>(&bounded(values, SUPERBLOCK_LIMIT));
    for (i, out) in out[..32].iter_mut().enumerate() {
        *out = (0..8).fold(0, |bits, run| bits | (quants[32 * run + i] >> 2) << run);
    }
    pairs_of_bits(&quants.map(|quant| quant & 3), &mut out[32..96]);
    // In the layout that `block::q3_k` reads.
    let scales = scales.map(|scale| (scale + 32) as u8);
    for i in 0..8 {
        out[96 + i] = scales[i] & 15 | scales[8 + i] << 4;
    }
    for i in 0..4 {
        out[104 + i] = scales[i] >> 4 | scales[4 + i] >> 4 << 2 | scales[8 + i] >> 4 << 4 | scales[12 + i] >> 4 << 6;
    }
    out[108..].copy_from_slice(&d.to_le_bytes());
}

/// In each half of 128 weights, 32 bytes hold four runs of 32, lowest bits first.
#[inline(always)]
fn pairs_of_bits(quants: &[u8; 256], out: &mut [u8]) {
    for (out, half) in out.chunks_exact_mut(32).zip(quants.as_chunks::<128>().0) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = half[i] | half[32 + i] << 2 | half[64 + i] << 4 | half[96 + i] << 6;
        }
    }
}

#[inline(always)]
fn q4_k(values: &[f32; 256], out: &mut [u8; 144]) {
    let block = superblock_fit::affine::<15, 63, 32, 8>(&bounded(values, SUPERBLOCK_LIMIT));
    affine_header(&block, &mut out[..16]);
    nibbles_of_groups(&block, &mut out[16..]);
}

#[inline(always)]
fn q5_k(values: &[f32; 256], out: &mut [u8; 176]) {
    let block = superblock_fit::affine::<31, 63, 32, 8>(&bounded(values, SUPERBLOCK_LIMIT));
    affine_header(&block, &mut out[..16]);
    for (out, quants) in out[16..48].iter_mut().zip(&block.quants) {
        let mut bits = 0;
        for (group, quant) in quants.iter().enumerate() {
            bits |= (quant >> 4) << group;
        }
        *out = bits;
    }
    nibbles_of_groups(&block, &mut out[48..]);
}

#[inline(always)]
fn q6_k(values: &[f32; 256], out: &mut [u8; 210]) {
    let Symmetric { quants, scales, d } = superblock_fit::symmetric::<32, 128>(&bounded(values, SUPERBLOCK_LIMIT));
    for half in 0..2 {
        let quants = &quants[128 * half..][..128];
        let (low, high) = (64 * half, 128 + 32 * half);
        for i in 0..64 {
            out[low + i] = quants[i] & 15 | quants[64 + i] << 4;
        }
        for i in 0..32 {
            out[high + i] =
                quants[i] >> 4 | quants[32 + i] >> 4 << 2 | quants[64 + i] >> 4 << 4 | quants[96 + i] >> 4 << 6;
        }
    }
    for (out, scale) in out[192..208].iter_mut().zip(scales) {
        *out = scale as u8;
    }
    out[208..].copy_from_slice(&d.to_le_bytes());
}

/// `d`, `dmin`, then the 6-bit scales and mins in the layout that `block::six_bit_pairs` reads.
#[inline(always)]
fn affine_header(block: &Affine<32, 8>, out: &mut [u8]) {
    out[..2].copy_from_slice(&block.d.to_le_bytes());
    out[2..4].copy_from_slice(&block.dmin.to_le_bytes());
    let (scales, mins) = (&block.scales, &block.mins);
    for i in 0..4 {
        out[4 + i] = scales[i] | scales[4 + i] >> 4 << 6;
        out[8 + i] = mins[i] | mins[4 + i] >> 4 << 6;
        out[12 + i] = scales[4 + i] & 15 | mins[4 + i] << 4;
    }
}

/// Each pair of groups shares bytes: the first is in the low nibbles and the second in the high nibbles.
#[inline(always)]
fn nibbles_of_groups(block: &Affine<32, 8>, out: &mut [u8]) {
    for (pair, out) in out.chunks_exact_mut(32).enumerate() {
        for (out, quants) in out.iter_mut().zip(&block.quants) {
            *out = quants[2 * pair] & 15 | quants[2 * pair + 1] << 4;
        }
    }
}

/// Replaces NaN with 0 and clamps everything else to `-limit..=limit`.
#[inline(always)]
fn bounded<const LEN: usize>(values: &[f32; LEN], limit: f32) -> [f32; LEN] {
    let mut bounded = *values;
    for value in &mut bounded {
        *value = if value.is_nan() { 0.0 } else { value.clamp(-limit, limit) };
    }
    bounded
}

/// The largest absolute value. It is computed in lanes, because a maximum does not depend on the order.
#[inline(always)]
fn magnitude(values: &[f32; 32]) -> f32 {
    let mut lanes = [0.0f32; 8];
    for values in values.as_chunks::<8>().0 {
        for (lane, value) in lanes.iter_mut().zip(values) {
            let value = value.abs();
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.into_iter().fold(0.0, f32::max)
}

/// `1 / scale`, or 0 if that is not finite: then the scale is far below the smallest f16, and all weights become zero.
#[inline(always)]
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Rounds to the nearest integer, halves away from zero. The addend is the largest f32 below 0.5, because adding 0.5 would
/// round 0.49999997 to 1.
#[inline(always)]
fn away_from_zero(value: f32) -> i32 {
    (value + f32::copysign(0.499_999_97, value)) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wider_vectors_write_the_same_bytes() {
        let values: Vec<f32> = (0..4096u32)
            .map(|i| {
                let bits = i.wrapping_mul(0x9e37_79b9);
                (bits >> 8) as f32 / 8_388_608.0 - 1.0 + f32::from(bits.is_multiple_of(61)) * 5.0
            })
            .collect();
        for dtype in DType::ALL.into_iter().filter(|dtype| can_quantise(*dtype)) {
            let mut dispatched = vec![0; dtype.row_bytes(values.len()).unwrap()];
            let mut portable = dispatched.clone();
            quantise(dtype, &values, &mut dispatched);
            each_block(dtype, &values, &mut portable);
            assert!(dispatched == portable, "{dtype}");
        }
    }
}
