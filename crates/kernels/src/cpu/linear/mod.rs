//! `out = W x + bias`, for every stored format on every level.
//!
//! Work is cut by panels only, never along the inputs, and each output is summed in one order that depends on neither the
//! number of rows nor on who computes it. For quantised weights that order is: integers are summed exactly within a group (or
//! superblock), then `sum = fma(integer * activation scale, weight scale, sum)` group after group. All levels follow it, so
//! they agree bit for bit. For bf16 the tile unit has an order of its own, the same for 1 row and for 1,000.
//!
//! On a CPU with tiles, prompt rows may be multiplied with quantised weights in bf16 instead ([`PromptMath`]), again in one
//! order for any number of rows: tiles would spend most of their time on bringing integers back to apply scales.

mod dense;
mod scalar;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_bf16;
#[cfg(target_arch = "x86_64")]
mod amx_group;
#[cfg(target_arch = "x86_64")]
mod amx_packed12;
#[cfg(target_arch = "x86_64")]
mod amx_super;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod packed12_panel;
#[cfg(target_arch = "x86_64")]
mod prefetch;
#[cfg(target_arch = "x86_64")]
mod unpack_bf16;

use std::ops::Range;

use super::activations::{GroupActivations, GroupTarget, SplitActivations, SuperActivations, TILE};
use super::level::Level;
use super::matrix::{Format, GROUP, Matrix, PANEL, Panels, Segment, SendPtr};
use super::pool::Pool;
use super::rows;
use crate::Activation;

/// Rows that vectors multiply as fast as the tile unit does: they need no more time than the weights take to arrive, or integers
/// to come back from the tile unit. And they suffer less from whoever uses the core's second thread.
#[cfg(target_arch = "x86_64")]
const VECTOR_ROWS: usize = TILE;

/// What a row of activations is turned into for a matrix.
#[derive(Clone, Copy, Default)]
pub(crate) struct RequiredLayouts {
    pub(crate) group: bool,
    pub(crate) superblock: bool,
    pub(crate) split: bool,
    pub(crate) rounded: bool,
}

impl RequiredLayouts {
    /// `rounds`: the rows are rounded to bf16 for quantised weights.
    pub(crate) fn of(matrix: &Matrix, level: Level, rounds: bool) -> Self {
        let mut needs = Self::default();
        for segment in &matrix.segments {
            match segment.format {
                Format::Group { .. } | Format::Super { .. } if rounds => needs.rounded = true,
                Format::Group { .. } => needs.group = true,
                Format::Super { .. } => needs.superblock = true,
                Format::Bf16 | Format::Bf16Packed12 => needs.split |= level == Level::Amx,
                Format::F32 | Format::F16 => {}
            }
        }
        needs
    }
}

/// The activations of one call, in the layouts that [`RequiredLayouts`] names, and where results go.
pub(crate) struct Inputs<'a> {
    pub(crate) rows: usize,
    pub(crate) x: &'a [f32],
    pub(crate) group: &'a GroupActivations,
    pub(crate) superblock: &'a SuperActivations,
    pub(crate) split: &'a SplitActivations<2>,
    pub(crate) rounded: &'a SplitActivations<1>,
    /// Whether quantised weights are multiplied with `rounded`.
    pub(crate) rounds: bool,
}

/// Where the results of a segment go: row `r`, feature `f` at `start + r * stride + f`.
#[derive(Clone, Copy)]
struct Output<'a> {
    start: *mut f32,
    stride: usize,
    bias: Option<&'a [f32]>,
}

