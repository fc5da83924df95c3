//! Decodes one stored block into integers and scales, in the order of the weights.
//!
//! Formats split the bits of an integer between planes (low nibbles, high bits) and interleave groups; only this file knows
//! how. `dequantise.rs` and the kernels compute with the integers.

use half::f16;
use types::DType;

/// A block of 32 weights with one scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block32 {
    /// In the order of the weights. Q4 and Q5: unsigned, `0..16` and `0..32`, before [`zero_point`] is subtracted. Q8_0:
    /// signed.
    pub quants: [i8; 32],
    pub scale: f16,
    /// Added to `scale * q` in Q4_1 and Q5_1; zero in the other formats.
    pub min: f16,
}

/// A block of 256 weights in 16 groups of 16 (Q2_K, Q3_K, Q6_K) or 8 groups of 32 (Q4_K, Q5_K), with small integer
/// scales for the groups and one f16 scale for these.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Superblock {
    /// In the order of the weights, unsigned, before [`zero_point`] is subtracted.
    pub quants: [u8; 256],
    /// One per group. In Q3_K after the offset is subtracted: `-32..32`. Q4_K and Q5_K use eight; the others are zero.
    pub scales: [i8; 16],
    /// One per group; zero in Q3_K and Q6_K.
    pub mins: [u8; 16],
    pub d: f16,
    /// Scale of `mins`; `dmin * min` is subtracted. Zero in Q3_K and Q6_K.
    pub dmin: f16,
}

/// The stored integer of a zero weight.
pub const fn zero_point(dtype: DType) -> u8 {
    match dtype {
        DType::Q4_0 => 8,
        DType::Q5_0 => 16,
        DType::Q3_K => 4,
        DType::Q6_K => 32,
        _ => 0,
    }
}

/// Decodes a block of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0.
#[inline]
pub fn decode_block32(dtype: DType, block: &[u8]) -> Block32 {
    assert_eq!(block.len(), dtype.block_bytes(), "bytes of a {dtype} block");
    let zero = f16::ZERO;
    match dtype {
        DType::Q4_0 => Block32 { quants: nibbles(part(block, 2)), scale: half(block, 0), min: zero },
        DType::Q4_1 => Block32 { quants: nibbles(part(block, 4)), scale: half(block, 0), min: half(block, 2) },
        DType::Q5_0 => {
            let quants = with_fifth_bits(nibbles(part(block, 6)), part(block, 2));
            Block32 { quants, scale: half(block, 0), min: zero }
        }
        DType::Q5_1 => {
            let quants = with_fifth_bits(nibbles(part(block, 8)), part(block, 4));
            Block32 { quants, scale: half(block, 0), min: half(block, 2) }
        }
        DType::Q8_0 => {
            let quants = part::<32>(block, 2).map(|byte| byte as i8);
            Block32 { quants, scale: half(block, 0), min: zero }
        }
        _ => panic!("{dtype} is not a format of 32-weight blocks"),
    }
}

/// Decodes a block of Q2_K, Q3_K, Q4_K, Q5_K or Q6_K.
#[inline]
pub fn superblock(dtype: DType, block: &[u8]) -> Superblock {
    assert_eq!(block.len(), dtype.block_bytes(), "bytes of a {dtype} block");
    match dtype {
        DType::Q2_K => q2_k(block),
        DType::Q3_K => q3_k(block),
        DType::Q4_K => q4_k(block),
        DType::Q5_K => q5_k(block),
        DType::Q6_K => q6_k(block),
        _ => panic!("{dtype} is not a format of 256-weight blocks"),
    }
}

/// `scales[16]` (scale in the low nibble, min in the high), `quants[64]`, `d`, `dmin`.
#[inline]
fn q2_k(block: &[u8]) -> Superblock {
    let packed = part::<16>(block, 0);
    Superblock {
        quants: pairs(part(block, 16)),
        scales: packed.map(|byte| (byte & 15) as i8),
        mins: packed.map(|byte| byte >> 4),
        d: half(block, 80),
        dmin: half(block, 82),
    }
}

/// `third bits[32]`, `low bits[64]`, `scales[12]`, `d`.
#[inline]
fn q3_k(block: &[u8]) -> Superblock {
    let mut quants = pairs(part(block, 32));
    add_bit_plane(&mut quants, part(block, 0), 2);
    // A 6-bit scale has its low nibble in the first eight bytes, and its two high bits in the last four.
    let packed = part::<12>(block, 96);
    let mut scales = [0; 16];
    for (group, scale) in scales.iter_mut().enumerate() {
        let low = (packed[group % 8] >> (4 * (group / 8))) & 15;
        let high = (packed[8 + group % 4] >> (2 * (group / 4))) & 3;
        *scale = (low | high << 4) as i8 - 32;
    }
    Superblock { quants, scales, mins: [0; 16], d: half(block, 108), dmin: f16::ZERO }
}

