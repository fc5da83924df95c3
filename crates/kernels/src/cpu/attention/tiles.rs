//! Attention on bf16 tiles: queries and weights are two bf16 parts, `high + low`, keys and values one or two. With two, a product
//! is three of the four part products.
//!
//! Scores are made transposed, keys by queries, so that a vector holds one key's scores of 16 queries: maxima and sums run down
//! the vectors, and weights, put where the scores were, are already the second factor of `values^T weights`. All tiles come in
//! *blocks* of four, or of two where there is one part:
//!
//! * keys of a page: `[head_dim / 32][part][16 keys][32 dims]`, twice 16 keys in a part
//! * values of a page: `[head_dim / 32][part][32 dims][32 keys]`
//! * queries: `[head_dim / 32][lanes' half][16 pairs of dims][part][16 lanes][2]`
//! * weights of a page: `[lanes' half][16 pairs of keys][part][16 lanes][2]`
//! * scores of a page, in f32: `[lanes' half][32 keys][16 lanes]`
//! * sums: `[head_dim / 32][lanes' half][32 dims][16 lanes]`
//!
//! A lane's numbers depend on that lane alone, and pages are taken together in the same fours wherever a query stands.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::tiles::{TileConfig, release};
use super::{HEAD_DIM_MAX, ITEM_ROWS, Item, PageRows};
use crate::PAGE_TOKENS;

/// Queries that share a vector.
const LANES: usize = 16;
/// Dimensions of one block.
const STEP: usize = 32;
const TILE_BYTES: usize = 1024;
const BLOCK_BYTES: usize = 4 * TILE_BYTES;
/// Numbers of one part of a block of keys or values.
const PART: usize = 2 * TILE_BYTES / 2;
/// Pages whose values are summed before the sums go back to memory.
const PAGES_AT_ONCE: usize = 4;
/// A lane's base moves up only when a score exceeds it by this power of two: weights stay far from overflow, and sums rarely
/// have to be scaled down.
const SLACK: f32 = 16.0;

/// Numbers of one head's keys (or values) in one page, when each is kept in so many parts.
pub(super) fn page_numbers(head_dim: usize, parts: usize) -> usize {
    head_dim.div_ceil(STEP) * parts * PART
}

#[repr(C, align(64))]
struct Block([u8; BLOCK_BYTES]);

/// What an item works on besides the pages.
struct Memory {
    queries: [Block; HEAD_DIM_MAX / STEP],
    sums: [Block; HEAD_DIM_MAX / STEP],
    /// Scores, and then the weights.
    pages: [Block; PAGES_AT_ONCE],
}

/// The state of 16 queries while they walk the pages.
struct Lanes {
    /// Keys that a lane sees, `low..high`.
    low: __m512i,
    high: __m512i,
    /// Keys that all of them see.
    common: Range<usize>,
    /// What is subtracted from a lane's scores; minus infinity before its first key.
    base: __m512,
    sum: __m512,
}

