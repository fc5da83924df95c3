//! Attention on AMX bf16 tiles. Queries and softmax weights are two bf16 parts, `high + low`; keys and values are one or
//! two. With two parts on both sides, a product is three of the four part products (`low * low` is left out). In rows whose
//! other activations are rounded to bf16, queries and softmax weights are one part too.
//!
//! Scores are computed transposed, keys by queries, so that a vector holds one key's scores with 16 queries. Maxima and
//! sums need no operation across lanes, and the softmax weights, written in place of the scores, already have the layout of
//! the second factor of `values^T weights`. Tiles are stored in *blocks* of four, or of two if there is one part:
//!
//! * keys of a page: `[head_dim / 32][part][2][16 keys][32 dims]`
//! * values of a page: `[head_dim / 32][part][32 dims][32 keys]`
//! * queries: `[head_dim / 32][lanes' half][16 pairs of dims][part][16 lanes][2]`
//! * weights of a page: `[lanes' half][16 pairs of keys][part][16 lanes][2]`
//! * scores of a page, in f32: `[lanes' half][32 keys][16 lanes]`
//! * sums: `[head_dim / 32][lanes' half][32 dims][16 lanes]`
//!
//! A lane is a (query, head) pair of the item; `lanes' half` is lanes 0..16 or 16..32. `head_dim / 32` is rounded up, and
//! the padding of queries, keys and values is zero.
//!
//! A lane's result depends only on that lane, and pages are processed in groups of four that start at multiples of four.

mod store;
mod unit;
mod vectors;

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::buffer::RowWriter;
use super::super::tiles::release;
use super::{AttentionTile, TILE_PAIRS};
use crate::{HEAD_DIM_MAX, PAGE_TOKENS};

pub(super) use store::write;

use unit::{CONFIG, fetch, load, multiply, store, zero};
use vectors::{exp2, first_lanes, pair_up, parts, row_parts, transpose};

/// Queries in a vector.
const LANES: usize = 16;
/// Dimensions of one block.
const STEP: usize = 32;
const TILE_BYTES: usize = 1024;
const BLOCK_BYTES: usize = 4 * TILE_BYTES;
/// Elements of one part of a block of keys or values.
const PART: usize = 2 * TILE_BYTES / 2;
/// Pages whose values are summed before the sums are stored to memory.
const PAGES_AT_ONCE: usize = 4;
/// A lane's base (its running maximum) is raised only when a score exceeds it by this power of two. Weights stay far from
/// overflow, and sums rarely have to be rescaled.
const SLACK: f32 = 16.0;

/// Elements of one head's keys (or values) in one page, stored in `parts` parts.
pub(super) fn page_numbers(head_dim: usize, parts: usize) -> usize {
    head_dim.div_ceil(STEP) * parts * PART
}

#[repr(C, align(64))]
struct Block([u8; BLOCK_BYTES]);

/// Scratch memory of an item.
struct Memory {
    queries: [Block; HEAD_DIM_MAX / STEP],
    sums: [Block; HEAD_DIM_MAX / STEP],
    /// Scores, later overwritten with the softmax weights.
    pages: [Block; PAGES_AT_ONCE],
}

/// The online-softmax state of 16 queries.
struct Lanes {
    /// Keys that a lane attends to, `low..high`.
    low: __m512i,
    high: __m512i,
    /// Keys that all lanes attend to.
    common: Range<usize>,
    /// The value subtracted from a lane's scores; minus infinity before its first key.
    base: __m512,
    sum: __m512,
}

/// # Safety
/// `pages` points to the item's KV pages, and this process may use tiles.
pub(super) unsafe fn item<const PARTS: usize>(work: &AttentionTile<'_>, pages: *const u16) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        match (work.count(), PARTS == 1 && work.is_rounded()) {
            (..=LANES, true) => halves::<1, PARTS, 1>(work, pages),
            (_, true) => halves::<2, PARTS, 1>(work, pages),
            (..=LANES, false) => halves::<1, PARTS, 2>(work, pages),
            (_, false) => halves::<2, PARTS, 2>(work, pages),
        }
    }
}

