//! bf16 tile kernels: for bf16 weights, and for the prompt rows of quantised weights.
//!
//! Four tiles of sums stay in the tile unit while inputs pass by. For bf16 weights they are two panels by the high and the low part
//! of 16 rows, which are added at the end. Prompt rows are rounded to bf16, and their four tiles are four panels: a superblock
//! of these is unpacked to bf16, which fills most of the first-level cache, and all rows pass by it. That costs as much as
//! multiplying some 80 rows; int8 tiles would have to come back for scales after every 32 inputs of every row.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{BLOCK, TILE, round_bf16};
use super::super::matrix::{GROUP, GROUPS_PER_SUPER, LINE, PANEL, Segment};
use super::super::rows::gate_lanes;
use super::super::tiles::{TileConfig, release};
use super::amx::{Lines, PANELS_AT_ONCE, batches, tile_store, tile_zero};
use super::unpack_bf16::{TILE_BYTES, unpack_panel};
use super::{Inputs, Output};
use crate::Activation;

/// Panels that are worked on together.
const PANELS: usize = 4;
/// Row tiles that pass by an unpacked superblock.
const TILES_AT_ONCE: usize = 32;
/// Rounded activations that stay in the second-level cache while the panels of a chunk pass by.
const ACTIVATION_BYTES: usize = 1536 * 1024;
/// How far ahead of their use activations are asked for.
const AHEAD: usize = 2 * TILE_BYTES;
/// Bytes of one panel's superblock, unpacked.
const UNPACKED: usize = GROUPS_PER_SUPER * TILE_BYTES;

/// Multiplies prompt rows, rounded to bf16, with quantised weights, unpacked to bf16.
///
/// # Safety
/// As for [`super::avx512::panels`], and this process may use tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn rounded(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    let fours = panels.clone().step_by(PANELS).map(|first| {
        let count = PANELS.min(panels.end - first);
        (std::array::from_fn(|p| (segment, first + p.min(count - 1))), count)
    });
    // SAFETY: passed on.
    unsafe { pass(fours, inputs, Target::Rows(out)) };
}

/// The same for a stack of gate and up projection, whose products are gated and rounded at once: they go to `out` as the activations
/// of the next linear layer, two panels of each being one of its groups.
///
/// # Safety
/// As for [`rounded`]; `pairs` are pairs of panels of both segments, whole ones; `out` has room for the rows and nobody else
/// writes these groups.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn gated(
    [gate, up]: [&Segment; 2],
    pairs: Range<usize>,
    inputs: &Inputs<'_>,
    activation: Activation,
    out: RoundedOutput,
) {
    let fours =
        pairs.map(|pair| ([(gate, 2 * pair), (gate, 2 * pair + 1), (up, 2 * pair), (up, 2 * pair + 1)], PANELS));
    // SAFETY: passed on.
    unsafe { pass(fours, inputs, Target::Gated(out, activation)) };
}

/// Where gated results go: the values of a [`SplitActivations`](super::super::activations::SplitActivations) of one part.
#[derive(Clone, Copy)]
pub(crate) struct RoundedOutput {
    pub(crate) values: *mut u16,
    pub(crate) tiles: usize,
}

enum Target<'a> {
    /// Four panels of one segment, as f32 rows.
    Rows(Output<'a>),
    /// Two panels of the gate and the same two of the up projection.
    Gated(RoundedOutput, Activation),
}

