//! Paged attention: keys and values in pages of 32 tokens, online softmax page by page with a running maximum.
//!
//! A query visits the pages of its own sequence in order. Page boundaries depend only on positions, so a result does not
//! depend on chunking or on the rest of the batch. The kernels in `vector` and `tiles` define the layout of a page.

#[cfg(target_arch = "x86_64")]
mod tiles;
mod vector;

use std::ops::Range;

use super::buffer::RowWriter;
use super::level::Level;
use super::matrix::SendPtr;
use super::memory::Aligned;
use super::pool::Pool;
use super::rows::{self, Angles, for_rows};
use super::step::Step;
use crate::{Attention, BackendError, HEAD_DIM_MAX, Heads, KvShape, PAGE_TOKENS, Span};

/// (query, head) pairs of one work item. A page is read once for all of them.
const TILE_PAIRS: usize = 32;

/// The element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    F32,
    /// Stored as `Bf16` on [`Level::Amx`], because AMX tiles multiply bf16.
    F16,
    /// Laid out for tiles: only on [`Level::Amx`].
    Bf16,
    /// Two bf16 parts, 16 bits of mantissa together, laid out for tiles: only on [`Level::Amx`].
    Split,
}

impl KvType {
    /// The type that is stored on `level`; `None` if the level does not support this type.
    pub fn on(self, level: Level) -> Option<Self> {
        match (self, level) {
            (Self::F16, Level::Amx) => Some(Self::Bf16),
            (Self::Bf16 | Self::Split, level) if level != Level::Amx => None,
            (kept, _) => Some(kept),
        }
    }

    /// The type that a CPU of this level uses in place of this one: itself, or one of the same size if the level does not
    /// support it.
    pub fn nearest_on(self, level: Level) -> Self {
        match self {
            Self::Bf16 if level != Level::Amx => Self::F16,
            Self::Split if level != Level::Amx => Self::F32,
            supported => supported,
        }
    }

    /// Bytes of the keys and values of one token in one layer. Heads are padded to whole vectors (16) or, for tiles, to 32.
    pub const fn token_bytes(self, shape: KvShape) -> usize {
        let dim = match self {
            Self::F32 | Self::F16 => vector::width(shape.head_dim),
            Self::Bf16 | Self::Split => shape.head_dim.next_multiple_of(32),
        };
        2 * shape.kv_heads * dim * self.bytes()
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 | Self::Split => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// The KV pages of one layer.
pub struct Kv {
    pub(super) shape: KvShape,
    pub(super) pages: usize,
    store: Store,
}

/// `[page][head]`, each with the keys first and then the values.
enum Store {
    F32(Aligned<f32>),
    F16(Aligned<u16>),
    /// The number of bf16 parts of an element, and the parts.
    #[cfg(target_arch = "x86_64")]
    Tiles(usize, Aligned<u16>),
}

impl Kv {
    /// `kind` must be supported on the backend's level.
    pub(super) fn new(shape: KvShape, pages: usize, kind: KvType) -> Result<Self, BackendError> {
        let dim = shape.head_dim;
        if dim == 0 || dim > HEAD_DIM_MAX || !dim.is_multiple_of(2) {
            return Err(BackendError::Device(format!(
                "heads of {dim} elements are not supported: their size is even and at most {HEAD_DIM_MAX}"
            )));
        }
        let what = "the KV cache";
        let len = |per_page: usize| {
            let heads = pages.checked_mul(2 * shape.kv_heads);
            let len = heads.and_then(|heads| heads.checked_mul(per_page));
            len.ok_or(BackendError::OutOfMemory { what, bytes: usize::MAX })
        };
        let store = match kind {
            KvType::F32 => Store::F32(Aligned::zeroed(what, len(vector::page_elements(dim))?)?),
            KvType::F16 => Store::F16(Aligned::zeroed(what, len(vector::page_elements(dim))?)?),
            #[cfg(target_arch = "x86_64")]
            KvType::Bf16 | KvType::Split => {
                let parts = if kind == KvType::Split { 2 } else { 1 };
                Store::Tiles(parts, Aligned::zeroed(what, len(tiles::page_numbers(dim, parts))?)?)
            }
            #[cfg(not(target_arch = "x86_64"))]
            KvType::Bf16 | KvType::Split => unreachable!("no tiles on this architecture"),
        };
        Ok(Self { shape, pages, store })
    }

    /// Whether the tile kernels read this cache. They apply norm and RoPE themselves, write results in any
    /// `ActivationLayout`, and can round queries and softmax weights to bf16.
    pub(super) fn is_tiled(&self) -> bool {
        match &self.store {
            Store::F32(_) | Store::F16(_) => false,
            #[cfg(target_arch = "x86_64")]
            Store::Tiles(..) => true,
        }
    }

    fn memory(&mut self) -> KvMemory {
        match &mut self.store {
            Store::F32(store) => KvMemory::F32(SendPtr(store.as_mut_ptr())),
            Store::F16(store) => KvMemory::F16(SendPtr(store.as_mut_ptr())),
            #[cfg(target_arch = "x86_64")]
            Store::Tiles(parts, store) => KvMemory::Tiles(*parts, SendPtr(store.as_mut_ptr())),
        }
    }
}

/// One sequence's rows and page table.
pub(super) struct SequenceRows<'a> {
    pub(super) span: Span,
    pub(super) pages: &'a [u32],
}

impl SequenceRows<'_> {
    /// The pages to which this step's rows are written.
    fn written(&self) -> Range<usize> {
        let (start, end) = (self.span.position as usize, (self.span.position + self.span.rows) as usize);
        start / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS)
    }
}