impl Output<'_> {
    /// Writes the features of one panel of one row, those beyond the matrix left out.
    ///
    /// # Safety
    /// The row and the panel are in range and nobody else writes them.
    #[inline(always)]
    unsafe fn put(&self, row: usize, panel: usize, rows: usize, values: &[f32; PANEL]) {
        let first = panel * PANEL;
        // SAFETY: the caller's promise.
        let out = unsafe { self.start.add(row * self.stride + first) };
        if first + PANEL <= rows && self.bias.is_none() {
            // SAFETY: a whole panel lies within the row. As one array, so that it becomes one store.
            unsafe { out.cast::<[f32; PANEL]>().write_unaligned(*values) };
            return;
        }
        for (i, value) in values.iter().enumerate().take(rows - first) {
            // SAFETY: feature `first + i` is one of the row's.
            unsafe { *out.add(i) = value + self.bias.map_or(0.0, |bias| bias[first + i]) };
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Output<'_> {
    /// Asks for the lines of 16 rows by some panels, which are about to be overwritten: rows lie far apart, and a store that
    /// misses the caches would hold up the ones after it.
    fn prefetch(&self, tile: usize, panels: Range<usize>, rows: usize) {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        for row in tile * TILE..rows.min((tile + 1) * TILE) {
            for panel in panels.clone() {
                let line = self.start.wrapping_add(row * self.stride + panel * PANEL);
                // SAFETY: a prefetch reads nothing; SSE is part of the architecture.
                unsafe { _mm_prefetch::<_MM_HINT_ET0>(line.cast()) };
            }
        }
    }
}

/// `out[r, :] = W x[r, :] + bias`, `out` being `[rows, matrix.rows]`.
pub(crate) fn linear(
    pool: &Pool,
    level: Level,
    matrix: &Matrix,
    inputs: &Inputs<'_>,
    bias: Option<&[f32]>,
    out: &mut [f32],
) {
    assert!(out.len() >= inputs.rows * matrix.rows && inputs.x.len() >= inputs.rows * matrix.cols);
    assert!(bias.is_none_or(|bias| bias.len() == matrix.rows));
    if inputs.rows == 0 {
        return;
    }
    let start = SendPtr(out.as_mut_ptr());
    let total: usize = matrix.segments.iter().map(Segment::panels).sum();
    let most = if inputs.rounds { usize::MAX } else { 64 };
    let chunks = Chunks::new(total, pool.threads(), panels_at_once(inputs.rows), most);
    pool.run(chunks.count(), &|_, index| {
        let mut logit_rows = chunks.get(index);
        for segment in &matrix.segments {
            let here = logit_rows.start.min(segment.panels())..logit_rows.end.min(segment.panels());
            if !here.is_empty() {
                let output = Output {
                    // SAFETY: the segment's first feature lies within a row of `out`.
                    start: unsafe { start.get().add(segment.first) },
                    stride: matrix.rows,
                    bias: bias.map(|bias| &bias[segment.first..segment.first + segment.rows]),
                };
                panels(level, segment, Share { panels: here, next: None }, inputs, output);
            }
            logit_rows =
                logit_rows.start.saturating_sub(segment.panels())..logit_rows.end.saturating_sub(segment.panels());
        }
    });
}

/// Panels that are walked together: for one row as many as registers hold, because memory delivers several slow streams faster than
/// one.
fn panels_at_once(rows: usize) -> usize {
    if rows == 1 { 8 } else { 4 }
}

/// The panels of each thread, of the same number but for one or two, and cut into chunks.
#[derive(Clone, Copy)]
struct Chunks {
    total: usize,
    threads: usize,
    /// Panels that stay together.
    unit: usize,
    /// Chunks of a thread. Some may be empty.
    each: usize,
}

impl Chunks {
    /// Chunks of each of several threads: enough for the others to take over from one that the system holds up.
    const PER_THREAD: usize = 6;

    fn new(total: usize, threads: usize, at_once: usize, most: usize) -> Self {
        let share = total.div_ceil(threads).next_multiple_of(2);
        let cuts = if threads == 1 { 1 } else { Self::PER_THREAD };
        let chunk = share.div_ceil(cuts).next_multiple_of(at_once).min(most);
        // The most that kernels walk together is a good width, not a necessary one.
        let unit = if at_once == 8 { 2 } else { at_once };
        Self { total, threads, unit, each: share.div_ceil(chunk.max(1)) }
    }

    /// The first panel of a thread. Two panels at least stay together: for few rows one by itself takes almost as long, and two
    /// make a group of the next layer's inputs.
    fn start(self, thread: usize) -> usize {
        (self.total * thread / self.threads).next_multiple_of(2).min(self.total)
    }

    fn count(self) -> usize {
        self.each * self.threads
    }

    /// Whether a thread has nothing to do after a chunk.
    fn is_last(self, index: usize) -> bool {
        self.get(index).end == self.start(index / self.each + 1)
    }

    fn get(self, index: usize) -> Range<usize> {
        let (thread, index) = (index / self.each, index % self.each);
        let (start, end) = (self.start(thread), self.start(thread + 1));
        let units = (end - start).div_ceil(self.unit);
        let cut = |index: usize| end.min(start + (units * index).div_ceil(self.each) * self.unit);
        cut(index)..cut(index + 1)
    }
}

/// The segments of a stack of gate and up projection, if two panels of each are a group of the next layer's inputs: then threads
/// can make the gated product as they go.
fn as_pair(segments: &[Segment]) -> Option<[&Segment; 2]> {
    let [gate, up] = segments else { return None };
    (gate.rows == up.rows && gate.rows.is_multiple_of(2 * PANEL)).then_some([gate, up])
}

pub(crate) fn is_pair(stack: &Matrix) -> bool {
    as_pair(&stack.segments).is_some()
}

/// Such a stack, if it is quantised.
pub(crate) fn as_gated(stack: &Matrix) -> Option<[&Segment; 2]> {
    as_pair(&stack.segments).filter(|pair| pair.iter().all(|segment| segment.is_quantised()))
}

/// Where [`gated_rows`] leaves what it makes of `rows` rows.
pub(crate) struct GatedOutput<'a> {
    /// `[rows, 2 n]`
    pub(crate) inner: &'a mut [f32],
    /// `[rows, n]`
    pub(crate) gated: &'a mut [f32],
    /// The same, quantised, if the next layer wants it so.
    pub(crate) group: Option<GroupTarget>,
}