/// Processes an item of up to 16 (`HALVES == 1`) or 32 lanes. Queries and softmax weights have `QUERY_PARTS` parts, keys and values
/// `PARTS`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn halves<const HALVES: usize, const PARTS: usize, const QUERY_PARTS: usize>(
    work: &AttentionTile<'_>,
    pages: *const u16,
) {
    const { assert!(TILE_PAIRS == 2 * LANES) };
    let (steps, numbers) = (work.head_dim().div_ceil(STEP), page_numbers(work.head_dim(), PARTS));
    let (keys, values) = (pages, pages.wrapping_add(numbers));
    let mut memory = MaybeUninit::<Memory>::uninit();
    // SAFETY: the first `steps` blocks of queries and sums are filled before use, blocks of scores and weights page by page;
    // the caller guarantees the pages.
    unsafe {
        let memory = &mut *memory.as_mut_ptr();
        memory.sums[..steps].iter_mut().for_each(|sums| sums.0[..HALVES * BLOCK_BYTES / 2].fill(0));
        let mut lanes: [Lanes; HALVES] =
            std::array::from_fn(|half| start::<QUERY_PARTS>(work, half, &mut memory.queries));
        CONFIG.load();
        let seen = work.seen();
        let mut first = seen.start / PAGE_TOKENS;
        let end = seen.end.div_ceil(PAGE_TOKENS);
        while first < end {
            let pages = first..end.min((first / PAGES_AT_ONCE + 1) * PAGES_AT_ONCE);
            let at = |page: usize| 2 * work.page(page) * numbers;
            for (page, scores) in pages.clone().zip(&mut memory.pages) {
                // While these keys are multiplied, prefetch the next page's keys or, after the last page, the first values.
                let next = if page + 1 < pages.end { keys.add(at(page + 1)) } else { values.add(at(pages.start)) };
                score::<HALVES, PARTS, QUERY_PARTS>(keys.add(at(page)), next, &memory.queries[..steps], scores);
            }
            for (half, lanes) in lanes.iter_mut().enumerate() {
                softmax::<QUERY_PARTS>(lanes, half, pages.clone(), steps, memory);
            }
            for step in 0..steps {
                let sums = (&raw mut memory.sums[step]).cast::<u8>();
                load::<HALVES>(sums);
                for (page, weights) in pages.clone().zip(&memory.pages) {
                    let block = values.add(at(page) + step * PARTS * PART);
                    if page + 1 < pages.end {
                        fetch::<HALVES, PARTS>(values.add(at(page + 1) + step * PARTS * PART));
                    } else if step + 1 < steps {
                        fetch::<HALVES, PARTS>(values.add(at(pages.start) + (step + 1) * PARTS * PART));
                    } else if pages.end < end {
                        fetch::<HALVES, PARTS>(keys.add(at(pages.end)));
                    }
                    multiply::<HALVES, PARTS, QUERY_PARTS>(block.cast(), (&raw const *weights).cast());
                }
                store::<HALVES>(sums);
            }
            first = pages.end;
        }
        release();
        for (half, lanes) in lanes.iter().enumerate() {
            finish(work, half, lanes, &memory.sums);
        }
    }
}

