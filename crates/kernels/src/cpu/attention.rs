//! Paged attention: keys and values in pages of 32 tokens, scores and sums page after page with a running maximum.
//!
//! A page of one K/V head holds its keys transposed, `[head_dim][32]`, and its values as `[32][head_dim]`, so that a vector
//! is 16 keys when scores are made and 16 dimensions when values are summed, and nothing is added across lanes. A query
//! walks the pages of its own sequence in order, at page boundaries that depend on positions alone: its result depends
//! neither on the step it came in with nor on what else is in that step.

use super::lanes::for_each_level;
use super::level::Level;
use super::matrix::SendPtr;
use super::memory::Aligned;
use super::pool::Pool;
use crate::{Attention, BackendError, Heads, KvShape, PAGE_TOKENS, Span};

/// The largest head that the working memory on the stack has room for.
pub(super) const HEAD_DIM_MAX: usize = 256;
/// (query, head) pairs that one work item takes together, so that a page is read once for all of them.
const ITEM_ROWS: usize = 32;
/// Pairs whose scores are kept in registers together.
const BLOCK_ROWS: usize = 8;

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    F32,
    F16,
}

/// The K/V pages of one layer.
pub struct Kv {
    pub(super) shape: KvShape,
    pub(super) pages: usize,
    store: Store,
}

enum Store {
    F32 { keys: Aligned<f32>, values: Aligned<f32> },
    F16 { keys: Aligned<u16>, values: Aligned<u16> },
}

impl Kv {
    pub(super) fn new(shape: KvShape, pages: usize, kind: KvType) -> Result<Self, BackendError> {
        if shape.head_dim > HEAD_DIM_MAX || !shape.head_dim.is_multiple_of(16) {
            let dim = shape.head_dim;
            return Err(BackendError::Device(format!(
                "heads of {dim} elements are not supported: at most {HEAD_DIM_MAX}, and a multiple of 16"
            )));
        }
        let what = "the K/V cache";
        let len = [pages, shape.kv_heads, shape.head_dim, PAGE_TOKENS]
            .into_iter()
            .try_fold(1usize, usize::checked_mul)
            .ok_or(BackendError::OutOfMemory { what, bytes: usize::MAX })?;
        let store = match kind {
            KvType::F32 => Store::F32 { keys: Aligned::zeroed(what, len)?, values: Aligned::zeroed(what, len)? },
            KvType::F16 => Store::F16 { keys: Aligned::zeroed(what, len)?, values: Aligned::zeroed(what, len)? },
        };
        Ok(Self { shape, pages, store })
    }

    /// Elements of one head's keys (or values) in one page.
    fn page_elements(&self) -> usize {
        self.shape.head_dim * PAGE_TOKENS
    }
}

/// One sequence's rows and page table.
pub(super) struct Sequence<'a> {
    pub(super) span: Span,
    pub(super) pages: &'a [u32],
}

/// Where several workers put the keys and values of different rows.
pub(super) struct KvWriter {
    shape: KvShape,
    store: WriterStore,
}

enum WriterStore {
    F32 { keys: SendPtr<f32>, values: SendPtr<f32> },
    F16 { keys: SendPtr<u16>, values: SendPtr<u16> },
}

impl Kv {
    pub(super) fn writer(&mut self) -> KvWriter {
        let store = match &mut self.store {
            Store::F32 { keys, values } => {
                WriterStore::F32 { keys: SendPtr(keys.as_mut_ptr()), values: SendPtr(values.as_mut_ptr()) }
            }
            Store::F16 { keys, values } => {
                WriterStore::F16 { keys: SendPtr(keys.as_mut_ptr()), values: SendPtr(values.as_mut_ptr()) }
            }
        };
        KvWriter { shape: self.shape, store }
    }
}

impl KvWriter {
    /// Stores the keys and values of one row (`qkv`) in a slot of a page.
    ///
    /// # Safety
    /// The page exists, no other worker writes the same slot, and the CPU has `level`.
    pub(super) unsafe fn write(&self, level: Level, page: usize, slot: usize, qkv: &[f32], key: Heads, value: Heads) {
        let (heads, dim) = (self.shape.kv_heads, self.shape.head_dim);
        for head in 0..heads {
            let at = (page * heads + head) * dim * PAGE_TOKENS;
            let (k, v) = (&qkv[key.first + head * dim..][..dim], &qkv[value.first + head * dim..][..dim]);
            // SAFETY: the slot's elements lie within the page; the caller's promise.
            unsafe {
                match &self.store {
                    WriterStore::F32 { keys, values } => {
                        scatter(k, keys.get().add(at + slot));
                        std::ptr::copy_nonoverlapping(v.as_ptr(), values.get().add(at + slot * dim), dim);
                    }
                    WriterStore::F16 { keys, values } => {
                        let mut halves = [0u16; HEAD_DIM_MAX];
                        to_halves(level, k, halves.as_mut_ptr());
                        scatter(&halves[..dim], keys.get().add(at + slot));
                        to_halves(level, v, values.get().add(at + slot * dim));
                    }
                }
            }
        }
    }
}