/// The pointers of a [`Store`], for use by several workers.
enum KvMemory {
    F32(SendPtr<f32>),
    F16(SendPtr<u16>),
    #[cfg(target_arch = "x86_64")]
    Tiles(usize, SendPtr<u16>),
}

/// The norm and RoPE that are applied to queries and keys.
pub(super) struct RowNormRope<'a> {
    pub(super) level: Level,
    pub(super) query_norm: Option<&'a [f32]>,
    pub(super) key_norm: Option<&'a [f32]>,
    pub(super) eps: f32,
    pub(super) angles: Angles<'a>,
}

impl RowNormRope<'_> {
    /// Applies norm and RoPE to all queries and keys of a row, in place.
    pub(super) fn apply_row(&self, row: &mut [f32], attention: &Attention, position: usize) {
        for (heads, norm) in [(attention.query, self.query_norm), (attention.key, self.key_norm)] {
            if let Some(norm) = norm {
                rows::rms_norm_heads(self.level, row, heads, norm, self.eps);
            }
        }
        self.angles.rotate(self.level, row, attention.query_and_key(), position);
    }

    /// Applies norm and RoPE to one head, from `head` into `to`.
    fn norm_rope_head(&self, to: &mut [f32], head: &[f32], norm: Option<&[f32]>, position: usize) {
        match norm {
            Some(norm) => rows::rms_norm(self.level, to, head, norm, self.eps),
            None => to.copy_from_slice(head),
        }
        self.angles.rotate(self.level, to, Heads { first: 0, count: 1, dim: head.len() }, position);
    }
}

/// The arguments of one attention op.
pub(super) struct AttentionCall<'a> {
    /// `[rows, cols]`
    pub(super) qkv: &'a [f32],
    pub(super) cols: usize,
    pub(super) attention: &'a Attention,
    /// Norm and RoPE, if they have not been applied to `qkv` yet. Only for tiles.
    pub(super) turn: Option<RowNormRope<'a>>,
    /// The first row whose queries and softmax weights are rounded to bf16, if keys and values are. Only for tiles.
    pub(super) rounded: usize,
    /// Only the tile kernels write layouts other than `Plain`.
    pub(super) out: RowWriter,
}

/// Consecutive rows of a step that are written to one page, for one head.
struct PageRows<'a> {
    /// The slot of the first row in the page.
    slot: usize,
    count: usize,
    /// The position of the page's first slot.
    position: usize,
    /// Norm and RoPE, if they have not been applied to the keys yet.
    turn: Option<&'a RowNormRope<'a>>,
    /// `qkv` from the first row's key on; `values` likewise.
    keys: &'a [f32],
    values: &'a [f32],
    cols: usize,
    dim: usize,
}

impl PageRows<'_> {
    /// The key of a slot after norm and RoPE. If they still have to be applied, the result is in `scratch`.
    fn key<'b>(&'b self, slot: usize, scratch: &'b mut [f32; HEAD_DIM_MAX]) -> &'b [f32] {
        let key = &self.keys[(slot - self.slot) * self.cols..][..self.dim];
        match self.turn {
            None => key,
            Some(turn) => {
                let scratch = &mut scratch[..self.dim];
                turn.norm_rope_head(scratch, key, turn.key_norm, self.position + slot);
                scratch
            }
        }
    }

    fn value(&self, slot: usize) -> &[f32] {
        &self.values[(slot - self.slot) * self.cols..][..self.dim]
    }
}

