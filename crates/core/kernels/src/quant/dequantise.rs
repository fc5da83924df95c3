//! Dequantises stored bytes to f32 weights.
//!
//! The order of the multiplications matters: results agree with the reference (PyPI's `gguf`) bit for bit.

use half::f16;
use half::slice::HalfFloatSliceExt;
use types::DType;

use super::block::{decode_block32, superblock, zero_point};

/// Dequantises `bytes` to `out`, which must have exactly as many elements as `bytes` hold.
pub fn dequantise(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(bytes.len()), "bytes of {} {dtype} weights", out.len());
    match dtype {
        DType::F32 => from_f32(bytes, out),
        DType::F16 => from_f16(bytes, out),
        DType::BF16 => from_bf16(bytes, out),
        DType::Q4_0 => each_block(dtype, bytes, out, |block, out| symmetric(DType::Q4_0, block, out)),
        DType::Q5_0 => each_block(dtype, bytes, out, |block, out| symmetric(DType::Q5_0, block, out)),
        DType::Q8_0 => each_block(dtype, bytes, out, |block, out| symmetric(DType::Q8_0, block, out)),
        DType::Q4_1 => each_block(dtype, bytes, out, |block, out| affine(DType::Q4_1, block, out)),
        DType::Q5_1 => each_block(dtype, bytes, out, |block, out| affine(DType::Q5_1, block, out)),
        DType::Q3_K => each_block(dtype, bytes, out, |block, out| centred_super(DType::Q3_K, block, out)),
        DType::Q6_K => each_block(dtype, bytes, out, |block, out| centred_super(DType::Q6_K, block, out)),
        DType::Q2_K => each_block(dtype, bytes, out, |block, out| shifted_super(DType::Q2_K, block, out)),
        DType::Q4_K => each_block(dtype, bytes, out, |block, out| shifted_super(DType::Q4_K, block, out)),
        DType::Q5_K => each_block(dtype, bytes, out, |block, out| shifted_super(DType::Q5_K, block, out)),
    }
}

#[inline(always)]
fn each_block(dtype: DType, bytes: &[u8], out: &mut [f32], block: impl Fn(&[u8], &mut [f32])) {
    for (bytes, out) in bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(dtype.block_elements())) {
        block(bytes, out);
    }
}

fn from_f32(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = f32::from_le_bytes(*bytes);
    }
}

fn from_f16(bytes: &[u8], out: &mut [f32]) {
    // Copied to a small aligned buffer first, because the conversion works on eight f16 at a time.
    const RUN: usize = 64;
    let mut halves = [f16::ZERO; RUN];
    for (out, bytes) in out.chunks_mut(RUN).zip(bytes.chunks(2 * RUN)) {
        let halves = &mut halves[..out.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        halves.convert_to_f32_slice(out);
    }
}

fn from_bf16(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

/// `scale * (q - zero_point)`.
#[inline(always)]
fn symmetric(dtype: DType, block: &[u8], out: &mut [f32]) {
    let group = decode_block32(dtype, block);
    let (scale, zero) = (group.scale.to_f32(), zero_point(dtype) as i8);
    for (out, quant) in out.iter_mut().zip(group.quants) {
        *out = scale * f32::from(quant - zero);
    }
}

/// `scale * q + min`.
#[inline(always)]
fn affine(dtype: DType, block: &[u8], out: &mut [f32]) {
    let group = decode_block32(dtype, block);
    let (scale, min) = (group.scale.to_f32(), group.min.to_f32());
    for (out, quant) in out.iter_mut().zip(group.quants) {
        *out = scale * f32::from(quant) + min;
    }
}

/// `(d * scale) * (q - zero_point)`, in groups of 16.
#[inline(always)]
fn centred_super(dtype: DType, block: &[u8], out: &mut [f32]) {
    let block = superblock(dtype, block);
    let (d, zero) = (block.d.to_f32(), zero_point(dtype) as i8);
    for ((out, quants), scale) in out.chunks_exact_mut(16).zip(block.quants.chunks_exact(16)).zip(block.scales) {
        let scale = d * f32::from(scale);
        for (out, quant) in out.iter_mut().zip(quants) {
            *out = scale * f32::from(*quant as i8 - zero);
        }
    }
}

/// `(d * scale) * q - dmin * min`, in groups of 16 or 32.
#[inline(always)]
fn shifted_super(dtype: DType, block: &[u8], out: &mut [f32]) {
    let block = superblock(dtype, block);
    let (d, dmin) = (block.d.to_f32(), block.dmin.to_f32());
    let group = if matches!(dtype, DType::Q2_K) { 16 } else { 32 };
    let scales = block.scales.iter().zip(block.mins);
    for ((out, quants), (scale, min)) in out.chunks_exact_mut(group).zip(block.quants.chunks_exact(group)).zip(scales) {
        let (scale, min) = (d * f32::from(*scale), dmin * f32::from(min));
        for (out, quant) in out.iter_mut().zip(quants) {
            *out = scale * f32::from(*quant) - min;
        }
    }
}