/// Initialises the state of a half's lanes and writes their queries as blocks, scaled so that a softmax weight is `2^score`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn start<const QUERY_PARTS: usize>(work: &AttentionTile<'_>, half: usize, queries: &mut [Block]) -> Lanes {
    let count = LANES.min(work.count() - half * LANES);
    let (mut low, mut high) = ([0i32; LANES], [0i32; LANES]);
    let mut common = 0..usize::MAX;
    for lane in 0..count {
        let keys = work.keys(half * LANES + lane);
        (low[lane], high[lane]) = (keys.start as i32, keys.end as i32);
        common = common.start.max(keys.start)..common.end.min(keys.end);
    }
    let mut queries_of: [&[f32]; LANES] =
        std::array::from_fn(|lane| if lane < count { work.query(half * LANES + lane) } else { &[] });
    let dim = work.head_dim();
    // Rows are far apart in memory: prefetch all cache lines of the item's queries, and those of its results for writing.
    for (lane, query) in queries_of[..count].iter().enumerate() {
        for d in (0..dim).step_by(16) {
            // SAFETY: prefetching changes nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(query.as_ptr().add(d).cast());
                _mm_prefetch::<_MM_HINT_ET1>(work.result(half * LANES + lane, d));
            }
        }
    }
    let mut turned = MaybeUninit::<[f32; LANES * HEAD_DIM_MAX]>::uninit();
    if let Some(turn) = &work.common.asked.turn {
        // SAFETY: elements are written before they are read.
        let turned = unsafe { &mut *turned.as_mut_ptr() };
        for ((lane, query), turned) in queries_of[..count].iter_mut().enumerate().zip(turned.chunks_exact_mut(dim)) {
            turn.norm_rope_head(turned, query, turn.query_norm, work.position(half * LANES + lane));
            *query = turned;
        }
    }
    let scale = _mm512_set1_ps(work.scale() * std::f32::consts::LOG2_E);
    for first in (0..dim).step_by(STEP) {
        let mut lines = [[_mm512_setzero_si512(); LANES]; 2];
        for (lane, query) in queries_of[..count].iter().enumerate() {
            let query = &query[first..dim.min(first + STEP)];
            let [high, low] = row_parts(query, scale);
            (lines[0][lane], lines[1][lane]) = (high, low);
        }
        let block = (&raw mut queries[first / STEP]).cast::<u8>();
        for (part, lines) in lines.into_iter().enumerate().take(QUERY_PARTS) {
            for (pair, line) in transpose(lines).into_iter().enumerate() {
                // SAFETY: a line of the block.
                unsafe { _mm512_store_si512(line_of(block, half, QUERY_PARTS * pair + part).cast(), line) };
            }
        }
    }
    // SAFETY: arrays of 16.
    let (low, high) = unsafe { (_mm512_loadu_si512(low.as_ptr().cast()), _mm512_loadu_si512(high.as_ptr().cast())) };
    Lanes { low, high, common, base: _mm512_set1_ps(f32::NEG_INFINITY), sum: _mm512_setzero_ps() }
}

impl AttentionTile<'_> {
    /// The address of element `d` of pair `i`'s result, for prefetching.
    fn result(&self, i: usize, d: usize) -> *const i8 {
        let (row, column) = self.place(i);
        match &self.common.asked.out {
            RowWriter::Plain(_) => self.out(i).wrapping_add(d).cast(),
            RowWriter::Rounded(out) => out.at(row, column + d).cast(),
            RowWriter::Split(out) => out.at(row, column + d).cast(),
        }
    }
}

/// Computes the scores of a page's keys with all lanes.
unsafe fn score<const HALVES: usize, const PARTS: usize, const QUERY_PARTS: usize>(
    keys: *const u16,
    next: *const u16,
    queries: &[Block],
    scores: &mut Block,
) {
    // SAFETY: the page has a block of keys for each block of queries.
    unsafe {
        zero::<HALVES>();
        for (step, queries) in queries.iter().enumerate() {
            fetch::<HALVES, PARTS>(next.add(step * PARTS * PART));
            multiply::<HALVES, PARTS, QUERY_PARTS>(keys.add(step * PARTS * PART).cast(), (&raw const *queries).cast());
        }
        store::<HALVES>((&raw mut *scores).cast());
    }
}