/// Stores rows of one page and head; values after the last row become zero, because hidden keys weigh zero and zero times
/// what a former owner of the page left might not be.
///
/// # Safety
/// `pages` has the page and head `at`, nobody else uses it, and the CPU has AVX-512.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn write<const PARTS: usize>(rows: &PageRows<'_>, dim: usize, pages: *mut u16, at: usize) {
    let numbers = page_numbers(dim, PARTS);
    let (keys, values) = (pages.wrapping_add(2 * at * numbers), pages.wrapping_add((2 * at + 1) * numbers));
    for slot in rows.slot..rows.slot + rows.count {
        let key = rows.key(slot);
        for (step, dims) in key.chunks(STEP).enumerate() {
            let at = step * PARTS * PART + slot / 16 * (TILE_BYTES / 2) + slot % 16 * STEP;
            // SAFETY: `dims` has 16 or 32 numbers; the slot's line of this block lies within the page.
            unsafe {
                let lines = row_parts(dims.as_ptr(), dims.len(), _mm512_set1_ps(1.0));
                for (part, line) in lines.into_iter().enumerate().take(PARTS) {
                    _mm512_storeu_si512(keys.add(at + part * PART).cast(), line);
                }
            }
        }
    }
    // SAFETY: passed on.
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
        // SAFETY: `dims` has 16 or 32 numbers.
        let lines = unsafe { row_parts(dims.as_ptr(), dims.len(), _mm512_set1_ps(1.0)) };
        for (part, line) in lines.into_iter().enumerate().take(PARTS) {
            let mut numbers = [0i16; STEP];
            // SAFETY: 32 numbers; a line of the page's block for each, of which slots before this one are left alone.
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
        for pair in rows.slot / 2..slots.end.div_ceil(2) {
            let mut both = [_mm512_setzero_ps(); 2];
            for (slot, value) in (2 * pair..).zip(&mut both) {
                if slots.contains(&slot) {
                    // SAFETY: heads are multiples of 16.
                    *value = unsafe { _mm512_loadu_ps(rows.value(slot)[first..].as_ptr()) };
                }
            }
            let (even, odd) = (parts(both[0]), parts(both[1]));
            (pairs[0][pair], pairs[1][pair]) = (pair_up(even[0], odd[0]), pair_up(even[1], odd[1]));
        }
        let at = first / STEP * PARTS * PART + first % STEP / 16 * (TILE_BYTES / 2);
        for (part, pairs) in pairs.into_iter().enumerate().take(PARTS) {
            for (d, line) in transpose(pairs).into_iter().enumerate() {
                // SAFETY: one line of the page's block; slots before the first row are left alone.
                unsafe {
                    let to = values.add(at + part * PART + d * PAGE_TOKENS);
                    _mm512_mask_storeu_epi16(to.cast(), from_here, line);
                }
            }
        }
    }
}

/// # Safety
/// `pages` leads to the item's K/V pages, and this process may use tiles.
pub(super) unsafe fn item<const PARTS: usize>(work: &Item<'_>, pages: *const u16) {
    // SAFETY: passed on.
    unsafe {
        match work.count() {
            ..=LANES => halves::<1, PARTS>(work, pages),
            _ => halves::<2, PARTS>(work, pages),
        }
    }
}

