//! Attention with SIMD vectors, for keys and values in f32 or f16.
//!
//! A page of one KV head holds its keys transposed, `[width][32]`, and its values as `[32][width]`. A vector is 16 keys
//! when scores are computed and 16 dimensions when values are summed, so nothing is added across lanes. `width` is
//! `head_dim` padded to whole vectors. The padding of values is zero; the padding of keys and queries is not read.

use super::super::lanes::for_each_level;
use super::super::level::Level;
use super::{AttentionTile, HEAD_DIM_MAX, PageRows, TILE_PAIRS};
use crate::PAGE_TOKENS;

/// Pairs whose scores are kept in registers together.
const BLOCK_ROWS: usize = 8;

/// Elements in a vector.
const LANES: usize = 16;

/// `head_dim` padded to whole vectors.
pub(super) const fn width(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
}

/// Elements of one head's keys (or values) in one page.
pub(super) fn page_elements(head_dim: usize) -> usize {
    width(head_dim) * PAGE_TOKENS
}

/// Stores rows of one page and head.
///
/// # Safety
/// The pointers point to `page_elements` elements each, and no other thread accesses the rows' slots.
pub(super) unsafe fn write_f32(rows: &PageRows<'_>, dim: usize, keys: *mut f32, values: *mut f32) {
    let mut turned = [0f32; HEAD_DIM_MAX];
    for slot in rows.slot..rows.slot + rows.count {
        // SAFETY: the slot's elements lie within the page.
        unsafe {
            scatter(rows.key(slot, &mut turned), keys.add(slot));
            std::ptr::copy_nonoverlapping(rows.value(slot).as_ptr(), values.add(slot * width(dim)), dim);
        }
    }
}

/// Stores rows of one page and head, rounded to f16.
///
/// # Safety
/// As for [`write_f32`], and the CPU has `level`.
pub(super) unsafe fn write_f16(level: Level, rows: &PageRows<'_>, dim: usize, keys: *mut u16, values: *mut u16) {
    let mut turned = [0f32; HEAD_DIM_MAX];
    let mut key = [0u16; HEAD_DIM_MAX];
    for slot in rows.slot..rows.slot + rows.count {
        // SAFETY: the slot's elements lie within the page.
        unsafe {
            to_halves(level, rows.key(slot, &mut turned), key.as_mut_ptr());
            scatter(&key[..dim], keys.add(slot));
            to_halves(level, rows.value(slot), values.add(slot * width(dim)));
        }
    }
}

/// Writes a key to its column of a page.
unsafe fn scatter<T: Copy>(key: &[T], column: *mut T) {
    for (d, value) in key.iter().enumerate() {
        // SAFETY: the caller's column has `key.len()` elements, one in each row of 32.
        unsafe { *column.add(d * PAGE_TOKENS) = *value };
    }
}

/// # Safety
/// `out` points to `width(values.len())` elements; the CPU has `level`.
unsafe fn to_halves(level: Level, values: &[f32], out: *mut u16) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => avx512::halves(values, out),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::halves(values, out),
            _ => scalar::halves(values, out),
        }
    }
}

/// # Safety
/// `pages` points to the pages of the item's KV store, in f16 if `HALF`, else in f32; the CPU has `level`.
pub(super) unsafe fn item<const HALF: bool>(level: Level, work: &AttentionTile<'_>, pages: *const u8) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => avx512::item::<HALF>(work, pages),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::item::<HALF>(work, pages),
            _ => scalar::item::<HALF>(work, pages),
        }
    }
}

/// The online-softmax state of an item's pairs.
struct State {
    query: [*const f32; TILE_PAIRS],
    /// Keys that a pair attends to: positions `low..high`.
    low: [usize; TILE_PAIRS],
    high: [usize; TILE_PAIRS],
    max: [f32; TILE_PAIRS],
    sum: [f32; TILE_PAIRS],
    /// `[pair][width]`
    out: [f32; TILE_PAIRS * HEAD_DIM_MAX],
}

