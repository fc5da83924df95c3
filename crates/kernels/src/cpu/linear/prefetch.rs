//! Asking for weights before they are multiplied, for few rows: then the time is that of their arrival.

use std::arch::x86_64::*;

use super::super::matrix::{LINE, Segment};

/// How far ahead of its use a line of weights is asked for.
const AHEAD: usize = 2048;

/// Asks for weights [`AHEAD`] of `at` in a panel of which `panels` are walked together. Beyond the end of their weights the
/// next panels begin: without this every panel would start cold.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn prefetch(segment: &Segment, panels: usize, weights: *const u8, at: usize) {
    let mut ahead = at + AHEAD;
    if ahead >= segment.scales_at {
        ahead += panels * segment.stride - segment.scales_at;
    }
    _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(ahead).cast());
}

/// The same for scales, `at` bytes into those of a panel.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) fn prefetch_scales(segment: &Segment, panels: usize, weights: *const u8, at: usize) {
    const AHEAD: usize = 512;
    let mut ahead = segment.scales_at + at + AHEAD;
    if ahead >= segment.stride {
        ahead += (panels - 1) * segment.stride + segment.scales_at;
    }
    _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(ahead).cast());
}

/// The four panels after those that are walked one or two at a time: as memory delivers four slow streams faster than one, they
/// are asked for in turn, line by line, while these are multiplied.
pub(super) struct Ahead {
    lines: *const u8,
    scales: *const u8,
    stride: usize,
}

impl Ahead {
    /// A panel is walked, in a range that begins at `first`.
    pub(super) fn new(segment: &Segment, first: usize, panel: usize) -> Self {
        let turn = (panel - first) % 4;
        // Instead of what comes after the last panels, what is at hand.
        let next = if panel - turn + 4 < segment.panels() { panel - turn + 4 } else { first };
        let next = segment.bytes.as_ptr().wrapping_add(next * segment.stride);
        let lines = next.wrapping_add(segment.scales_at / LINE * turn / 4 * LINE);
        let scales = next.wrapping_add(segment.scales_at + (segment.stride - segment.scales_at) / 4 * turn);
        Self { lines, scales, stride: segment.stride }
    }

    /// What is due while `P` panels are walked over group `g`.
    #[inline(always)]
    pub(super) fn step<const BITS: usize, const P: usize>(&self, g: usize, scale_bytes: usize) {
        let lines = self.lines.wrapping_add(g * BITS * P / 4 * LINE);
        let scales = self.scales.wrapping_add(g * scale_bytes * P / 4);
        for line in 0..(BITS * P).div_ceil(4) {
            for panel in 0..4 {
                let at = panel * self.stride + line * LINE;
                // SAFETY: a prefetch reads nothing and may point anywhere; SSE is part of the architecture.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(lines.wrapping_add(at).cast()) };
            }
        }
        for panel in 0..4 {
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(scales.wrapping_add(panel * self.stride).cast()) };
        }
    }
}