/// An item of up to 16 lanes, or of up to twice as many.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn halves<const HALVES: usize, const PARTS: usize>(work: &Item<'_>, pages: *const u16) {
    const { assert!(ITEM_ROWS == 2 * LANES) };
    let (steps, numbers) = (work.head_dim().div_ceil(STEP), page_numbers(work.head_dim(), PARTS));
    let (keys, values) = (pages, pages.wrapping_add(numbers));
    let mut memory = MaybeUninit::<Memory>::uninit();
    // SAFETY: the first `steps` blocks of queries and sums are filled before use, blocks of scores and weights page by page;
    // pages are the caller's promise.
    unsafe {
        let memory = &mut *memory.as_mut_ptr();
        memory.sums[..steps].iter_mut().for_each(|sums| sums.0[..HALVES * BLOCK_BYTES / 2].fill(0));
        let mut lanes: [Lanes; HALVES] = std::array::from_fn(|half| start(work, half, &mut memory.queries));
        CONFIG.load();
        let seen = work.seen();
        let mut first = seen.start / PAGE_TOKENS;
        let end = seen.end.div_ceil(PAGE_TOKENS);
        while first < end {
            let pages = first..end.min((first / PAGES_AT_ONCE + 1) * PAGES_AT_ONCE);
            let at = |page: usize| 2 * work.page(page) * numbers;
            for (page, scores) in pages.clone().zip(&mut memory.pages) {
                // While these keys are multiplied, what follows is fetched: the next page's, and at last the first values.
                let next = if page + 1 < pages.end { keys.add(at(page + 1)) } else { values.add(at(pages.start)) };
                score::<HALVES, PARTS>(keys.add(at(page)), next, &memory.queries[..steps], scores);
            }
            for (half, lanes) in lanes.iter_mut().enumerate() {
                weigh(lanes, half, pages.clone(), steps, memory);
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
                    multiply::<HALVES, PARTS>(block.cast(), (&raw const *weights).cast());
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

/// The state of a half's lanes, and their queries as blocks, scaled so that weights are powers of two.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn start(work: &Item<'_>, half: usize, queries: &mut [Block]) -> Lanes {
    let count = LANES.min(work.count() - half * LANES);
    let (mut low, mut high) = ([0i32; LANES], [0i32; LANES]);
    let mut common = 0..usize::MAX;
    for lane in 0..count {
        let keys = work.keys(half * LANES + lane);
        (low[lane], high[lane]) = (keys.start as i32, keys.end as i32);
        common = common.start.max(keys.start)..common.end.min(keys.end);
    }
    let queries_of: [&[f32]; LANES] =
        std::array::from_fn(|lane| if lane < count { work.query(half * LANES + lane) } else { &[] });
    // Rows are far apart: all of an item's lines are asked for at once, those of the results for later.
    for (lane, query) in queries_of[..count].iter().enumerate() {
        let out = work.out(half * LANES + lane);
        for d in (0..query.len()).step_by(16) {
            // SAFETY: prefetching changes nothing.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(query.as_ptr().add(d).cast());
                _mm_prefetch::<_MM_HINT_ET1>(out.add(d).cast());
            }
        }
    }
    let scale = _mm512_set1_ps(work.common.attention.scale * std::f32::consts::LOG2_E);
    let dim = work.head_dim();
    for first in (0..dim).step_by(STEP) {
        let mut lines = [[_mm512_setzero_si512(); LANES]; 2];
        for (lane, query) in queries_of[..count].iter().enumerate() {
            let query = &query[first..dim.min(first + STEP)];
            // SAFETY: 16 or 32 numbers.
            let [high, low] = unsafe { row_parts(query.as_ptr(), query.len(), scale) };
            (lines[0][lane], lines[1][lane]) = (high, low);
        }
        let block = (&raw mut queries[first / STEP]).cast::<u8>();
        for (part, lines) in lines.into_iter().enumerate() {
            for (pair, line) in transpose(lines).into_iter().enumerate() {
                // SAFETY: a line of the block.
                unsafe { _mm512_store_si512(line_of(block, half, 2 * pair + part).cast(), line) };
            }
        }
    }
    // SAFETY: arrays of 16.
    let (low, high) = unsafe { (_mm512_loadu_si512(low.as_ptr().cast()), _mm512_loadu_si512(high.as_ptr().cast())) };
    Lanes { low, high, common, base: _mm512_set1_ps(f32::NEG_INFINITY), sum: _mm512_setzero_ps() }
}

/// Scores of a page's keys with all lanes.
unsafe fn score<const HALVES: usize, const PARTS: usize>(
    keys: *const u16,
    next: *const u16,
    queries: &[Block],
    scores: &mut Block,
) {
    // SAFETY: the page has a block of keys for each of queries.
    unsafe {
        zero::<HALVES>();
        for (step, queries) in queries.iter().enumerate() {
            fetch::<HALVES, PARTS>(next.add(step * PARTS * PART));
            multiply::<HALVES, PARTS>(keys.add(step * PARTS * PART).cast(), (&raw const *queries).cast());
        }
        store::<HALVES>((&raw mut *scores).cast());
    }
}

/// Turns one half's scores of some pages into weights, moving the lanes' bases up where they must.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn weigh(lanes: &mut Lanes, half: usize, pages: Range<usize>, steps: usize, memory: &mut Memory) {
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
                _mm512_store_si512(at.cast(), pair_up(even[0], odd[0]));
                _mm512_store_si512(at.add(LANES).cast(), pair_up(even[1], odd[1]));
            }
        }
        lanes.sum = sum;
    }
}

/// A line of one half of the lanes.
fn line_of(block: *mut u8, half: usize, line: usize) -> *mut f32 {
    block.wrapping_add(half * (BLOCK_BYTES / 2) + line * 64).cast()
}

