//! Quantised weights in plain Rust: the reference for the vector and tile kernels.

use std::ops::Range;

use half::f16;

use super::super::activations::{BLOCK, TILE};
use super::super::matrix::{Bits, Blocks, Format, GROUP, MatrixSegment, PANEL, SUPER, SuperScales, stored, sub_scale};
use super::{Inputs, Output};

pub(super) fn panels(segment: &MatrixSegment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    for panel in panels {
        for row in 0..inputs.rows {
            let values: [f32; PANEL] = std::array::from_fn(|feature| match segment.format {
                Format::Group { bits, offset, mins } => {
                    let parts = row * inputs.group.parts..(row + 1) * inputs.group.parts;
                    let part = |part| group(segment, panel, feature, part, inputs, bits, offset, mins);
                    parts.map(part).reduce(|sum, next| sum + next).expect("a row has parts")
                }
                Format::Super { bits, offset, subs, mins } => {
                    let parts = row * inputs.superblock.parts..(row + 1) * inputs.superblock.parts;
                    let part = |part| superblock(segment, panel, feature, part, inputs, bits, offset, subs, mins);
                    parts.map(part).reduce(|sum, next| sum + next).expect("a row has parts")
                }
                _ => unreachable!("`dense` handles float formats"),
            });
            // SAFETY: only this caller writes these panels of `out`.
            unsafe { out.put(row, panel, segment.rows, &values) };
        }
    }
}

fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

#[allow(clippy::too_many_arguments)]
fn group(
    segment: &MatrixSegment,
    panel: usize,
    feature: usize,
    row: usize,
    inputs: &Inputs<'_>,
    bits: Bits,
    offset: i32,
    mins: bool,
) -> f32 {
    let (panel, blocks) = (segment.panel(panel), Blocks::groups(bits as usize, mins));
    let acts = inputs.group;
    let mut sum = 0f32;
    for index in 0..segment.cols / GROUP {
        let at = acts.at(index, row);
        let record = &panel[blocks.weights(index)..];
        let integer: i32 = (0..GROUP)
            .map(|k| (stored(bits, record, feature, k) - offset) * i32::from(acts.values[at * GROUP + k]))
            .sum();
        let scales = &panel[blocks.scales(index)..];
        sum = (integer as f32 * acts.scales[at]).mul_add(half(scales, feature * 2), sum);
        if mins {
            sum = acts.weighted[at].mul_add(half(scales, 32 + feature * 2), sum);
        }
    }
    sum
}

#[allow(clippy::too_many_arguments)]
fn superblock(
    segment: &MatrixSegment,
    panel: usize,
    feature: usize,
    row: usize,
    inputs: &Inputs<'_>,
    bits: Bits,
    offset: i32,
    subs: usize,
    mins: bool,
) -> f32 {
    let (panel, blocks) = (segment.panel(panel), Blocks::superblocks(bits as usize, subs, mins));
    let (acts, tile, lane) = (inputs.superblock, row / TILE, row % TILE);
    let depth = SUPER / subs;
    let mut sum = 0f32;
    for index in 0..segment.cols / SUPER {
        let at = index * acts.tiles + tile;
        let (records, scales) = (&panel[blocks.weights(index)..], &panel[blocks.scales(index)..]);
        let (mut integer, mut minimum) = (0, 0);
        for k in 0..SUPER {
            let (scale, _) = sub_scale(scales, subs, mins, k / depth, feature);
            let record = &records[k / GROUP * bits.record()..];
            let value = acts.values[at * BLOCK + k / 64 * 64 * TILE + lane * 64 + k % 64];
            integer += scale * (stored(bits, record, feature, k % GROUP) - offset) * i32::from(value);
        }
        for sub in 0..16 {
            let (_, min) = sub_scale(scales, subs, mins, sub * subs / 16, feature);
            minimum += min * i32::from(acts.sums[(at * TILE + lane) * 16 + sub]);
        }
        let halves = &scales[SuperScales::integers(subs, mins)..];
        let scale = acts.scales[at * TILE + lane];
        sum = (half(halves, feature * 2) * scale).mul_add(integer as f32, sum);
        if mins {
            sum = (-(half(halves, 32 + feature * 2) * scale)).mul_add(minimum as f32, sum);
        }
    }
    sum
}
