//! Software prefetching of weights for few rows, where the kernels are memory-bound.

use std::arch::x86_64::*;

use super::super::matrix::{LINE, MatrixSegment, Panels};

/// Bytes between the line in use and the line that is prefetched.
const AHEAD: usize = 2048;

/// Prefetches weights of `P` panels that are read together: first the rest of these panels, then the start of the panels
/// that are read next, so that those do not start with cache misses.
pub(super) struct Prefetch<const P: usize> {
    here: [*const u8; P],
    /// The starts of the next panels minus `stride`: offset `stride` in a current panel is the start of a next one.
    next: [*const u8; P],
    stride: usize,
}

impl<const P: usize> Prefetch<P> {
    pub(super) fn new(segment: &MatrixSegment, here: [*const u8; P], next: Option<Panels>) -> Self {
        let stride = segment.stride;
        let next = match next {
            Some(next) => std::array::from_fn(|p| {
                std::ptr::without_provenance(next.start.wrapping_add(p.wrapping_mul(next.stride)).wrapping_sub(stride))
            }),
            None => here.map(|panel| panel.wrapping_add((P - 1) * stride)),
        };
        Self { here, next, stride }
    }

    /// Prefetches the line [`AHEAD`] bytes after `at` in one of the panels.
    #[inline(always)]
    pub(super) fn prefetch(&self, panel: usize, at: usize) {
        let ahead = at + AHEAD;
        let panels = if ahead < self.stride { &self.here } else { &self.next };
        // SAFETY: a prefetch reads nothing and may point anywhere; SSE is part of the architecture.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(panels[panel].wrapping_add(ahead).cast()) };
    }
}

/// Prefetches the next four panels while the current panels are processed one or two at a time. It takes lines from all
/// four in turn, because memory delivers four slow streams faster than one.
pub(super) struct PanelPrefetcher {
    quarter: *const u8,
    stride: usize,
}

impl PanelPrefetcher {
    /// For the time while `panel` is processed, in a range of panels that starts at `first`.
    pub(super) fn new(segment: &MatrixSegment, first: usize, panel: usize) -> Self {
        let turn = (panel - first) % 4;
        // After the last panels, prefetch panels that are already in the cache.
        let next = if panel - turn + 4 < segment.panels() { panel - turn + 4 } else { first };
        let at = next * segment.stride + segment.stride / LINE * turn / 4 * LINE;
        Self { quarter: segment.bytes.as_ptr().wrapping_add(at), stride: segment.stride }
    }

    /// Issues the prefetches for one group of `P` current panels: the group starts at `at` and has `bytes` bytes.
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