/// `d`, `dmin`, `scales and mins[12]`, `quants[128]`.
#[inline]
fn q4_k(block: &[u8]) -> Superblock {
    let (scales, mins) = six_bit_pairs(part(block, 4));
    Superblock { quants: nibbles_of_groups(part(block, 16)), scales, mins, d: half(block, 0), dmin: half(block, 2) }
}

/// `d`, `dmin`, `scales and mins[12]`, `fifth bits[32]`, `low nibbles[128]`.
#[inline]
fn q5_k(block: &[u8]) -> Superblock {
    let (scales, mins) = six_bit_pairs(part(block, 4));
    let mut quants = nibbles_of_groups(part(block, 48));
    add_bit_plane(&mut quants, part(block, 16), 4);
    Superblock { quants, scales, mins, d: half(block, 0), dmin: half(block, 2) }
}

/// `low nibbles[128]`, `high pairs of bits[64]`, `scales[16]`, `d`.
#[inline]
fn q6_k(block: &[u8]) -> Superblock {
    let low = part::<128>(block, 0);
    let mut quants = pairs(part(block, 128));
    // Each half of 128 weights: 64 bytes hold weights 0..64 in their low nibbles and 64..128 in their high.
    for (half, low) in quants.chunks_exact_mut(128).zip(low.chunks_exact(64)) {
        let (first, second) = half.split_at_mut(64);
        for ((first, second), low) in first.iter_mut().zip(second).zip(low) {
            *first = *first << 4 | low & 15;
            *second = *second << 4 | low >> 4;
        }
    }
    let scales = part::<16>(block, 192).map(|byte| byte as i8);
    Superblock { quants, scales, mins: [0; 16], d: half(block, 208), dmin: f16::ZERO }
}

/// The first 16 weights are the low nibbles, the other 16 the high nibbles.
#[inline]
fn nibbles(packed: &[u8; 16]) -> [i8; 32] {
    let mut quants = [0; 32];
    let (low, high) = quants.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(packed) {
        *low = (byte & 15) as i8;
        *high = (byte >> 4) as i8;
    }
    quants
}

/// Bit `k` of the 32 is the fifth bit of weight `k`.
#[inline]
fn with_fifth_bits(mut quants: [i8; 32], bits: &[u8; 4]) -> [i8; 32] {
    const MASKS: [u8; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
    for (quants, byte) in quants.chunks_exact_mut(8).zip(bits) {
        for (quant, mask) in quants.iter_mut().zip(MASKS) {
            *quant |= if byte & mask == 0 { 0 } else { 16 };
        }
    }
    quants
}

/// Pairs of groups of 32: 32 bytes hold one in their low nibbles and the next in their high.
#[inline]
fn nibbles_of_groups(packed: &[u8; 128]) -> [u8; 256] {
    let mut quants = [0; 256];
    for (quants, packed) in quants.chunks_exact_mut(64).zip(packed.chunks_exact(32)) {
        let (low, high) = quants.split_at_mut(32);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(packed) {
            *low = byte & 15;
            *high = byte >> 4;
        }
    }
    quants
}

/// Pairs of bits: in each half of 128 weights, 32 bytes hold four runs of 32, lowest bits first.
#[inline]
fn pairs(packed: &[u8; 64]) -> [u8; 256] {
    let mut quants = [0; 256];
    for (half, packed) in quants.chunks_exact_mut(128).zip(packed.chunks_exact(32)) {
        for (run, quants) in half.chunks_exact_mut(32).enumerate() {
            for (quant, byte) in quants.iter_mut().zip(packed) {
                *quant = byte >> (2 * run) & 3;
            }
        }
    }
    quants
}

/// Single bits: bit `r` of byte `i` belongs to weight `32 r + i`, and becomes its bit `position`.
#[inline]
fn add_bit_plane(quants: &mut [u8; 256], bits: &[u8; 32], position: usize) {
    for (run, quants) in quants.chunks_exact_mut(32).enumerate() {
        for (quant, byte) in quants.iter_mut().zip(bits) {
            *quant |= (byte >> run & 1) << position;
        }
    }
}

/// Eight 6-bit scales and eight 6-bit mins in twelve bytes. The first four of each are in the low six bits of bytes 0..4
/// and 4..8. The other four have their low nibbles in bytes 8..12, and their high bits above the first four.
#[inline]
fn six_bit_pairs(packed: &[u8; 12]) -> ([i8; 16], [u8; 16]) {
    let (mut scales, mut mins) = ([0; 16], [0; 16]);
    for group in 0..4 {
        let (scale, min, low) = (packed[group], packed[4 + group], packed[8 + group]);
        scales[group] = (scale & 63) as i8;
        mins[group] = min & 63;
        scales[4 + group] = (low & 15 | scale >> 6 << 4) as i8;
        mins[4 + group] = low >> 4 | min >> 6 << 4;
    }
    (scales, mins)
}

#[inline]
fn part<const LEN: usize>(block: &[u8], start: usize) -> &[u8; LEN] {
    block[start..].first_chunk().expect("the block's length was checked")
}

#[inline]
fn half(block: &[u8], start: usize) -> f16 {
    f16::from_le_bytes(*part(block, start))
}