/// Moves bases up to where `most` exceeds them by more than the slack, and scales those lanes' sums down.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn rebase(lanes: &mut Lanes, half: usize, most: __m512, sums: &mut [Block]) {
    let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
    let moved = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(most, _mm512_add_ps(lanes.base, _mm512_set1_ps(SLACK)));
    let base = _mm512_mask_mov_ps(lanes.base, moved, most);
    // Before its first key a lane's sums are zero.
    let faded = moved & _mm512_cmp_ps_mask::<_CMP_NEQ_OQ>(lanes.base, hidden);
    if faded != 0 {
        let fade = exp2(_mm512_mask_sub_ps(_mm512_setzero_ps(), faded, lanes.base, base));
        let fade = _mm512_mask_mov_ps(_mm512_set1_ps(1.0), faded, fade);
        lanes.sum = _mm512_mul_ps(lanes.sum, fade);
        for block in sums {
            for dim in 0..STEP {
                let sum = line_of((&raw mut *block).cast(), half, dim);
                // SAFETY: a line of the block.
                unsafe { _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), fade)) };
            }
        }
    }
    lanes.base = base;
}

/// Writes one half's results.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn finish(work: &Item<'_>, half: usize, lanes: &Lanes, sums: &[Block]) {
    let inverse = _mm512_div_ps(_mm512_set1_ps(1.0), lanes.sum);
    let count = LANES.min(work.count() - half * LANES);
    let mut outs = [std::ptr::null_mut::<f32>(); LANES];
    for (lane, out) in outs[..count].iter_mut().enumerate() {
        *out = work.out(half * LANES + lane);
    }
    for first in (0..work.head_dim()).step_by(16) {
        let block = (&raw const sums[first / STEP]).cast_mut().cast::<u8>();
        let lines: [__m512i; 16] = std::array::from_fn(|d| {
            // SAFETY: a line of the block.
            let sum = unsafe { _mm512_load_ps(line_of(block, half, first % STEP + d)) };
            _mm512_castps_si512(_mm512_mul_ps(sum, inverse))
        });
        for (line, out) in transpose(lines).into_iter().zip(&outs[..count]) {
            // SAFETY: this lane's part of the output belongs to this item.
            unsafe { _mm512_storeu_si512(out.add(first).cast(), line) };
        }
    }
}

/// `2^x` for `x` up to 127, within 5e-7 of it; exactly zero for minus infinity, NaN and all that is below -127.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn exp2(x: __m512) -> __m512 {
    /// A polynomial with little relative error between -1/2 and 1/2, exact at zero; highest power first.
    const POLY: [f32; 6] = [0.001_112_550_7, 0.009_666_283, 0.055_574_004, 0.240_223_51, 0.693_142_83, 1.0];
    /// With this added, a number's last bits are its nearest integer.
    const ROUND: f32 = 1.5 * (1 << 23) as f32;
    let x = _mm512_max_ps(x, _mm512_set1_ps(-127.0));
    let shifted = _mm512_add_ps(x, _mm512_set1_ps(ROUND));
    let rest = _mm512_sub_ps(x, _mm512_sub_ps(shifted, _mm512_set1_ps(ROUND)));
    let mut power = _mm512_set1_ps(POLY[0]);
    for c in &POLY[1..] {
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(*c));
    }
    // The integer goes to the exponent; 1 times 2^-127 comes out as the bits of zero.
    let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(power), exponent))
}

/// The bf16 parts of 16 numbers, high and low, each in the upper half of its lane.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn parts(x: __m512) -> [__m512i; 2] {
    let half = _mm512_set1_epi32(0x8000);
    let high = _mm512_add_epi32(_mm512_castps_si512(x), half);
    let whole = _mm512_castsi512_ps(_mm512_and_si512(high, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
    [high, _mm512_add_epi32(_mm512_castps_si512(_mm512_sub_ps(x, whole)), half)]
}

/// Upper halves of two vectors' lanes as pairs.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn pair_up(even: __m512i, odd: __m512i) -> __m512i {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    _mm512_or_si512(_mm512_srli_epi32::<16>(even), _mm512_and_si512(odd, upper))
}