/// `gated = activation(gate x) * (up x)` in one go, for few rows: what a thread makes it goes on with, so that little is left to do
/// while others wait.
pub(crate) fn gated_rows(
    pool: &Pool,
    level: Level,
    stack: &Matrix,
    inputs: &Inputs<'_>,
    activation: Activation,
    out: GatedOutput<'_>,
) {
    let pair = as_pair(&stack.segments).expect("a pair of projections");
    let (n, rows) = (stack.rows / 2, inputs.rows);
    assert!(out.inner.len() >= rows * 2 * n && out.gated.len() >= rows * n && inputs.x.len() >= rows * stack.cols);
    let (inner, gated) = (SendPtr(out.inner.as_mut_ptr()), SendPtr(out.gated.as_mut_ptr()));
    let chunks = Chunks::new(n / PANEL, pool.threads(), panels_at_once(rows), 64);
    pool.run(chunks.count(), &|_, index| {
        let here = chunks.get(index);
        if here.is_empty() {
            return;
        }
        let after = (!chunks.is_last(index)).then(|| pair[0].from(here.end));
        let next = [Some(pair[1].from(here.start)), after];
        let (first, len) = (here.start * PANEL, here.len() * PANEL);
        for (which, segment) in pair.into_iter().enumerate() {
            // SAFETY: the segment's first feature lies within a row of `inner`.
            let start = unsafe { inner.get().add(which * n) };
            let share = Share { panels: here.clone(), next: next[which] };
            panels(level, segment, share, inputs, Output { start, stride: 2 * n, bias: None });
        }
        for row in 0..rows {
            // SAFETY: all this lies within the rows, these features are nobody else's, and the first of them begins a group.
            unsafe {
                let gate = inner.get().add(row * 2 * n + first);
                let gate_up = [gate, gate.add(n)].map(|start| std::slice::from_raw_parts(start, len));
                let product = std::slice::from_raw_parts_mut(gated.get().add(row * n + first), len);
                rows::gate(level, product, gate_up[0], gate_up[1], activation);
                if let Some(places) = &out.group {
                    places.round(level, row, first / GROUP, product);
                }
            }
        }
    });
}