/// Stores the keys and values of every row of every sequence, then computes `out = softmax(scale q k^T) v`.
pub(super) fn attend(pool: &Pool, level: Level, step: &Step, kv: &mut Kv, asked: AttentionCall<'_>) {
    let KvShape { kv_heads, head_dim: dim } = kv.shape;
    let Attention { query, key, value, .. } = asked.attention;
    assert!(key.count == kv_heads && value.count == kv_heads && query.count.is_multiple_of(kv_heads));
    assert!(key.dim == dim && value.dim == dim && query.dim == dim);
    assert!(kv.is_tiled() || (asked.turn.is_none() && matches!(asked.out, RowWriter::Plain(_))));
    assert!(asked.rounded <= step.rows());
    let (shape, memory) = (kv.shape, kv.memory());
    let common = AttentionContext { level, shape, memory, asked, group: query.count / kv_heads };
    let count = step.spans.len();
    let items = |sequence: &SequenceRows<'_>| (sequence.span.rows as usize * common.group).div_ceil(TILE_PAIRS);
    let (mut total, mut most) = (0, 0);
    for items in (0..count).map(|s| items(&step.sequence(s))) {
        (total, most) = (total + items, most.max(items));
    }
    // If each (sequence, KV head) has only one item, that item stores the keys and values itself, into the cache of the
    // core that reads them next.
    let together = most <= 1;
    if !together {
        common.write_all(pool, step);
    }
    pool.run(total * kv_heads, &|_, index| {
        // Items of the same head run one after another, because they read the same pages. Later rows attend to more keys, so
        // they run first: the longest item should not be the last.
        let (kv_head, mut item) = (index / total, total - 1 - index % total);
        for s in 0..count {
            let sequence = step.sequence(s);
            let here = items(&sequence);
            if item < here {
                if together {
                    // SAFETY: this is the only item of the sequence and the head.
                    sequence.written().for_each(|page| unsafe { common.write(&sequence, page, kv_head) });
                }
                return AttentionTile { common: &common, sequence, kv_head, first: item * TILE_PAIRS }.run();
            }
            item -= here;
        }
    });
}

/// Data shared by all items of a step.
struct AttentionContext<'a> {
    level: Level,
    shape: KvShape,
    memory: KvMemory,
    asked: AttentionCall<'a>,
    /// Query heads per KV head.
    group: usize,
}

impl AttentionContext<'_> {
    /// Stores the keys and values of every row of every sequence. One worker writes all rows of a (page, head), so that
    /// workers do not share cache lines.
    fn write_all(&self, pool: &Pool, step: &Step) {
        let KvShape { kv_heads, head_dim: dim } = self.shape;
        let count = step.spans.len();
        let total: usize = (0..count).map(|s| step.sequence(s).written().len()).sum();
        // An element costs several times as much as in row ops: it is rounded and written to a different cache line.
        let elements = (step.rows() * 2 * dim * 4).div_ceil(total.max(1));
        for_rows(pool, total * kv_heads, elements, &|index| {
            let (head, mut index) = (index % kv_heads, index / kv_heads);
            for s in 0..count {
                let sequence = step.sequence(s);
                let pages = sequence.written();
                if index < pages.len() {
                    // SAFETY: no other worker has this page and head.
                    return unsafe { self.write(&sequence, pages.start + index, head) };
                }
                index -= pages.len();
            }
        });
    }

    /// Stores this step's keys and values of one page of the sequence, for one head.
    ///
    /// # Safety
    /// No other thread accesses that page and head during the call.
    unsafe fn write(&self, sequence: &SequenceRows<'_>, page: usize, head: usize) {
        let SequenceRows { span, pages } = sequence;
        let start = (span.position as usize).max(page * PAGE_TOKENS);
        let end = ((span.position + span.rows) as usize).min((page + 1) * PAGE_TOKENS);
        let AttentionCall { qkv, cols, attention, turn, .. } = &self.asked;
        let first = (span.row as usize + start - span.position as usize) * cols;
        let (KvShape { kv_heads, head_dim: dim }, Attention { key, value, .. }) = (self.shape, attention);
        let rows = PageRows {
            slot: start % PAGE_TOKENS,
            count: end - start,
            position: page * PAGE_TOKENS,
            turn: turn.as_ref(),
            keys: &qkv[first + key.first + head * dim..],
            values: &qkv[first + value.first + head * dim..],
            cols: *cols,
            dim,
        };
        let at = pages[page] as usize * kv_heads + head;
        // SAFETY: the backend has checked that the pages exist; the caller guarantees exclusive access. The CPU has
        // `level`, and a `Tiles` store exists only on a CPU with tiles.
        unsafe {
            match &self.memory {
                KvMemory::F32(store) => {
                    let keys = store.get().add(2 * at * vector::page_elements(dim));
                    vector::write_f32(&rows, dim, keys, keys.add(vector::page_elements(dim)));
                }
                KvMemory::F16(store) => {
                    let keys = store.get().add(2 * at * vector::page_elements(dim));
                    vector::write_f16(self.level, &rows, dim, keys, keys.add(vector::page_elements(dim)));
                }
                #[cfg(target_arch = "x86_64")]
                KvMemory::Tiles(1, store) => tiles::write::<1>(&rows, dim, store.get(), at),
                #[cfg(target_arch = "x86_64")]
                KvMemory::Tiles(_, store) => tiles::write::<2>(&rows, dim, store.get(), at),
            }
        }
    }
}

