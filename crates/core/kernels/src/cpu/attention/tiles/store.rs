//! Writes keys and values to their pages.

use std::arch::x86_64::*;

use super::super::PageRows;
use super::vectors::{first_lanes, pair_up, parts, row_parts, transpose};
use super::{PART, STEP, TILE_BYTES, page_numbers};
use crate::{HEAD_DIM_MAX, PAGE_TOKENS};

/// Stores rows of one page and head. The values after the last row are set to zero: masked keys have weight zero, but zero
/// times an infinity or NaN that an earlier sequence left in the page would be NaN.
///
/// # Safety
/// `pages` contains the (page, head) `at`, no other thread accesses it, and the CPU has AVX-512.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(in super::super) unsafe fn write<const PARTS: usize>(rows: &PageRows<'_>, dim: usize, pages: *mut u16, at: usize) {
    let numbers = page_numbers(dim, PARTS);
    let (keys, values) = (pages.wrapping_add(2 * at * numbers), pages.wrapping_add((2 * at + 1) * numbers));
    let mut turned = [0f32; HEAD_DIM_MAX];
    for slot in rows.slot..rows.slot + rows.count {
        let key = rows.key(slot, &mut turned);
        for (step, dims) in key.chunks(STEP).enumerate() {
            let at = step * PARTS * PART + slot / 16 * (TILE_BYTES / 2) + slot % 16 * STEP;
            let lines = row_parts(dims, _mm512_set1_ps(1.0));
            for (part, line) in lines.into_iter().enumerate().take(PARTS) {
                // SAFETY: the slot's line of this block lies within the page.
                unsafe { _mm512_storeu_si512(keys.add(at + part * PART).cast(), line) };
            }
        }
    }
    // SAFETY: the caller upholds the contract.
    unsafe {
        match rows.count {
            1 => write_value::<PARTS>(rows, values),
            _ => write_values::<PARTS>(rows, dim, values),
        }
    }
}

/// # Safety
/// As for [`write`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn write_value<const PARTS: usize>(row: &PageRows<'_>, values: *mut u16) {
    let from_here = u32::MAX << row.slot;
    for (step, dims) in row.value(row.slot).chunks(STEP).enumerate() {
        let lines = row_parts(dims, _mm512_set1_ps(1.0));
        for (part, line) in lines.into_iter().enumerate().take(PARTS) {
            let mut numbers = [0i16; STEP];
            // SAFETY: 32 elements; each has a line in the page's block, in which the slots before this one are not written.
            unsafe {
                _mm512_storeu_si512(numbers.as_mut_ptr().cast(), line);
                for (d, &number) in numbers[..dims.len()].iter().enumerate() {
                    let to = values.add((step * PARTS + part) * PART + d * PAGE_TOKENS);
                    _mm512_mask_storeu_epi16(to.cast(), from_here, _mm512_maskz_set1_epi16(1 << row.slot, number));
                }
            }
        }
    }
}

/// # Safety
/// As for [`write`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn write_values<const PARTS: usize>(rows: &PageRows<'_>, dim: usize, values: *mut u16) {
    let slots = rows.slot..rows.slot + rows.count;
    let from_here = u32::MAX << rows.slot;
    for first in (0..dim).step_by(16) {
        let mut pairs = [[_mm512_setzero_si512(); 16]; 2];
        let mask = first_lanes(16.min(dim - first));
        for pair in rows.slot / 2..slots.end.div_ceil(2) {
            let mut both = [_mm512_setzero_ps(); 2];
            for (slot, value) in (2 * pair..).zip(&mut both) {
                if slots.contains(&slot) {
                    // SAFETY: the mask has no more lanes than the value has elements from `first` on.
                    *value = unsafe { _mm512_maskz_loadu_ps(mask, rows.value(slot)[first..].as_ptr()) };
                }
            }
            let (even, odd) = (parts(both[0]), parts(both[1]));
            (pairs[0][pair], pairs[1][pair]) = (pair_up(even[0], odd[0]), pair_up(even[1], odd[1]));
        }
        let at = first / STEP * PARTS * PART + first % STEP / 16 * (TILE_BYTES / 2);
        for (part, pairs) in pairs.into_iter().enumerate().take(PARTS) {
            for (d, line) in transpose(pairs).into_iter().enumerate() {
                // SAFETY: one line of the page's block; slots before the first row are not written.
                unsafe {
                    let to = values.add(at + part * PART + d * PAGE_TOKENS);
                    _mm512_mask_storeu_epi16(to.cast(), from_here, line);
                }
            }
        }
    }
}
