//! Packs rows in file layout into the panels that the kernels read (see [`super::matrix`]).

use half::f16;
use types::DType;

use super::level::Level;
use super::matrix::{Bits, Blocks, Format, GROUP, LINE, PANEL, SUPER, SuperScales};
use super::packed12::{self, Found};
use crate::MatrixSource;
use crate::quant;

/// Packs panel `panel` of `part` into `out`, which is zeroed.
pub(super) fn panel(part: &MatrixSource<'_>, panel: usize, format: Format, out: &mut [u8], level: Level) {
    let first = panel * PANEL;
    let count = PANEL.min(part.rows - first);
    let mut converted = Vec::new();
    let rows: [&[u8]; PANEL] = if part.keep == part.dtype {
        std::array::from_fn(|feature| if feature < count { part.row(first + feature) } else { &[] })
    } else {
        let row_bytes = part.keep.row_bytes(part.cols).expect("checked: whole blocks");
        converted.resize(count * row_bytes, 0);
        let mut values = vec![0f32; part.cols];
        for (feature, row) in converted.chunks_exact_mut(row_bytes).enumerate() {
            quant::dequantise(part.dtype, part.row(first + feature), &mut values);
            store_row(part.keep, &values, row);
        }
        std::array::from_fn(|feature| converted.get(feature * row_bytes..(feature + 1) * row_bytes).unwrap_or(&[]))
    };
    pack_panel(level, part.keep, format, &rows[..count], out);
}

/// Converts one f32 row to a format: rounds to a float type, or quantises.
fn store_row(keep: DType, values: &[f32], out: &mut [u8]) {
    match keep {
        DType::F32 => {
            for (out, value) in out.chunks_exact_mut(4).zip(values) {
                out.copy_from_slice(&value.to_le_bytes());
            }
        }
        DType::F16 => {
            for (out, value) in out.chunks_exact_mut(2).zip(values) {
                out.copy_from_slice(&f16::from_f32(*value).to_le_bytes());
            }
        }
        DType::BF16 => {
            for (out, value) in out.chunks_exact_mut(2).zip(values) {
                out.copy_from_slice(&half::bf16::from_f32(*value).to_le_bytes());
            }
        }
        _ => quant::quantise(keep, values, out),
    }
}

super::per_level! {
    fn pack_panel(dtype: DType, format: Format, rows: &[&[u8]], out: &mut [u8]) {
        match format {
            Format::F32 => interleave::<4>(rows, out),
            Format::F16 => interleave::<2>(rows, out),
            Format::Bf16 => pairs(rows, out),
            Format::Bf16Packed12 => unreachable!("packed from plain panels"),
            Format::Group { bits, mins, .. } => groups(dtype, bits, mins, rows, out),
            Format::Super { bits, subs, mins, .. } => superblocks(dtype, bits, subs, mins, rows, out),
        }
    }
}

super::per_level! {
    /// Packs a panel of bf16 weights in 12 bits each (see [`super::packed12`]).
    pub(super) fn packed12_panel(plain: &[u8], out: &mut [u8], panel: usize, cols: usize, found: &Found) {
        packed12::pack(plain, out, panel, cols, found);
    }
}

/// `[feature][k]` to `[k][feature]`, elements of `N` bytes.
#[inline(always)]
fn interleave<const N: usize>(rows: &[&[u8]], out: &mut [u8]) {
    for (feature, row) in rows.iter().enumerate() {
        for (value, out) in row.chunks_exact(N).zip(out.chunks_exact_mut(PANEL * N)) {
            out[feature * N..(feature + 1) * N].copy_from_slice(value);
        }
    }
}

/// `[feature][k]` to `[k / 2][feature][2]`, elements of 2 bytes; an odd last element is paired with zero.
#[inline(always)]
fn pairs(rows: &[&[u8]], out: &mut [u8]) {
    for (feature, row) in rows.iter().enumerate() {
        for (pair, out) in row.chunks(4).zip(out.chunks_exact_mut(LINE)) {
            out[feature * 4..feature * 4 + pair.len()].copy_from_slice(pair);
        }
    }
}