/// Up to [`TILE_PAIRS`] (query, head) pairs of one sequence that share a KV head.
struct AttentionTile<'a> {
    common: &'a AttentionContext<'a>,
    sequence: SequenceRows<'a>,
    kv_head: usize,
    /// The first pair; pair `i` is query row `i / group`, head `i % group`.
    first: usize,
}

impl AttentionTile<'_> {
    fn run(&self) {
        let level = self.common.level;
        // SAFETY: the CPU has `level`, and a `Tiles` store exists only on a CPU with tiles; the backend has checked the
        // pages; only this item writes its pairs' parts of `out`.
        unsafe {
            match &self.common.memory {
                KvMemory::F32(store) => vector::item::<false>(level, self, store.get().cast()),
                KvMemory::F16(store) => vector::item::<true>(level, self, store.get().cast()),
                #[cfg(target_arch = "x86_64")]
                KvMemory::Tiles(1, store) => tiles::item::<1>(self, store.get()),
                #[cfg(target_arch = "x86_64")]
                KvMemory::Tiles(_, store) => tiles::item::<2>(self, store.get()),
            }
        }
    }

    fn head_dim(&self) -> usize {
        self.common.shape.head_dim
    }

    /// How many pairs there are.
    fn count(&self) -> usize {
        TILE_PAIRS.min(self.sequence.span.rows as usize * self.common.group - self.first)
    }

    /// The query row and the head of pair `i`.
    fn pair(&self, i: usize) -> (usize, usize) {
        let (query, head) = ((self.first + i) / self.common.group, (self.first + i) % self.common.group);
        (query, self.kv_head * self.common.group + head)
    }

    /// The query of pair `i` as it is in `qkv`, before or after norm and RoPE.
    fn query(&self, i: usize) -> &[f32] {
        let ((query, head), dim) = (self.pair(i), self.head_dim());
        let row = self.sequence.span.row as usize + query;
        let AttentionCall { qkv, cols, attention, .. } = &self.common.asked;
        &qkv[row * cols + attention.query.first + head * dim..][..dim]
    }

    fn scale(&self) -> f32 {
        self.common.asked.attention.scale
    }

    /// Whether queries and softmax weights are rounded to bf16.
    #[cfg(target_arch = "x86_64")]
    fn is_rounded(&self) -> bool {
        self.sequence.span.row as usize >= self.common.asked.rounded
    }

    fn position(&self, i: usize) -> usize {
        self.sequence.span.position as usize + self.pair(i).0
    }

    /// The positions that pair `i` attends to.
    fn keys(&self, i: usize) -> Range<usize> {
        let end = self.position(i) + 1;
        self.common.asked.attention.window.map_or(0, |window| end.saturating_sub(window))..end
    }

    /// The positions that any pair attends to. Both ends of `keys` grow with the pair.
    fn seen(&self) -> Range<usize> {
        self.keys(0).start..self.keys(self.count() - 1).end
    }

    /// The index of a page of the sequence among the store's (page, head) pairs.
    fn page(&self, page: usize) -> usize {
        self.sequence.pages[page] as usize * self.common.shape.kv_heads + self.kv_head
    }

    /// The row and the first column of the result of pair `i`.
    fn place(&self, i: usize) -> (usize, usize) {
        let (query, head) = self.pair(i);
        (self.sequence.span.row as usize + query, head * self.head_dim())
    }

    /// Pointer to the result of pair `i` in a `Plain` target.
    fn out(&self, i: usize) -> *mut f32 {
        let (row, first) = self.place(i);
        match &self.common.asked.out {
            // `out` is `[rows, heads * head_dim]`.
            RowWriter::Plain(out) => {
                out.get().wrapping_add(row * self.common.asked.attention.query.count * self.head_dim() + first)
            }
            RowWriter::Rounded(_) | RowWriter::Split(_) => unreachable!("only the tile kernels write these layouts"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kv_type_has_a_nearest_one_on_every_level() {
        for level in Level::ALL {
            for kv in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Split] {
                let nearest = kv.nearest_on(level);
                assert!(nearest.on(level).is_some(), "{kv:?} on {level}");
                assert_eq!(nearest.bytes(), kv.bytes());
                assert!(kv.on(level).is_none() || nearest == kv);
            }
        }
    }
}
