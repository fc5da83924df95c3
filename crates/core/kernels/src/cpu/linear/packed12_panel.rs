//! Unpacks a panel of 12-bit bf16 weights with AVX-512.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::super::matrix::{LINE, MatrixSegment};
use super::super::packed12::{HEAD, HIGHS, PACKED, PLAIN, first};

/// Reads the quarters of a panel one after the other.
pub(super) struct Packed12Panel<'a> {
    start: *const u8,
    /// The table from codes to high bytes, repeated in every 16 bytes.
    table: __m512i,
    /// The index of the panel's first quarter, counted across all panels; the index of the next uncommon quarter; and
    /// pointers to its list entry and its high bytes. Pointers instead of slices, because the call to a bounds-check panic
    /// would make callers spill vector registers.
    first: u32,
    next: u32,
    uncommon: *const u32,
    highs: *const u8,
    _segment: PhantomData<&'a MatrixSegment>,
}

impl<'a> Packed12Panel<'a> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn new(segment: &'a MatrixSegment, panel: usize) -> Self {
        let (start, (uncommon, highs)) = (segment.panel(panel).as_ptr(), segment.uncommon(panel));
        Self {
            start,
            // SAFETY: the panel begins with a line.
            table: unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(start.cast())) },
            first: first(panel, segment.cols) as u32,
            next: uncommon[0],
            uncommon: uncommon.as_ptr(),
            highs: highs.as_ptr(),
            _segment: PhantomData,
        }
    }

    /// The offset of a quarter in a panel.
    pub(super) const fn at(quarter: usize) -> usize {
        HEAD + quarter * PACKED
    }

    /// Unpacks a quarter to `out`. Quarters must be unpacked in order.
    ///
    /// # Safety
    /// The panel has this quarter, and `out` is aligned to lines and has space for the unpacked quarter.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn unpack(&mut self, quarter: usize, out: *mut u8) {
        let at = self.start.wrapping_add(Self::at(quarter));
        // SAFETY: a line of this quarter.
        let line = |index: usize| unsafe { _mm512_loadu_si512(at.wrapping_add(index * LINE).cast()) };
        let highs = if self.first + quarter as u32 == self.next {
            // SAFETY: an uncommon quarter is in the list, has its high bytes, and is followed by another entry or the end
            // marker.
            unsafe {
                let highs = [0, LINE].map(|at| _mm512_loadu_si512(self.highs.add(at).cast()));
                (self.uncommon, self.highs) = (self.uncommon.add(1), self.highs.add(HIGHS));
                self.next = *self.uncommon;
                highs
            }
        } else {
            let (codes, nibble) = (line(0), _mm512_set1_epi8(15));
            [codes, _mm512_srli_epi16::<4>(codes)]
                .map(|codes| _mm512_shuffle_epi8(self.table, _mm512_and_si512(codes, nibble)))
        };
        for half in 0..2 {
            let (low, high) = (line(1 + half), highs[half]);
            // SAFETY: the caller provides the space.
            unsafe {
                let out = out.add(half * PLAIN / 2);
                _mm512_store_si512(out.cast(), _mm512_unpacklo_epi8(low, high));
                _mm512_store_si512(out.add(LINE).cast(), _mm512_unpackhi_epi8(low, high));
            }
        }
    }
}
