//! A panel of short bf16 weights as vectors.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::super::matrix::{LINE, Segment};
use super::super::packed12::{HEAD, HIGHS, PACKED, PLAIN, first};

/// Reads the quarters of a panel one after the other.
pub(super) struct Packed12Panel<'a> {
    start: *const u8,
    /// The high bytes that codes stand for, in every 16 bytes.
    table: __m512i,
    /// The first quarter, counted through all panels, the next uncommon one, where that is listed, and its high bytes. Pointers,
    /// because a check that may call anything would make callers keep vectors in memory.
    first: u32,
    next: u32,
    uncommon: *const u32,
    highs: *const u8,
    _segment: PhantomData<&'a Segment>,
}

impl<'a> Packed12Panel<'a> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn new(segment: &'a Segment, panel: usize) -> Self {
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

    /// Where a quarter lies in a panel.
    pub(super) const fn at(quarter: usize) -> usize {
        HEAD + quarter * PACKED
    }

    /// Unpacks a quarter to `out`; those before it have been unpacked.
    ///
    /// # Safety
    /// The panel has such a quarter, and `out` is the start of as many lines as it has plain.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) unsafe fn unpack(&mut self, quarter: usize, out: *mut u8) {
        let at = self.start.wrapping_add(Self::at(quarter));
        // SAFETY: a line of this quarter.
        let line = |index: usize| unsafe { _mm512_loadu_si512(at.wrapping_add(index * LINE).cast()) };
        let highs = if self.first + quarter as u32 == self.next {
            // SAFETY: an uncommon quarter is listed, has its high bytes, and something is listed after it.
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
            // SAFETY: the caller's room.
            unsafe {
                let out = out.add(half * PLAIN / 2);
                _mm512_store_si512(out.cast(), _mm512_unpacklo_epi8(low, high));
                _mm512_store_si512(out.add(LINE).cast(), _mm512_unpackhi_epi8(low, high));
            }
        }
    }
}
