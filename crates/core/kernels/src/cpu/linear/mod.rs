//! `out = W x + bias`, for every weight format on every level.
//!
//! Work is split by panels only, never along the inputs. Each output is summed in an order that depends neither on the
//! number of rows nor on the thread. For quantised weights, integers are summed exactly within a group (or superblock),
//! then `sum = fma(integer * activation scale, weight scale, sum)` group after group. All levels use this order, so they
//! agree bit for bit. For bf16 the tile unit has its own order, which is the same for 1 row and for 1,000.
//!
//! Exact rows have two int8 parts, which the kernels multiply as two rows and add when they write the result. So all that holds
//! for rows in one part holds for them too.
//!
//! On a CPU with tiles, prefill rows may be multiplied with quantised weights in bf16 instead ([`PrefillMath`]), also in one
//! order for any number of rows. In int8, most of the time would go into moving integers out of the tiles to apply scales.

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

use super::activations::{Bf16SplitActivations, Q8Activations, Q8KActivations, Q8Writer, TILE};
use super::level::Level;
use super::matrix::{Format, GROUP, Matrix, MatrixSegment, PANEL, Panels, SendPtr};
use super::options::RowMath;
use super::pool::Pool;
use super::rows;
use crate::Activation;

/// Up to this many rows of the int8 layouts, the vector kernels are as fast as the tile kernels: the time is bound by reading weights, or by
/// moving integers out of the tile unit. Vector kernels also lose less when another program uses the core's second thread.
#[cfg(target_arch = "x86_64")]
const VECTOR_ROWS: usize = TILE;

/// The activation layouts that the kernels of a matrix read.
#[derive(Clone, Copy, Default)]
pub(crate) struct RequiredLayouts {
    pub(crate) group: bool,
    pub(crate) superblock: bool,
    pub(crate) split: bool,
    pub(crate) rounded: bool,
    /// The int8 parts of a row.
    pub(crate) parts: usize,
}

impl RequiredLayouts {
    /// `math`: how the rows are multiplied with quantised weights.
    pub(crate) fn of(matrix: &Matrix, level: Level, math: RowMath) -> Self {
        let mut needs = Self { parts: math.parts(), ..Self::default() };
        for segment in &matrix.segments {
            match segment.format {
                Format::Group { .. } | Format::Super { .. } if math == RowMath::Bf16 => needs.rounded = true,
                Format::Group { .. } => needs.group = true,
                Format::Super { .. } => needs.superblock = true,
                Format::Bf16 | Format::Bf16Packed12 => needs.split |= level == Level::Amx,
                Format::F32 | Format::F16 => {}
            }
        }
        needs
    }
}

/// The activations of one call, in the layouts that [`RequiredLayouts`] names.
pub(crate) struct Inputs<'a> {
    pub(crate) rows: usize,
    pub(crate) x: &'a [f32],
    pub(crate) group: &'a Q8Activations,
    pub(crate) superblock: &'a Q8KActivations,
    pub(crate) split: &'a Bf16SplitActivations<2>,
    pub(crate) rounded: &'a Bf16SplitActivations<1>,
    /// Whether quantised weights are multiplied with `rounded`.
    pub(crate) rounds: bool,
}

/// The output of a segment: row `r`, feature `f` is written to `start + r * stride + f`.
#[derive(Clone, Copy)]
struct Output<'a> {
    start: *mut f32,
    stride: usize,
    bias: Option<&'a [f32]>,
}