/// Puts a key into its column of a page.
unsafe fn scatter<T: Copy>(key: &[T], column: *mut T) {
    for (d, value) in key.iter().enumerate() {
        // SAFETY: the caller's column has `key.len()` elements, one in each row of 32.
        unsafe { *column.add(d * PAGE_TOKENS) = *value };
    }
}

/// # Safety
/// `out` has room for all of `values`, whose length is a multiple of 16; the CPU has `level`.
unsafe fn to_halves(level: Level, values: &[f32], out: *mut u16) {
    // SAFETY: the caller's promise.
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

/// `out = softmax(scale q k^T) v` for every row of every sequence.
#[allow(clippy::too_many_arguments)]
pub(super) fn attend<'a>(
    pool: &Pool,
    level: Level,
    sequences: &(dyn Fn(usize) -> Sequence<'a> + Sync),
    count: usize,
    out: SendPtr<f32>,
    qkv: &[f32],
    qkv_cols: usize,
    kv: &Kv,
    attention: &Attention,
) {
    let (heads, kv_heads) = (attention.query.count, kv.shape.kv_heads);
    assert!(heads.is_multiple_of(kv_heads) && attention.query.dim == kv.shape.head_dim);
    let group = heads / kv_heads;
    let items = |span: &Span| (span.rows as usize * group).div_ceil(ITEM_ROWS);
    let total: usize = (0..count).map(|s| items(&sequences(s).span)).sum();
    pool.run(total * kv_heads, &|_, index| {
        let (kv_head, mut item) = (index % kv_heads, index / kv_heads);
        // Later rows see more keys: take them first, so that the longest item does not come last.
        item = total - 1 - item;
        for s in 0..count {
            let sequence = sequences(s);
            let here = items(&sequence.span);
            if item < here {
                let work = Item {
                    sequence,
                    group,
                    kv_head,
                    first: item * ITEM_ROWS,
                    qkv,
                    qkv_cols,
                    kv,
                    attention,
                    out: out.get(),
                };
                return work.run(level);
            }
            item -= here;
        }
    });
}

/// Up to [`ITEM_ROWS`] (query, head) pairs of one sequence that share a K/V head.
struct Item<'a> {
    sequence: Sequence<'a>,
    /// Query heads per K/V head.
    group: usize,
    kv_head: usize,
    /// The first pair; pair `i` is query row `i / group`, head `i % group`.
    first: usize,
    qkv: &'a [f32],
    qkv_cols: usize,
    kv: &'a Kv,
    attention: &'a Attention,
    out: *mut f32,
}

/// The state of an item's pairs while they walk the pages.
struct State {
    query: [*const f32; ITEM_ROWS],
    /// Keys that a pair sees: positions `low..high`.
    low: [usize; ITEM_ROWS],
    high: [usize; ITEM_ROWS],
    max: [f32; ITEM_ROWS],
    sum: [f32; ITEM_ROWS],
    out: [[f32; HEAD_DIM_MAX]; ITEM_ROWS],
}

impl Item<'_> {
    fn run(&self, level: Level) {
        // SAFETY: the CPU has `level`; pages were checked by `begin`; each pair's part of `out` belongs to this item.
        unsafe {
            match (level, &self.kv.store) {
                #[cfg(target_arch = "x86_64")]
                (Level::Avx512 | Level::Amx, Store::F32 { keys, values }) => {
                    avx512::item::<false>(self, keys.as_ptr().cast(), values.as_ptr().cast());
                }
                #[cfg(target_arch = "x86_64")]
                (Level::Avx512 | Level::Amx, Store::F16 { keys, values }) => {
                    avx512::item::<true>(self, keys.as_ptr().cast(), values.as_ptr().cast());
                }
                #[cfg(target_arch = "x86_64")]
                (Level::Avx2, Store::F32 { keys, values }) => {
                    avx2::item::<false>(self, keys.as_ptr().cast(), values.as_ptr().cast());
                }
                #[cfg(target_arch = "x86_64")]
                (Level::Avx2, Store::F16 { keys, values }) => {
                    avx2::item::<true>(self, keys.as_ptr().cast(), values.as_ptr().cast());
                }
                (_, Store::F32 { keys, values }) => {
                    scalar::item::<false>(self, keys.as_ptr().cast(), values.as_ptr().cast());
                }
                (_, Store::F16 { keys, values }) => {
                    scalar::item::<true>(self, keys.as_ptr().cast(), values.as_ptr().cast());
                }
            }
        }
    }

    /// Fills the state of every pair; returns how many there are.
    fn start(&self, state: &mut State) -> usize {
        let Span { row, rows, position, .. } = self.sequence.span;
        let count = ITEM_ROWS.min(rows as usize * self.group - self.first);
        for i in 0..count {
            let (query, head) = ((self.first + i) / self.group, (self.first + i) % self.group);
            let head = self.kv_head * self.group + head;
            let at =
                (row as usize + query) * self.qkv_cols + self.attention.query.first + head * self.kv.shape.head_dim;
            state.query[i] = self.qkv[at..at + self.kv.shape.head_dim].as_ptr();
            state.high[i] = position as usize + query + 1;
            state.low[i] = self.attention.window.map_or(0, |window| state.high[i].saturating_sub(window));
            (state.max[i], state.sum[i]) = (f32::NEG_INFINITY, 0.0);
            state.out[i][..self.kv.shape.head_dim].fill(0.0);
        }
        count
    }

    /// Where pair `i` puts its result.
    fn out(&self, i: usize) -> *mut f32 {
        let dim = self.kv.shape.head_dim;
        let (query, head) = ((self.first + i) / self.group, (self.first + i) % self.group);
        let row = self.sequence.span.row as usize + query;
        let head = self.kv_head * self.group + head;
        // SAFETY: `out` is `[rows, heads * head_dim]`.
        unsafe { self.out.add((row * self.attention.query.count + head) * dim) }
    }
}