/// The parts of 32 numbers (or of 16, followed by zeros), times `scale`, in their order.
///
/// # Safety
/// `from` leads to `count` numbers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn row_parts(from: *const f32, count: usize, scale: __m512) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    let [first, second] = unsafe {
        [_mm512_loadu_ps(from), if count == STEP { _mm512_loadu_ps(from.add(16)) } else { _mm512_setzero_ps() }]
    };
    let (first, second) = (parts(_mm512_mul_ps(first, scale)), parts(_mm512_mul_ps(second, scale)));
    const UPPER: [u16; 32] = {
        let mut index = [0; 32];
        let mut i = 0;
        while i < 32 {
            index[i] = 2 * i as u16 + 1;
            i += 1;
        }
        index
    };
    // SAFETY: 64 bytes.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    [_mm512_permutex2var_epi16(first[0], upper, second[0]), _mm512_permutex2var_epi16(first[1], upper, second[1])]
}

/// Rows become columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = rows;
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    // Vector `4 q + j` gets, in its 128-bit lane `l`, column `4 l + j` of rows `4 q..4 q + 4`.
    let mut quads = pairs;
    for q in (0..16).step_by(4) {
        for j in 0..2 {
            quads[q + 2 * j] = _mm512_unpacklo_epi64(pairs[q + j], pairs[q + j + 2]);
            quads[q + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[q + j], pairs[q + j + 2]);
        }
    }
    let mut columns = quads;
    for j in 0..4 {
        const EVEN: i32 = 0b10_00_10_00;
        const ODD: i32 = 0b11_01_11_01;
        let even = [0, 8].map(|q| _mm512_shuffle_i32x4::<EVEN>(quads[q + j], quads[q + 4 + j]));
        let odd = [0, 8].map(|q| _mm512_shuffle_i32x4::<ODD>(quads[q + j], quads[q + 4 + j]));
        columns[j] = _mm512_shuffle_i32x4::<EVEN>(even[0], even[1]);
        columns[4 + j] = _mm512_shuffle_i32x4::<EVEN>(odd[0], odd[1]);
        columns[8 + j] = _mm512_shuffle_i32x4::<ODD>(even[0], even[1]);
        columns[12 + j] = _mm512_shuffle_i32x4::<ODD>(odd[0], odd[1]);
    }
    columns
}

/// Eight full tiles: 0 to 3 hold the sums, `2 * first factor's half + lanes' half`, 4 and 5 the lanes, 6 and 7 the first factor.
static CONFIG: TileConfig = TileConfig::new([(16, 64); 8]);

/// Asks for a block before it is needed. Few queries wait for memory more than for arithmetic; many find it in the cache.
#[inline(always)]
fn fetch<const HALVES: usize, const PARTS: usize>(block: *const u16) {
    if HALVES == 1 {
        for line in 0..PARTS * 2 * TILE_BYTES / 64 {
            // SAFETY: prefetching changes nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(block.cast::<i8>().wrapping_add(line * 64)) };
        }
    }
}

#[inline(always)]
unsafe fn zero<const HALVES: usize>() {
    // SAFETY: the caller configured the tiles.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm2", options(nostack, nomem));
        if HALVES == 2 {
            asm!("tilezero tmm1", "tilezero tmm3", options(nostack, nomem));
        }
    }
}

/// # Safety
/// The tiles are configured; `from` leads to a block.
#[inline(always)]
unsafe fn load<const HALVES: usize>(from: *const u8) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{from} + {line}]", "tileloadd tmm2, [{from} + {line} + 1024]",
            from = in(reg) from, line = in(reg) 64usize, options(nostack, readonly),
        );
        if HALVES == 2 {
            asm!(
                "tileloadd tmm1, [{from} + {line} + 2048]", "tileloadd tmm3, [{from} + {line} + 3072]",
                from = in(reg) from, line = in(reg) 64usize, options(nostack, readonly),
            );
        }
    }
}