for_each_level! {
    /// Rounds values to f16 and pads with zeros to a whole vector.
    unsafe fn halves(values: &[f32], out: *mut u16) {
        let chunks = values.chunks_exact(LANES);
        let (whole, rest) = (values.len() - chunks.remainder().len(), chunks.remainder());
        for (i, chunk) in chunks.enumerate() {
            store_f16(out.add(i * LANES), load(chunk.as_ptr()));
        }
        if !rest.is_empty() {
            let mut padded = [0f32; LANES];
            padded[..rest.len()].copy_from_slice(rest);
            store_f16(out.add(whole), load(padded.as_ptr()));
        }
    }

    /// Element `at` of a page and the 15 after it.
    #[inline]
    unsafe fn load_kv<const HALF: bool>(page: *const u8, at: usize) -> V {
        if HALF { load_f16(page.cast::<u16>().add(at)) } else { load(page.cast::<f32>().add(at)) }
    }

    unsafe fn item<const HALF: bool>(work: &AttentionTile<'_>, pages: *const u8) {
        let mut state = std::mem::MaybeUninit::<State>::uninit();
        let state = &mut *state.as_mut_ptr();
        let (count, dim, width) = (work.count(), work.head_dim(), width(work.head_dim()));
        state.out[..count * width].fill(0.0);
        for i in 0..count {
            let keys = work.keys(i);
            state.query[i] = work.query(i).as_ptr();
            (state.low[i], state.high[i]) = (keys.start, keys.end);
            (state.max[i], state.sum[i]) = (f32::NEG_INFINITY, 0.0);
        }
        let (size, seen) = (if HALF { 2 } else { 4 }, work.seen());
        for page in seen.start / PAGE_TOKENS..seen.end.div_ceil(PAGE_TOKENS) {
            let bytes = page_elements(dim) * size;
            let keys = pages.add(2 * work.page(page) * bytes);
            let values = keys.add(bytes);
            let mut i = 0;
            while i < count {
                i += match count - i {
                    BLOCK_ROWS.. => { block::<HALF, BLOCK_ROWS>(work, state, i, page, keys, values); BLOCK_ROWS }
                    4.. => { block::<HALF, 4>(work, state, i, page, keys, values); 4 }
                    3 => { block::<HALF, 3>(work, state, i, page, keys, values); 3 }
                    2 => { block::<HALF, 2>(work, state, i, page, keys, values); 2 }
                    _ => { block::<HALF, 1>(work, state, i, page, keys, values); 1 }
                };
            }
        }
        for i in 0..count {
            let (out, sums, total) = (work.out(i), state.out.as_mut_ptr().add(i * width), splat(state.sum[i]));
            let whole = dim / LANES * LANES;
            for d in (0..whole).step_by(LANES) {
                store(out.add(d), div(load(sums.add(d)), total));
            }
            if whole < dim {
                // The next head's result begins before the end of this vector.
                store(sums.add(whole), div(load(sums.add(whole)), total));
                std::ptr::copy_nonoverlapping(sums.add(whole), out.add(whole), dim - whole);
            }
        }
    }

    /// Processes the 32 keys of one page for `R` pairs from `i` on.
    unsafe fn block<const HALF: bool, const R: usize>(work: &AttentionTile<'_>, state: &mut State, i: usize, page: usize, keys: *const u8, values: *const u8) {
        let (dim, width) = (work.head_dim(), width(work.head_dim()));
        let mut scores = [[splat(0.0); 2]; R];
        let query: [*const f32; R] = std::array::from_fn(|r| state.query[i + r]);
        for d in 0..dim {
            let k = [load_kv::<HALF>(keys, d * PAGE_TOKENS), load_kv::<HALF>(keys, d * PAGE_TOKENS + 16)];
            for r in 0..R {
                let q = splat(*query[r].add(d));
                scores[r][0] = fma(q, k[0], scores[r][0]);
                scores[r][1] = fma(q, k[1], scores[r][1]);
            }
        }
        let mut weights = [[0f32; PAGE_TOKENS]; R];
        let mut old = [f32::NEG_INFINITY; 16];
        let mut used = 0;
        for r in 0..R {
            let i = i + r;
            // The slots of this page that the pair attends to.
            let from = state.low[i].saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS);
            let to = state.high[i].saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS);
            used = used.max(to);
            let hidden = splat(f32::NEG_INFINITY);
            for (half, score) in scores[r].iter_mut().enumerate() {
                let first = half * 16;
                let scaled = mul(*score, splat(work.scale()));
                let seen = first_lanes(to.saturating_sub(first), scaled, hidden);
                *score = first_lanes(from.saturating_sub(first), hidden, seen);
            }
            let max_here = state.max[i].max(largest(max(scores[r][0], scores[r][1])));
            let base = if max_here == f32::NEG_INFINITY { 0.0 } else { max_here };
            let p = [exp(sub(scores[r][0], splat(base))), exp(sub(scores[r][1], splat(base)))];
            store(weights[r].as_mut_ptr(), p[0]);
            store(weights[r].as_mut_ptr().add(16), p[1]);
            old[r] = state.max[i] - base;
            state.max[i] = max_here;
            scores[r][0] = add(p[0], p[1]);
        }
        let mut rescale = [0f32; 16];
        store(rescale.as_mut_ptr(), exp(load(old.as_ptr())));
        for r in 0..R {
            state.sum[i + r] = state.sum[i + r].mul_add(rescale[r], sum(scores[r][0]));
        }
        let mut d = 0;
        while d + 32 <= width {
            let mut sums: [[V; 2]; R] = std::array::from_fn(|r| {
                let out = state.out.as_ptr().add((i + r) * width + d);
                [mul(load(out), splat(rescale[r])), mul(load(out.add(16)), splat(rescale[r]))]
            });
            for key in 0..used {
                let v = [load_kv::<HALF>(values, key * width + d), load_kv::<HALF>(values, key * width + d + 16)];
                for r in 0..R {
                    let p = splat(weights[r][key]);
                    sums[r][0] = fma(p, v[0], sums[r][0]);
                    sums[r][1] = fma(p, v[1], sums[r][1]);
                }
            }
            for r in 0..R {
                let out = state.out.as_mut_ptr().add((i + r) * width + d);
                store(out, sums[r][0]);
                store(out.add(16), sums[r][1]);
            }
            d += 32;
        }
        if d < width {
            for r in 0..R {
                let out = state.out.as_mut_ptr().add((i + r) * width + d);
                let mut sum = mul(load(out), splat(rescale[r]));
                for key in 0..used {
                    sum = fma(splat(weights[r][key]), load_kv::<HALF>(values, key * width + d), sum);
                }
                store(out, sum);
            }
        }
    }
}