/// Takes all rows past each four panels (of which the first so many count).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn pass<'a>(
    fours: impl Iterator<Item = ([(&'a Segment, usize); PANELS], usize)> + Clone,
    inputs: &Inputs<'_>,
    target: Target<'_>,
) {
    let mut weights = MaybeUninit::<[Lines<{ UNPACKED / LINE }>; PANELS]>::uninit();
    let mut sums = MaybeUninit::<[[Lines<TILE>; PANELS]; TILES_AT_ONCE]>::uninit();
    let Some(([(segment, _), ..], _)) = fours.clone().next() else { return };
    let tiles = inputs.rows.div_ceil(TILE);
    let batch = (ACTIVATION_BYTES / (segment.cols * 2 * TILE)).clamp(1, TILES_AT_ONCE);
    // SAFETY: passed on.
    unsafe {
        TileConfig::new([(16, 64); 8]).load();
        for first in (0..tiles).step_by(batch) {
            let mut rest = fours.clone().peekable();
            while let Some((panels, count)) = rest.next() {
                let (weights, sums) = (weights.as_mut_ptr().cast(), sums.as_mut_ptr().cast());
                let next = rest.peek().map(|(panels, _)| *panels);
                let four = Four { panels, count, next, inputs, target: &target, weights, sums };
                four.run(first..tiles.min(first + batch));
            }
        }
        release();
    }
}

/// Four panels on their way past the rows.
struct Four<'a> {
    panels: [(&'a Segment, usize); PANELS],
    /// How many of them differ.
    count: usize,
    /// What comes after them.
    next: Option<[(&'a Segment, usize); PANELS]>,
    inputs: &'a Inputs<'a>,
    target: &'a Target<'a>,
    /// A superblock of each panel, unpacked.
    weights: *mut u8,
    /// A tile of sums for each tile of rows and panel, while more inputs are to come.
    sums: *mut u8,
}

impl Four<'_> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn run(&self, tiles: Range<usize>) {
        let groups = self.panels[0].0.cols / GROUP;
        for first in (0..groups).step_by(GROUPS_PER_SUPER) {
            let depth = GROUPS_PER_SUPER.min(groups - first);
            let is_last = first + depth == groups;
            for (p, (segment, panel)) in self.panels.into_iter().enumerate().take(self.count) {
                // SAFETY: there is room for four superblocks; the groups are the segment's.
                unsafe { unpack_panel(segment, panel, first..first + depth, self.weights.add(p * UNPACKED)) };
            }
            for tile in tiles.clone() {
                self.prefetch_weights(tile - tiles.start, tiles.len(), first + depth);
                // SAFETY: `sums` has four tiles for each tile of rows; the activations hold these tiles.
                unsafe {
                    let sums = self.sums.add((tile - tiles.start) * PANELS * TILE_BYTES);
                    if first == 0 {
                        tile_zero()
                    } else {
                        tile_load(sums)
                    }
                    self.multiply(tile, first, depth, is_last);
                    match self.target {
                        _ if !is_last => tile_store(sums),
                        Target::Rows(out) => self.put(out, tile, sums),
                        Target::Gated(out, activation) => self.gate(out, *activation, tile, sums),
                    }
                }
            }
        }
    }

    /// Adds the products of a tile of rows with the unpacked superblock. The last time, it asks for the lines that the results
    /// will go to: rows lie far apart, and a store that misses the caches holds up the ones after it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn multiply(&self, tile: usize, first: usize, depth: usize, is_last: bool) {
        let acts = self.inputs.rounded;
        let rows = TILE.div_ceil(depth);
        let mut out = match self.target {
            Target::Rows(out) if is_last => {
                Some((out.start.wrapping_add(tile * TILE * out.stride + self.panels[0].1 * PANEL), out.stride))
            }
            _ => None,
        };
        // SAFETY: the activations hold this (superblock, tile); `weights` has a superblock of four panels, of which those beyond
        // `count` give sums that nobody reads. A prefetch may point anywhere.
        unsafe {
            let at = first / GROUPS_PER_SUPER * acts.tiles + tile;
            let (mut a, mut b) = (acts.values.as_ptr().add(at * BLOCK).cast::<u8>(), self.weights.cast_const());
            for _ in 0..depth {
                for line in 0..TILE {
                    _mm_prefetch::<_MM_HINT_T0>(a.wrapping_add(AHEAD + line * LINE).cast());
                }
                asm!(
                    "tileloadd tmm4, [{a} + {stride}]",
                    "tileloadd tmm5, [{b} + {stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    "tileloadd tmm6, [{b} + {stride} + {UNPACKED}]",
                    "tdpbf16ps tmm1, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {stride} + 2 * {UNPACKED}]",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tileloadd tmm5, [{b} + {stride} + 3 * {UNPACKED}]",
                    "tdpbf16ps tmm3, tmm4, tmm5",
                    a = in(reg) a, b = in(reg) b, stride = in(reg) LINE, UNPACKED = const UNPACKED,
                    options(nostack, readonly),
                );
                if let Some((row, stride)) = &mut out {
                    for _ in 0..rows {
                        for panel in 0..PANELS {
                            _mm_prefetch::<_MM_HINT_ET0>(row.wrapping_add(panel * PANEL).cast());
                        }
                        *row = row.wrapping_add(*stride);
                    }
                }
                (a, b) = (a.add(TILE_BYTES), b.add(TILE_BYTES));
            }
        }
    }

    /// Writes finished sums to their rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn put(&self, out: &Output<'_>, tile: usize, sums: *mut u8) {
        let (segment, first) = self.panels[0];
        let is_whole = self.count == PANELS && (first + PANELS) * PANEL <= segment.rows;
        // SAFETY: 16 whole rows and four whole panels lie within the output; otherwise `sums` has room for four tiles.
        unsafe {
            if is_whole && (tile + 1) * TILE <= self.inputs.rows && out.bias.is_none() {
                asm!(
                    "tilestored [{out} + {stride}], tmm0",
                    "tilestored [{out} + {stride} + 64], tmm1",
                    "tilestored [{out} + {stride} + 128], tmm2",
                    "tilestored [{out} + {stride} + 192], tmm3",
                    out = in(reg) out.start.add(tile * TILE * out.stride + first * PANEL),
                    stride = in(reg) out.stride * 4, options(nostack),
                );
                return;
            }
            tile_store(sums);
            for row in tile * TILE..self.inputs.rows.min((tile + 1) * TILE) {
                for p in 0..self.count {
                    let values = sums.add((p * TILE + row % TILE) * LINE);
                    out.put(row, first + p, segment.rows, &*values.cast::<[f32; PANEL]>());
                }
            }
        }
    }

    /// Gates finished sums and writes them as one tile of the next layer's activations.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn gate(&self, out: &RoundedOutput, activation: Activation, tile: usize, sums: *mut u8) {
        let group = self.panels[0].1 / 2;
        let at = (group / GROUPS_PER_SUPER * out.tiles + tile) * BLOCK + group % GROUPS_PER_SUPER * TILE * GROUP;
        // SAFETY: `sums` has room for four tiles, `out` for this one; AVX-512 is there.
        unsafe {
            tile_store(sums);
            let sums = |p: usize, row: usize| _mm512_load_ps(sums.cast::<f32>().add((p * TILE + row) * PANEL));
            for row in 0..TILE.min(self.inputs.rows - tile * TILE) {
                let line = out.values.add(at + row * GROUP);
                for p in 0..2 {
                    let value = gate_lanes(sums(p, row), sums(p + 2, row), activation);
                    _mm256_store_si256(line.add(p * PANEL).cast(), _mm512_cvtepi32_epi16(round_bf16(value)));
                }
            }
        }
    }

    /// Asks for a share of the packed weights that are unpacked next: the next superblock of these panels, or the first of the next
    /// ones. Called once for each of `tiles` tiles, it spreads the requests over the time that this superblock takes.
    #[inline]
    fn prefetch_weights(&self, tile: usize, tiles: usize, next: usize) {
        let groups = self.panels[0].0.cols / GROUP;
        let (panels, next) = match self.next {
            _ if next < groups => (self.panels, next),
            Some(panels) => (panels, 0),
            None => return,
        };
        for (segment, panel) in panels {
            let record = segment.scales_at / groups;
            let bytes = GROUPS_PER_SUPER * record;
            let part = bytes.div_ceil(tiles).next_multiple_of(LINE);
            let start = segment.bytes.as_ptr().wrapping_add(panel * segment.stride + next * record);
            for line in (tile * part..bytes.min((tile + 1) * part)).step_by(LINE) {
                // SAFETY: a prefetch reads nothing and may point anywhere; SSE is part of the architecture.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(start.wrapping_add(line).cast()) };
            }
        }
    }
}

