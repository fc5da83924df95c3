//! One row by bf16 weights, with vectors: weights arrive faster than through tiles, of which one row would use a sixteenth, and a neighbour on
//! the core's second thread costs less.
//!
//! The sums are those of the tile unit: for each part of the activations, 32 inputs at a time, the products of even and of odd inputs are
//! summed from zero with one rounding each, the two are added, and that is added to the sum. (The unit takes numbers below 2^-126 for
//! zero, which could only be told from a result that is next to nothing itself.)

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use super::super::activations::{BLOCK, SplitActivations, TILE};
use super::super::matrix::{GROUP, GROUPS_PER_SUPER, LINE, Segment};
use super::super::pool::Panels;
use super::avx512::put;
use super::prefetch::Prefetch;
use super::{Inputs, Output, Share};

/// Parts of an activation.
const PARTS: usize = 2;

thread_local! {
    /// The row as f32: `[group][part][32]`. A thread keeps its memory from call to call.
    static ROW: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// # Safety
/// As for [`super::avx512::panels`], and there is one row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &Segment, share: Share, inputs: &Inputs<'_>, out: Output<'_>) {
    ROW.with_borrow_mut(|row| {
        widen(inputs.split, segment.cols.div_ceil(GROUP), row);
        let Range { start: mut panel, end } = share.panels;
        while panel < end {
            let left = end - panel;
            let wide = if left < 4 { 1 } else { 4 };
            let next = share.next.filter(|_| wide == left);
            // SAFETY: passed on; the row has as many groups as the segment.
            unsafe {
                match wide {
                    4 => block::<4>(segment, panel, next, row, out),
                    _ => block::<1>(segment, panel, next, row, out),
                }
            }
            panel += wide;
        }
    });
}

/// The first row of the activations.
fn widen(acts: &SplitActivations<PARTS>, groups: usize, row: &mut Vec<f32>) {
    row.clear();
    for group in 0..groups {
        let block = group / GROUPS_PER_SUPER * acts.tiles * PARTS * BLOCK + group % GROUPS_PER_SUPER * TILE * GROUP;
        for part in 0..PARTS {
            let halves = &acts.values[block + part * BLOCK..][..GROUP];
            row.extend(halves.iter().map(|&half| f32::from_bits(u32::from(half) << 16)));
        }
    }
}

/// `P` panels.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn block<const P: usize>(segment: &Segment, panel: usize, next: Option<Panels>, row: &[f32], out: Output<'_>) {
    let weights: [*const u8; P] = std::array::from_fn(|p| segment.panel(panel + p).as_ptr());
    let prefetch = Prefetch::new(segment, weights, next);
    let odd_half = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    let mut sums = [[_mm512_setzero_ps()]; P];
    for (group, row) in row.chunks_exact(PARTS * GROUP).enumerate() {
        // Of each part, of even and odd inputs.
        let mut products = [[[_mm512_setzero_ps(); P]; 2]; PARTS];
        for pair in 0..GROUP / 2 {
            let at = (group * (GROUP / 2) + pair) * LINE;
            for p in 0..P {
                prefetch.ask(p, at);
                // SAFETY: one of the lines of the panel's groups.
                let both = unsafe { _mm512_loadu_si512(weights[p].add(at).cast()) };
                let halves = [_mm512_slli_epi32::<16>(both), _mm512_and_si512(both, odd_half)];
                for part in 0..PARTS {
                    for half in 0..2 {
                        let x = _mm512_set1_ps(row[part * GROUP + pair * 2 + half]);
                        let weight = _mm512_castsi512_ps(halves[half]);
                        products[part][half][p] = _mm512_fmadd_ps(x, weight, products[part][half][p]);
                    }
                }
            }
        }
        for [evens, odds] in products {
            for p in 0..P {
                sums[p][0] = _mm512_add_ps(sums[p][0], _mm512_add_ps(evens[p], odds[p]));
            }
        }
    }
    // SAFETY: the caller's promise about `out`.
    unsafe { put(segment, panel, 0, 1, out, &sums) };
}
