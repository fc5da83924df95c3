//! Few rows by 12-bit bf16 weights. Weights are unpacked for the tile unit group by group into the first-level cache, and
//! one group is multiplied while the next is unpacked. The order of summation is that of [`super::amx_bf16`].

use std::arch::asm;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{BLOCK, Bf16SplitActivations, TILE};
use super::super::matrix::{GROUP, GROUPS_PER_SUPER, LINE, MatrixSegment, PANEL, Panels};
use super::super::packed12::{PACKED, PLAIN, QUARTERS_PER_GROUP};
use super::super::tiles::{TileConfig, release};
use super::amx::{Lines, tile_store, tile_zero};
use super::amx_bf16::{load, product};
use super::packed12_panel::Packed12Panel;
use super::prefetch::Prefetch;
use super::unpack_bf16::TILE_BYTES;
use super::{Inputs, Output, PanelRange};

/// Parts of an activation.
const PARTS: usize = 2;
/// Panels that are processed together.
const SUMS: usize = 4;

/// # Safety
/// As for [`super::amx_bf16::panels`], and the rows fit in one tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &MatrixSegment, share: PanelRange, inputs: &Inputs<'_>, out: Output<'_>) {
    let (rows, weights) = ((inputs.rows, LINE), (16, LINE));
    // SAFETY: the caller upholds the contract.
    unsafe {
        TileConfig::new([rows, rows, rows, rows, rows, rows, weights, weights]).load();
        let Range { start: mut panel, end } = share.panels;
        while panel < end {
            let left = end - panel;
            let wide = if left < SUMS { 1 } else { SUMS };
            let next = share.next.filter(|_| wide == left);
            match wide {
                SUMS => block::<SUMS>(segment, panel, next, inputs.split, inputs.rows, out),
                _ => block::<1>(segment, panel, next, inputs.split, inputs.rows, out),
            }
            panel += wide;
        }
        release();
    }
}

/// Computes `P` panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn block<const P: usize>(
    segment: &MatrixSegment,
    panel: usize,
    next: Option<Panels>,
    acts: &Bf16SplitActivations<PARTS>,
    rows: usize,
    out: Output<'_>,
) {
    let groups = segment.cols.div_ceil(GROUP);
    let prefetch = Prefetch::<P>::new(segment, std::array::from_fn(|p| segment.panel(panel + p).as_ptr()), next);
    let mut weights: [Packed12Panel<'_>; P] = std::array::from_fn(|p| Packed12Panel::new(segment, panel + p));
    let mut room = MaybeUninit::<[[Lines<{ TILE_BYTES / LINE }>; P]; 2]>::uninit();
    let room: *mut u8 = room.as_mut_ptr().cast();
    // The buffer of a group of one panel. There are two buffers, used alternately.
    let tile = |group: usize, p: usize| room.wrapping_add((group % 2 * P + p) * TILE_BYTES);
    let mut unpack = |group: usize, p: usize| {
        for quarter in 0..QUARTERS_PER_GROUP {
            let index = group * QUARTERS_PER_GROUP + quarter;
            for line in (0..PACKED).step_by(LINE) {
                prefetch.prefetch(p, Packed12Panel::at(index) + line);
            }
            // SAFETY: the panel has this quarter; the buffer has space for a group.
            unsafe { weights[p].unpack(index, tile(group, p).add(quarter * PLAIN)) };
        }
    };
    for p in 0..P {
        unpack(0, p);
    }
    // SAFETY: the tiles are configured for these rows, the activations hold them, and a group is unpacked before it is
    // multiplied; the caller guarantees the contract of `Output::put`.
    unsafe {
        tile_zero();
        for group in 0..groups {
            let block = group / GROUPS_PER_SUPER * acts.tiles * PARTS * BLOCK;
            let high = acts.values.as_ptr().add(block + group % GROUPS_PER_SUPER * TILE * GROUP);
            load!(4, high);
            load!(5, high.add(BLOCK));
            macro_rules! panel {
                ($p:literal, $weights:literal) => {
                    if $p < P {
                        if group + 1 < groups {
                            unpack(group + 1, $p);
                        }
                        load!($weights, tile(group, $p));
                        product!($p, 4, $weights);
                        product!($p, 5, $weights);
                    }
                };
            }
            panel!(0, 6);
            panel!(1, 7);
            panel!(2, 6);
            panel!(3, 7);
        }
        let mut sums = MaybeUninit::<[[[f32; PANEL]; TILE]; SUMS]>::uninit();
        tile_store(sums.as_mut_ptr().cast());
        for p in 0..P {
            for row in 0..rows {
                out.put(row, panel + p, segment.rows, &*sums.as_ptr().cast::<[f32; PANEL]>().add(p * TILE + row));
            }
        }
    }
}