/// # Safety
/// The tiles are configured; `to` leads to a block.
#[inline(always)]
unsafe fn store<const HALVES: usize>(to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilestored [{to} + {line}], tmm0", "tilestored [{to} + {line} + 1024], tmm2",
            to = in(reg) to, line = in(reg) 64usize, options(nostack),
        );
        if HALVES == 2 {
            asm!(
                "tilestored [{to} + {line} + 2048], tmm1", "tilestored [{to} + {line} + 3072], tmm3",
                to = in(reg) to, line = in(reg) 64usize, options(nostack),
            );
        }
    }
}

/// Adds a block of keys or values times a block of lanes: high by low, high by high, then low by high if there is a low part. Each
/// sum is added to in this order, whatever the number of lanes.
///
/// # Safety
/// The tiles are configured; `a` and `b` lead to blocks.
#[inline(always)]
unsafe fn multiply<const HALVES: usize, const PARTS: usize>(a: *const u8, b: *const u8) {
    // SAFETY: the caller's promise.
    unsafe {
        if HALVES == 1 {
            asm!(
                "tileloadd tmm4, [{b} + {pair} + 64]",
                "tileloadd tmm6, [{a} + {line}]",
                "tdpbf16ps tmm0, tmm6, tmm4",
                "tileloadd tmm7, [{a} + {line} + 1024]",
                "tdpbf16ps tmm2, tmm7, tmm4",
                "tileloadd tmm5, [{b} + {pair}]",
                "tdpbf16ps tmm0, tmm6, tmm5",
                "tdpbf16ps tmm2, tmm7, tmm5",
                a = in(reg) a, b = in(reg) b, line = in(reg) 64usize, pair = in(reg) 128usize,
                options(nostack, readonly),
            );
            if PARTS == 2 {
                asm!(
                    "tileloadd tmm6, [{a} + {line} + 2048]",
                    "tdpbf16ps tmm0, tmm6, tmm5",
                    "tileloadd tmm7, [{a} + {line} + 3072]",
                    "tdpbf16ps tmm2, tmm7, tmm5",
                    a = in(reg) a, line = in(reg) 64usize, options(nostack, readonly),
                );
            }
        } else {
            asm!(
                "tileloadd tmm4, [{b} + {pair} + 64]",
                "tileloadd tmm6, [{a} + {line}]",
                "tdpbf16ps tmm0, tmm6, tmm4",
                "tileloadd tmm5, [{b} + {pair} + 2112]",
                "tdpbf16ps tmm1, tmm6, tmm5",
                "tileloadd tmm7, [{a} + {line} + 1024]",
                "tdpbf16ps tmm2, tmm7, tmm4",
                "tdpbf16ps tmm3, tmm7, tmm5",
                "tileloadd tmm4, [{b} + {pair}]",
                "tdpbf16ps tmm0, tmm6, tmm4",
                "tileloadd tmm5, [{b} + {pair} + 2048]",
                "tdpbf16ps tmm1, tmm6, tmm5",
                "tdpbf16ps tmm2, tmm7, tmm4",
                "tdpbf16ps tmm3, tmm7, tmm5",
                a = in(reg) a, b = in(reg) b, line = in(reg) 64usize, pair = in(reg) 128usize,
                options(nostack, readonly),
            );
            if PARTS == 2 {
                asm!(
                    "tileloadd tmm6, [{a} + {line} + 2048]",
                    "tdpbf16ps tmm0, tmm6, tmm4",
                    "tdpbf16ps tmm1, tmm6, tmm5",
                    "tileloadd tmm7, [{a} + {line} + 3072]",
                    "tdpbf16ps tmm2, tmm7, tmm4",
                    "tdpbf16ps tmm3, tmm7, tmm5",
                    a = in(reg) a, line = in(reg) 64usize, options(nostack, readonly),
                );
            }
        }
    }
}