#[inline(always)]
unsafe fn tile_load(sums: *const u8) {
    // SAFETY: the caller has four tiles there.
    unsafe {
        asm!(
            "tileloadd tmm0, [{c} + {stride}]",
            "tileloadd tmm1, [{c} + {stride} + 1024]",
            "tileloadd tmm2, [{c} + {stride} + 2048]",
            "tileloadd tmm3, [{c} + {stride} + 3072]",
            c = in(reg) sums, stride = in(reg) LINE, options(nostack, readonly),
        );
    }
}

/// Multiplies f32 activations, in two parts, with bf16 weights.
///
/// # Safety
/// As for [`super::avx512::panels`], and this process may use tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    if inputs.rows == 1 {
        // SAFETY: passed on.
        return unsafe { single_row(segment, panels, inputs, out) };
    }
    // Fewer than 16 rows make shorter tiles.
    let (rows, weights) = ((inputs.rows.min(TILE), 64), (16, 64));
    // SAFETY: passed on.
    unsafe {
        TileConfig::new([rows, rows, rows, rows, rows, rows, weights, weights]).load();
        for (tiles, panels) in batches(inputs.rows, segment.cols * 4, panels, PANELS_AT_ONCE) {
            for panel in panels.clone().step_by(2) {
                let second = (panel + 1).min(panels.end - 1);
                for tile in tiles.clone() {
                    tile_pair(segment, [panel, second], tile, inputs, out);
                }
            }
        }
        release();
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn tile_pair(segment: &Segment, panels: [usize; 2], tile: usize, inputs: &Inputs<'_>, out: Output<'_>) {
    let steps = segment.cols.div_ceil(GROUP);
    let mut sums = MaybeUninit::<[Lines<TILE>; PANELS]>::uninit();
    let count = if panels[0] == panels[1] { 1 } else { 2 };
    out.prefetch(tile, panels[0]..panels[0] + count, inputs.rows);
    // SAFETY: a panel has `steps` tiles of 1 KiB, the split activations have as many for each part of this tile.
    unsafe {
        tile_zero();
        let mut b = panels.map(|panel| segment.panel(panel).as_ptr());
        for index in 0..steps.div_ceil(GROUPS_PER_SUPER) {
            let a = inputs.split.values.as_ptr().add((index * inputs.split.tiles + tile) * 2 * BLOCK).cast::<u8>();
            for step in 0..GROUPS_PER_SUPER.min(steps - index * GROUPS_PER_SUPER) {
                let high = a.add(step * TILE_BYTES);
                asm!(
                    "tileloadd tmm4, [{high} + {stride}]",
                    "tileloadd tmm6, [{b0} + {stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b1} + {stride}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{low} + {stride}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    high = in(reg) high, low = in(reg) high.add(2 * BLOCK), b0 = in(reg) b[0], b1 = in(reg) b[1],
                    stride = in(reg) LINE, options(nostack, readonly),
                );
                b = b.map(|b| b.add(TILE_BYTES));
            }
        }
        tile_store(sums.as_mut_ptr().cast());
        let sums = sums.as_ptr().cast::<f32>();
        for (p, panel) in panels.into_iter().enumerate().take(count) {
            for r in 0..TILE.min(inputs.rows - tile * TILE) {
                let part = |part: usize| _mm512_load_ps(sums.add(((part * 2 + p) * TILE + r) * PANEL));
                let mut values = [0f32; PANEL];
                _mm512_storeu_ps(values.as_mut_ptr(), _mm512_add_ps(part(0), part(1)));
                out.put(tile * TILE + r, panel, segment.rows, &values);
            }
        }
    }
}

/// One row: its two parts are the rows of one tile, and four panels stream from memory together.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn single_row(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    const PARTS: usize = 2;
    /// How far ahead of its use a tile of weights is asked for.
    const AHEAD: usize = 2048;
    let sum = (PARTS, 64);
    let config = TileConfig::new([sum, sum, sum, sum, (PARTS, 64), (16, 64), (16, 64), (16, 64)]);
    let steps = segment.cols.div_ceil(GROUP);
    // SAFETY: a panel has `steps` tiles of 1 KiB, the split activations have as many for each part of this row; rows of
    // the tile of activations are its parts, a block apart. A prefetch may point anywhere.
    unsafe {
        config.load();
        for first in panels.clone().step_by(4) {
            let four: [usize; 4] = std::array::from_fn(|p| (first + p).min(panels.end - 1));
            let mut b = four.map(|panel| segment.panel(panel).as_ptr());
            tile_zero();
            for step in 0..steps {
                let at = step / GROUPS_PER_SUPER * inputs.split.tiles * PARTS * BLOCK
                    + step % GROUPS_PER_SUPER * TILE * GROUP;
                let a = inputs.split.values.as_ptr().add(at);
                // Beyond the end of these panels the next four begin.
                let wrap = if (step + AHEAD / TILE_BYTES) < steps { 0 } else { 3 * segment.stride };
                for b in b {
                    for line in 0..16 {
                        _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(AHEAD + wrap + line * LINE).cast());
                    }
                }
                asm!(
                    "tileloadd tmm4, [{a} + {parts}]",
                    "tileloadd tmm5, [{b0} + {stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    "tileloadd tmm6, [{b1} + {stride}]",
                    "tdpbf16ps tmm1, tmm4, tmm6",
                    "tileloadd tmm7, [{b2} + {stride}]",
                    "tdpbf16ps tmm2, tmm4, tmm7",
                    "tileloadd tmm5, [{b3} + {stride}]",
                    "tdpbf16ps tmm3, tmm4, tmm5",
                    a = in(reg) a, b0 = in(reg) b[0], b1 = in(reg) b[1], b2 = in(reg) b[2], b3 = in(reg) b[3],
                    parts = in(reg) BLOCK * 2, stride = in(reg) LINE, options(nostack, readonly),
                );
                b = b.map(|b| b.wrapping_add(TILE_BYTES));
            }
            let mut sums = MaybeUninit::<[Lines<TILE>; PANELS]>::uninit();
            tile_store(sums.as_mut_ptr().cast());
            for panel in first..panels.end.min(first + 4) {
                let part = |part: usize| {
                    _mm512_load_ps(sums.as_ptr().cast::<f32>().add(((panel - first) * TILE + part) * PANEL))
                };
                let mut values = [0f32; PANEL];
                _mm512_storeu_ps(values.as_mut_ptr(), _mm512_add_ps(part(0), part(1)));
                out.put(0, panel, segment.rows, &values);
            }
        }
        release();
    }
}
