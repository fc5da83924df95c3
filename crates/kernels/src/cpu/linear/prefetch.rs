//! Asking for weights before they are multiplied, for few rows: then the time is that of their arrival.

use std::arch::x86_64::*;

use super::super::matrix::{LINE, Panels, Segment};

/// How far ahead of its use a line of weights is asked for.
const AHEAD: usize = 2048;

/// Asks for weights ahead of their use, in `P` panels that are walked together: first for more of them, then for those that are
/// walked next. Without the latter every panel would start cold.
pub(super) struct Prefetch<const P: usize> {
    here: [*const u8; P],
    /// So that what lies one `stride` on in a panel here is the beginning of one there.
    next: [*const u8; P],
    stride: usize,
}

impl<const P: usize> Prefetch<P> {
    pub(super) fn new(segment: &Segment, here: [*const u8; P], next: Option<Panels>) -> Self {
        let stride = segment.stride;
        let next = match next {
            Some(next) => std::array::from_fn(|p| {
                std::ptr::without_provenance(next.start.wrapping_add(p.wrapping_mul(next.stride)).wrapping_sub(stride))
            }),
            None => here.map(|panel| panel.wrapping_add((P - 1) * stride)),
        };
        Self { here, next, stride }
    }

    /// Asks for what lies [`AHEAD`] of `at` in one of the panels.
    #[inline(always)]
    pub(super) fn ask(&self, panel: usize, at: usize) {
        let ahead = at + AHEAD;
        let panels = if ahead < self.stride { &self.here } else { &self.next };
        // SAFETY: a prefetch reads nothing and may point anywhere; SSE is part of the architecture.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(panels[panel].wrapping_add(ahead).cast()) };
    }
}

/// The four panels after those that are walked one or two at a time: as memory delivers four slow streams faster than one, they
/// are asked for in turn, line by line, while these are multiplied.
pub(super) struct Ahead {
    quarter: *const u8,
    stride: usize,
}

impl Ahead {
    /// A panel is walked, in a range that begins at `first`.
    pub(super) fn new(segment: &Segment, first: usize, panel: usize) -> Self {
        let turn = (panel - first) % 4;
        // Instead of what comes after the last panels, what is at hand.
        let next = if panel - turn + 4 < segment.panels() { panel - turn + 4 } else { first };
        let at = next * segment.stride + segment.stride / LINE * turn / 4 * LINE;
        Self { quarter: segment.bytes.as_ptr().wrapping_add(at), stride: segment.stride }
    }

    /// What is due while `P` panels are walked over a group that begins at `at` and has so many bytes.
    #[inline(always)]
    pub(super) fn step<const P: usize>(&self, at: usize, bytes: usize) {
        let lines = self.quarter.wrapping_add(at * P / 4 / LINE * LINE);
        for line in 0..(bytes * P).div_ceil(4 * LINE) {
            for panel in 0..4 {
                let at = panel * self.stride + line * LINE;
                // SAFETY: a prefetch reads nothing and may point anywhere; SSE is part of the architecture.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(lines.wrapping_add(at).cast()) };
            }
        }
    }
}