/// `out = activation(gate x) * (up x)` of prompt rows, rounded for the next layer.
#[cfg(target_arch = "x86_64")]
pub(crate) fn gated(
    pool: &Pool,
    stack: [&Segment; 2],
    inputs: &Inputs<'_>,
    activation: Activation,
    out: &mut SplitActivations<1>,
) {
    out.tiles = inputs.rows.div_ceil(TILE);
    let (values, tiles) = (SendPtr(out.values.as_mut_ptr()), out.tiles);
    let panels = stack[0].rows / PANEL;
    let chunks = Chunks::new(panels, pool.threads(), 4, usize::MAX);
    pool.run(chunks.count(), &|_, index| {
        let (panels, out) = (chunks.get(index), amx_bf16::RoundedOutput { values: values.get(), tiles });
        if !panels.is_empty() {
            // SAFETY: only a backend on a CPU with tiles rounds; the activations were filled for these rows, `out` was made for as
            // many rows and these columns, and chunks cover disjoint groups of it.
            unsafe { amx_bf16::gated(stack, panels, inputs, activation, out) };
        }
    });
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn gated(_: &Pool, _: [&Segment; 2], _: &Inputs<'_>, _: Activation, _: &mut SplitActivations<1>) {
    unreachable!("no level here has tiles");
}

/// Some panels of a segment, and those that the same thread reads after them, if they are not the next ones of the segment.
struct Share {
    panels: Range<usize>,
    next: Option<Panels>,
}

/// Computes all rows of some panels.
fn panels(level: Level, segment: &Segment, share: Share, inputs: &Inputs<'_>, out: Output<'_>) {
    let panels = share.panels.clone();
    // SAFETY: `level` is at most what this CPU has (`CpuBackend::new` checks it), the activations were filled for
    // `inputs.rows` rows of `segment.cols` inputs, and chunks cover disjoint panels of `out`.
    unsafe {
        match (segment.format, level) {
            #[cfg(target_arch = "x86_64")]
            (Format::Bf16Packed12, Level::Amx) if inputs.rows <= TILE => {
                amx_packed12::panels(segment, share, inputs, out)
            }
            #[cfg(target_arch = "x86_64")]
            (Format::Bf16 | Format::Bf16Packed12, Level::Amx) => amx_bf16::panels(segment, panels, inputs, out),
            (Format::Bf16Packed12, _) => unreachable!("packed for tiles only"),
            (Format::F32 | Format::F16 | Format::Bf16, _) => dense::panels(level, segment, panels, inputs, out),
            #[cfg(target_arch = "x86_64")]
            (Format::Group { .. } | Format::Super { .. }, _) if inputs.rounds => {
                amx_bf16::rounded(segment, panels, inputs, out);
            }
            #[cfg(target_arch = "x86_64")]
            (Format::Group { .. }, Level::Amx) if inputs.rows > VECTOR_ROWS => {
                amx_group::panels(segment, panels, inputs, out);
            }
            #[cfg(target_arch = "x86_64")]
            (Format::Super { .. }, Level::Amx) if inputs.rows > VECTOR_ROWS => {
                amx_super::panels(segment, panels, inputs, out);
            }
            #[cfg(target_arch = "x86_64")]
            (_, Level::Amx | Level::Avx512) => avx512::panels(segment, share, inputs, out),
            #[cfg(target_arch = "x86_64")]
            (_, Level::Avx2) => avx2::panels(segment, panels, inputs, out),
            _ => scalar::panels(segment, panels, inputs, out),
        }
    }
}

#[cfg(test)]
mod tests;