/// Turns one half's scores of some pages into softmax weights and raises the lanes' bases where necessary.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn softmax<const QUERY_PARTS: usize>(
    lanes: &mut Lanes,
    half: usize,
    pages: Range<usize>,
    steps: usize,
    memory: &mut Memory,
) {
    let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut most = [hidden; 4];
    // SAFETY: keys and lanes lie within their blocks, which hold the pages' scores.
    unsafe {
        for (page, scores) in pages.clone().zip(&mut memory.pages) {
            let scores = (&raw mut *scores).cast::<u8>();
            let keys = page * PAGE_TOKENS..(page + 1) * PAGE_TOKENS;
            if keys.start < lanes.common.start || keys.end > lanes.common.end {
                for key in 0..PAGE_TOKENS {
                    let position = _mm512_set1_epi32((keys.start + key) as i32);
                    let seen =
                        _mm512_cmple_epi32_mask(lanes.low, position) & _mm512_cmplt_epi32_mask(position, lanes.high);
                    let at = line_of(scores, half, key);
                    _mm512_store_ps(at, _mm512_mask_mov_ps(hidden, seen, _mm512_load_ps(at)));
                }
            }
            for key in 0..PAGE_TOKENS {
                most[key % 4] = _mm512_max_ps(_mm512_load_ps(line_of(scores, half, key)), most[key % 4]);
            }
        }
        let most = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
        rebase(lanes, half, most, &mut memory.sums[..steps]);
        let unseen = _mm512_cmpeq_ps_mask(lanes.base, hidden);
        let base = _mm512_mask_mov_ps(lanes.base, unseen, _mm512_setzero_ps());
        let mut sum = lanes.sum;
        for block in memory.pages.iter_mut().take(pages.len()) {
            let block = (&raw mut *block).cast::<u8>();
            for pair in 0..PAGE_TOKENS / 2 {
                let at = line_of(block, half, 2 * pair);
                let even = exp2(_mm512_sub_ps(_mm512_load_ps(at), base));
                let odd = exp2(_mm512_sub_ps(_mm512_load_ps(at.add(LANES)), base));
                sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
                let (even, odd) = (parts(even), parts(odd));
                // Weights of one part need half the space of the scores and are stored without gaps.
                let to = line_of(block, half, QUERY_PARTS * pair);
                _mm512_store_si512(to.cast(), pair_up(even[0], odd[0]));
                if QUERY_PARTS == 2 {
                    _mm512_store_si512(to.add(LANES).cast(), pair_up(even[1], odd[1]));
                }
            }
        }
        lanes.sum = sum;
    }
}

/// The address of a line of one half of the lanes.
fn line_of(block: *mut u8, half: usize, line: usize) -> *mut f32 {
    block.wrapping_add(half * (BLOCK_BYTES / 2) + line * 64).cast()
}

/// Raises the bases that `most` exceeds by more than [`SLACK`] to `most`, and rescales the sums of those lanes.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn rebase(lanes: &mut Lanes, half: usize, most: __m512, sums: &mut [Block]) {
    let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
    let moved = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(most, _mm512_add_ps(lanes.base, _mm512_set1_ps(SLACK)));
    let base = _mm512_mask_mov_ps(lanes.base, moved, most);
    // Before its first key a lane's sums are zero.
    let faded = moved & _mm512_cmp_ps_mask::<_CMP_NEQ_OQ>(lanes.base, hidden);
    if faded != 0 {
        let rescale = exp2(_mm512_mask_sub_ps(_mm512_setzero_ps(), faded, lanes.base, base));
        let rescale = _mm512_mask_mov_ps(_mm512_set1_ps(1.0), faded, rescale);
        lanes.sum = _mm512_mul_ps(lanes.sum, rescale);
        for block in sums {
            for dim in 0..STEP {
                let sum = line_of((&raw mut *block).cast(), half, dim);
                // SAFETY: a line of the block.
                unsafe { _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), rescale)) };
            }
        }
    }
    lanes.base = base;
}

/// Writes one half's results.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn finish(work: &AttentionTile<'_>, half: usize, lanes: &Lanes, sums: &[Block]) {
    let inverse = _mm512_div_ps(_mm512_set1_ps(1.0), lanes.sum);
    let count = LANES.min(work.count() - half * LANES);
    let dim = work.head_dim();
    for first in (0..dim).step_by(16) {
        let numbers = 16.min(dim - first);
        let block = (&raw const sums[first / STEP]).cast_mut().cast::<u8>();
        let lines: [__m512i; 16] = std::array::from_fn(|d| {
            // SAFETY: a line of the block.
            let sum = unsafe { _mm512_load_ps(line_of(block, half, first % STEP + d)) };
            _mm512_castps_si512(_mm512_mul_ps(sum, inverse))
        });
        for (lane, line) in transpose(lines).into_iter().enumerate().take(count) {
            let (i, line) = (half * LANES + lane, _mm512_castsi512_ps(line));
            let (row, column) = work.place(i);
            // SAFETY: this lane's part of the output belongs to this item.
            unsafe {
                match &work.common.asked.out {
                    RowWriter::Plain(_) => {
                        _mm512_mask_storeu_ps(work.out(i).add(first), first_lanes(numbers), line);
                    }
                    RowWriter::Rounded(out) => out.put(row, column + first, numbers, line),
                    RowWriter::Split(out) => out.put(row, column + first, numbers, line),
                }
            }
        }
    }
}