impl Output<'_> {
    /// Writes the features of one panel of one row, except for the padding after the last feature.
    ///
    /// # Safety
    /// The row and the panel are in range and no other thread writes them.
    #[inline(always)]
    unsafe fn put(&self, row: usize, panel: usize, rows: usize, values: &[f32; PANEL]) {
        let first = panel * PANEL;
        // SAFETY: guaranteed by the caller.
        let out = unsafe { self.start.add(row * self.stride + first) };
        if first + PANEL <= rows && self.bias.is_none() {
            // SAFETY: a whole panel lies within the row. It is written as one array, so that it compiles to one store.
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
    /// Prefetches, for writing, the cache lines of a tile of rows, in `parts` parts, by some panels. Rows are far apart in
    /// memory, and a store that misses the cache would delay the stores after it.
    fn prefetch(&self, tile: usize, panels: Range<usize>, rows: usize, parts: usize) {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        let per_tile = TILE / parts;
        for row in tile * per_tile..rows.min((tile + 1) * per_tile) {
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
    let total: usize = matrix.segments.iter().map(MatrixSegment::panels).sum();
    let most = if inputs.rounds { usize::MAX } else { 64 };
    let chunks = Chunks::new(total, pool.threads(), panels_at_once(inputs.rows), most);
    pool.run(chunks.count(), &|_, index| {
        let mut range = chunks.get(index);
        for segment in &matrix.segments {
            let here = range.start.min(segment.panels())..range.end.min(segment.panels());
            if !here.is_empty() {
                let output = Output {
                    // SAFETY: the segment's first feature lies within a row of `out`.
                    start: unsafe { start.get().add(segment.first) },
                    stride: matrix.rows,
                    bias: bias.map(|bias| &bias[segment.first..segment.first + segment.rows]),
                };
                panels(level, segment, PanelRange { panels: here, next: None }, inputs, output);
            }
            range = range.start.saturating_sub(segment.panels())..range.end.saturating_sub(segment.panels());
        }
    });
}

/// Panels that are processed together. For one row, as many as the registers hold, because memory delivers several slow
/// streams faster than one.
fn panels_at_once(rows: usize) -> usize {
    if rows == 1 { 8 } else { 4 }
}

/// Splits `total` panels evenly over the threads, and the panels of each thread into chunks.
#[derive(Clone, Copy)]
struct Chunks {
    total: usize,
    threads: usize,
    /// Chunks start and end at multiples of this many panels.
    unit: usize,
    /// Chunks per thread. Some may be empty.
    each: usize,
}

impl Chunks {
    /// Chunks per thread if there are several threads: enough for other threads to take over from a descheduled one.
    const PER_THREAD: usize = 6;

    fn new(total: usize, threads: usize, at_once: usize, most: usize) -> Self {
        let share = total.div_ceil(threads).next_multiple_of(2);
        let cuts = if threads == 1 { 1 } else { Self::PER_THREAD };
        let chunk = share.div_ceil(cuts).next_multiple_of(at_once).min(most);
        // A chunk need not be a multiple of 8 panels, even though 8 at a time is fastest.
        let unit = if at_once == 8 { 2 } else { at_once };
        Self { total, threads, unit, each: share.div_ceil(chunk.max(1)) }
    }

    /// The first panel of a thread, always even: for few rows one panel takes almost as long as two, and two panels are a
    /// group of the next layer's inputs.
    fn start(self, thread: usize) -> usize {
        (self.total * thread / self.threads).next_multiple_of(2).min(self.total)
    }

    fn count(self) -> usize {
        self.each * self.threads
    }

    /// Whether the chunk is the last one of its thread.
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

/// The gate and up segments of a stacked matrix, if their rows are whole groups of the next layer's inputs. Then each thread
/// can compute the gated product of its own panels.
fn gate_up_segments(segments: &[MatrixSegment]) -> Option<[&MatrixSegment; 2]> {
    let [gate, up] = segments else { return None };
    (gate.rows == up.rows && gate.rows.is_multiple_of(2 * PANEL)).then_some([gate, up])
}

pub(crate) fn has_gate_up(stack: &Matrix) -> bool {
    gate_up_segments(&stack.segments).is_some()
}

/// The same, if both segments are quantised.
pub(crate) fn quantised_gate_up(stack: &Matrix) -> Option<[&MatrixSegment; 2]> {
    gate_up_segments(&stack.segments).filter(|pair| pair.iter().all(|segment| segment.is_quantised()))
}

/// The output buffers of [`gated_decode`].
pub(crate) struct GatedOutput<'a> {
    /// `[rows, 2 n]`
    pub(crate) inner: &'a mut [f32],
    /// `[rows, n]`
    pub(crate) gated: &'a mut [f32],
    /// The same, quantised, if the next layer reads that layout.
    pub(crate) group: Option<Q8Writer>,
}

/// `gated = activation(gate x) * (up x)` in one job, for few rows. Each thread gates and quantises the features that it has
/// computed, so there is no extra synchronisation between the ops.
pub(crate) fn gated_decode(
    pool: &Pool,
    level: Level,
    stack: &Matrix,
    inputs: &Inputs<'_>,
    activation: Activation,
    out: GatedOutput<'_>,
) {
    let pair = gate_up_segments(&stack.segments).expect("a pair of projections");
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
            let share = PanelRange { panels: here.clone(), next: next[which] };
            panels(level, segment, share, inputs, Output { start, stride: 2 * n, bias: None });
        }
        for row in 0..rows {
            // SAFETY: all accesses are within the rows, no other chunk has these features, and the first of them starts a
            // group.
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

/// `out = activation(gate x) * (up x)` of prefill rows, rounded to bf16 for the next layer.
#[cfg(target_arch = "x86_64")]
pub(crate) fn gated(
    pool: &Pool,
    stack: [&MatrixSegment; 2],
    inputs: &Inputs<'_>,
    activation: Activation,
    out: &mut Bf16SplitActivations<1>,
) {
    out.tiles = inputs.rows.div_ceil(TILE);
    let (values, tiles) = (SendPtr(out.values.as_mut_ptr()), out.tiles);
    let panels = stack[0].rows / PANEL;
    let chunks = Chunks::new(panels, pool.threads(), 4, usize::MAX);
    pool.run(chunks.count(), &|_, index| {
        let (panels, out) = (chunks.get(index), amx_bf16::RoundedOutput { values: values.get(), tiles });
        if !panels.is_empty() {
            // SAFETY: the backend rounds to bf16 only on a CPU with tiles; the activations were filled for these rows,
            // `out` was allocated for these rows and columns, and chunks cover disjoint groups of it.
            unsafe { amx_bf16::gated(stack, panels, inputs, activation, out) };
        }
    });
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn gated(_: &Pool, _: [&MatrixSegment; 2], _: &Inputs<'_>, _: Activation, _: &mut Bf16SplitActivations<1>) {
    unreachable!("no level on this architecture has tiles");
}

/// The panels of a segment that one chunk processes, and the panels that the same thread reads after them, if these are not
/// the next panels of the segment (for prefetching).
struct PanelRange {
    panels: Range<usize>,
    next: Option<Panels>,
}

/// Computes some panels of all rows.
fn panels(level: Level, segment: &MatrixSegment, share: PanelRange, inputs: &Inputs<'_>, out: Output<'_>) {
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
            (Format::Bf16Packed12, _) => unreachable!("used only on AMX"),
            (Format::F32 | Format::F16 | Format::Bf16, _) => dense::panels(level, segment, panels, inputs, out),
            #[cfg(target_arch = "x86_64")]
            (Format::Group { .. } | Format::Super { .. }, _) if inputs.rounds => {
                amx_bf16::rounded(segment, panels, inputs, out);
            }
            #[cfg(target_arch = "x86_64")]
            (Format::Group { .. }, Level::Amx) if inputs.rows * inputs.group.parts > VECTOR_ROWS => {
                amx_group::panels(segment, panels, inputs, out);
            }
            #[cfg(target_arch = "x86_64")]
            (Format::Super { .. }, Level::Amx) if inputs.rows * inputs.superblock.parts > VECTOR_ROWS => {
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