#[inline(always)]
fn groups(dtype: DType, bits: Bits, mins: bool, rows: &[&[u8]], out: &mut [u8]) {
    let (block, places) = (dtype.block_bytes(), Blocks::groups(bits as usize, mins));
    for index in 0..rows[0].len() / block {
        let scales = &mut out[places.scales(index)..];
        let mut lines = [[0u8; LINE]; 8];
        for (feature, row) in rows.iter().enumerate() {
            let group = quant::decode_block32(dtype, &row[index * block..(index + 1) * block]);
            scatter(&mut lines, feature, &group.quants.map(|q| q as u8));
            scales[feature * 2..feature * 2 + 2].copy_from_slice(&group.scale.to_le_bytes());
            if mins {
                scales[32 + feature * 2..34 + feature * 2].copy_from_slice(&group.min.to_le_bytes());
            }
        }
        store_record(bits, &lines, &mut out[places.weights(index)..][..bits.record()]);
    }
}

#[inline(always)]
fn superblocks(dtype: DType, bits: Bits, subs: usize, mins: bool, rows: &[&[u8]], out: &mut [u8]) {
    let (block, places) = (dtype.block_bytes(), Blocks::superblocks(bits as usize, subs, mins));
    for index in 0..rows[0].len() / block {
        let mut lines = [[[0u8; LINE]; 8]; SUPER / GROUP];
        let scales = &mut out[places.scales(index)..];
        let (integers, halves) = scales.split_at_mut(SuperScales::integers(subs, mins));
        for (feature, row) in rows.iter().enumerate() {
            let decoded = quant::superblock(dtype, &row[index * block..(index + 1) * block]);
            for (lines, quants) in lines.iter_mut().zip(decoded.quants.chunks_exact(GROUP)) {
                scatter(lines, feature, quants.try_into().expect("a group"));
            }
            for sub in 0..subs {
                let scale = decoded.scales[sub] as u8;
                integers[sub * PANEL + feature] = match (subs, mins) {
                    (16, true) => scale | decoded.mins[sub] << 4,
                    _ => scale,
                };
                if subs == 8 && mins {
                    integers[(8 + sub) * PANEL + feature] = decoded.mins[sub];
                }
            }
            halves[feature * 2..feature * 2 + 2].copy_from_slice(&decoded.d.to_le_bytes());
            if mins {
                halves[32 + feature * 2..34 + feature * 2].copy_from_slice(&decoded.dmin.to_le_bytes());
            }
        }
        let records = &mut out[places.weights(index)..];
        for (record, lines) in records.chunks_exact_mut(bits.record()).zip(&lines) {
            store_record(bits, lines, record);
        }
    }
}

/// Writes a feature's group to its four bytes of every line.
#[inline(always)]
fn scatter(lines: &mut [[u8; LINE]; 8], feature: usize, quants: &[u8; GROUP]) {
    for (line, four) in lines.iter_mut().zip(quants.chunks_exact(4)) {
        line[feature * 4..feature * 4 + 4].copy_from_slice(four);
    }
}

/// Stores eight lines of bytes as the bit planes of their record (see [`Bits`]).
#[inline(always)]
fn store_record(bits: Bits, lines: &[[u8; LINE]; 8], record: &mut [u8]) {
    let nibbles = |out: &mut [u8]| {
        for (r, out) in out.chunks_exact_mut(LINE).enumerate() {
            for i in 0..LINE {
                out[i] = lines[r][i] & 15 | lines[r + 4][i] << 4;
            }
        }
    };
    let pairs = |out: &mut [u8], shift: u32| {
        for (r, out) in out.chunks_exact_mut(LINE).enumerate() {
            for i in 0..LINE {
                let two = |f: usize| lines[4 * r + f][i] >> shift & 3;
                out[i] = two(0) | two(1) << 2 | two(2) << 4 | two(3) << 6;
            }
        }
    };
    let ones = |out: &mut [u8], shift: u32| {
        for (line, out) in lines.iter().zip(out.chunks_exact_mut(8)) {
            for (out, eight) in out.iter_mut().zip(line.chunks_exact(8)) {
                *out = eight.iter().enumerate().fold(0, |byte, (i, q)| byte | (q >> shift & 1) << i);
            }
        }
    };
    match bits {
        Bits::B2 => pairs(record, 0),
        Bits::B3 => {
            pairs(&mut record[..2 * LINE], 0);
            ones(&mut record[2 * LINE..], 2);
        }
        Bits::B4 => nibbles(record),
        Bits::B5 => {
            nibbles(&mut record[..4 * LINE]);
            ones(&mut record[4 * LINE..], 4);
        }
        Bits::B6 => {
            nibbles(&mut record[..4 * LINE]);
            pairs(&mut record[4 * LINE..], 4);
        }
        Bits::B8 => {
            for (out, line) in record.chunks_exact_mut(LINE).zip(lines) {
                out.copy_from_slice(line);
            }
        }
    }
}