for_each_level! {
    unsafe fn halves(values: &[f32], out: *mut u16) {
        for (i, chunk) in values.chunks_exact(16).enumerate() {
            store_f16(out.add(i * 16), load(chunk.as_ptr()));
        }
    }

    /// Element `at` of a page and the 15 after it.
    #[inline]
    unsafe fn load_kv<const HALF: bool>(page: *const u8, at: usize) -> V {
        if HALF { load_f16(page.cast::<u16>().add(at)) } else { load(page.cast::<f32>().add(at)) }
    }

    unsafe fn item<const HALF: bool>(work: &Item<'_>, keys: *const u8, values: *const u8) {
        let mut state = std::mem::MaybeUninit::<State>::uninit();
        let state = &mut *state.as_mut_ptr();
        let count = work.start(state);
        let (dim, size) = (work.kv.shape.head_dim, if HALF { 2 } else { 4 });
        let low = state.low[..count].iter().copied().min().unwrap_or(0);
        let high = state.high[..count].iter().copied().max().unwrap_or(0);
        for page in low / PAGE_TOKENS..high.div_ceil(PAGE_TOKENS) {
            let index = work.sequence.pages[page] as usize * work.kv.shape.kv_heads + work.kv_head;
            let at = index * work.kv.page_elements() * size;
            let (keys, values) = (keys.add(at), values.add(at));
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
            let (out, sum) = (work.out(i), splat(state.sum[i]));
            for d in (0..dim).step_by(16) {
                store(out.add(d), div(load(state.out[i].as_ptr().add(d)), sum));
            }
        }
    }

    /// `R` pairs from `i` with the 32 keys of one page.
    unsafe fn block<const HALF: bool, const R: usize>(work: &Item<'_>, state: &mut State, i: usize, page: usize, keys: *const u8, values: *const u8) {
        let dim = work.kv.shape.head_dim;
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
            // The keys of this page that the pair sees, as slots.
            let from = state.low[i].saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS);
            let to = state.high[i].saturating_sub(page * PAGE_TOKENS).min(PAGE_TOKENS);
            used = used.max(to);
            let hidden = splat(f32::NEG_INFINITY);
            for (half, score) in scores[r].iter_mut().enumerate() {
                let first = half * 16;
                let scaled = mul(*score, splat(work.attention.scale));
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
        let mut fade = [0f32; 16];
        store(fade.as_mut_ptr(), exp(load(old.as_ptr())));
        for r in 0..R {
            state.sum[i + r] = state.sum[i + r].mul_add(fade[r], sum(scores[r][0]));
        }
        let mut d = 0;
        while d + 32 <= dim {
            let mut sums: [[V; 2]; R] = std::array::from_fn(|r| {
                let out = state.out[i + r].as_ptr().add(d);
                [mul(load(out), splat(fade[r])), mul(load(out.add(16)), splat(fade[r]))]
            });
            for key in 0..used {
                let v = [load_kv::<HALF>(values, key * dim + d), load_kv::<HALF>(values, key * dim + d + 16)];
                for r in 0..R {
                    let p = splat(weights[r][key]);
                    sums[r][0] = fma(p, v[0], sums[r][0]);
                    sums[r][1] = fma(p, v[1], sums[r][1]);
                }
            }
            for r in 0..R {
                let out = state.out[i + r].as_mut_ptr().add(d);
                store(out, sums[r][0]);
                store(out.add(16), sums[r][1]);
            }
            d += 32;
        }
        if d < dim {
            for r in 0..R {
                let out = state.out[i + r].as_mut_ptr().add(d);
                let mut sum = mul(load(out), splat(fade[r]));
                for key in 0..used {
                    sum = fma(splat(weights[r][key]), load_kv::<HALF>(values, key * dim + d), sum);
                }
                store(out, sum);
            }
        }
    }
}
