//! bf16 tile kernels: for bf16 weights, and for prefill rows with quantised weights.
//!
//! Activations are one bf16 part (prefill rows, for quantised weights) or two, high and low (for bf16 weights). Four tiles
//! of sums stay in the tile unit over all inputs. The products of both parts are added to the same sums, group after group,
//! high before low, so the order is the same for one row and for many. The four tiles are two panels by 32 rows, so that
//! each load serves at least two products; a single tile of rows, such as one decode row, uses four panels instead. This
//! matters most when another program shares the core: loads and products then alternate, and a load costs nearly as much as
//! a product. All rows are multiplied with as many panels as fit in the second-level cache; quantised panels are first
//! unpacked to bf16.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{BLOCK, Bf16SplitActivations, TILE, round_bf16};
use super::super::matrix::{Format, GROUP, GROUPS_PER_SUPER, LINE, MatrixSegment, PANEL};
use super::super::tiles::{TileConfig, release};
use super::amx::{Lines, tile_store, tile_zero};
use super::unpack_bf16::{TILE_BYTES, unpack_panel};
use super::{Inputs, Output};
use crate::Activation;

/// Tiles of sums.
const SUMS: usize = 4;
/// Weights that stay in the second-level cache while all rows are multiplied with them.
const BLOCK_BYTES: usize = 768 * 1024;

thread_local! {
    /// Unpacked panels, one after the other. Each thread reuses this buffer between calls.
    static UNPACKED: RefCell<Vec<Lines<{ TILE_BYTES / LINE }>>> = const { RefCell::new(Vec::new()) };
}

/// Multiplies prefill rows, rounded to bf16, with quantised weights, unpacked to bf16.
///
/// # Safety
/// As for [`super::avx512::panels`], and this process may use tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn rounded(segment: &MatrixSegment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    // SAFETY: the caller upholds the contract.
    unsafe { segment_rows(segment, panels, inputs.rounded, inputs.rows, out) };
}

/// The same for stacked gate and up projections. The products are gated, rounded to bf16 and written to `out` as the
/// activations of the next linear layer.
///
/// # Safety
/// As for [`rounded`]; `panels` are whole panels of both segments; `out` has space for the rows, and no other thread writes
/// these columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn gated(
    [gate, up]: [&MatrixSegment; 2],
    panels: Range<usize>,
    inputs: &Inputs<'_>,
    activation: Activation,
    out: RoundedOutput,
) {
    let pair = |pair: usize| [(gate, panels.start + pair), (up, panels.start + pair)];
    // SAFETY: the caller upholds the contract.
    unsafe { pass(panels.len(), pair, inputs.rounded, inputs.rows, &Target::Gated(out, activation)) };
}

/// Multiplies f32 activations, in two parts, with bf16 weights.
///
/// # Safety
/// As for [`rounded`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &MatrixSegment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    // SAFETY: the caller upholds the contract.
    unsafe { segment_rows(segment, panels, inputs.split, inputs.rows, out) };
}

/// The output of gated results: the values of a [`Bf16SplitActivations`] of one part.
#[derive(Clone, Copy)]
pub(crate) struct RoundedOutput {
    pub(crate) values: *mut u16,
    pub(crate) tiles: usize,
}

enum Target<'a> {
    /// Two panels of one segment (or twice the last one), as f32 rows.
    Rows(Output<'a>),
    /// A panel of the gate and the same one of the up projection.
    Gated(RoundedOutput, Activation),
}

type Pair<'a> = [(&'a MatrixSegment, usize); 2];

/// Multiplies all rows with some panels of a segment.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn segment_rows<const PARTS: usize>(
    segment: &MatrixSegment,
    panels: Range<usize>,
    acts: &Bf16SplitActivations<PARTS>,
    rows: usize,
    out: Output<'_>,
) {
    let pair = |pair: usize| {
        let first = panels.start + 2 * pair;
        [(segment, first), (segment, (first + 1).min(panels.end - 1))]
    };
    // SAFETY: the caller upholds the contract.
    unsafe { pass(panels.len().div_ceil(2), pair, acts, rows, &Target::Rows(out)) };
}

/// Multiplies all rows with `pairs` pairs of panels.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn pass<'a, const PARTS: usize>(
    pairs: usize,
    pair: impl Fn(usize) -> Pair<'a>,
    acts: &Bf16SplitActivations<PARTS>,
    rows: usize,
    target: &Target<'_>,
) {
    let first = pair(0)[0].0;
    let groups = first.cols.div_ceil(GROUP);
    let is_packed = first.format != Format::Bf16;
    let panel_bytes = groups * TILE_BYTES;
    // With one tile of rows the weights are used once, so they need not stay in the cache.
    let most = if rows <= TILE { 2 } else { (BLOCK_BYTES / (2 * panel_bytes)).max(1) };
    // Blocks of equal size.
    let at_once = pairs.div_ceil(pairs.div_ceil(most));
    UNPACKED.with_borrow_mut(|unpacked| {
        let len = if is_packed { at_once * 2 * groups } else { 0 };
        if unpacked.len() < len {
            unpacked.resize(len, Lines([[0; LINE]; TILE_BYTES / LINE]));
        }
        let scratch: *mut u8 = unpacked.as_mut_ptr().cast();
        let half = |p: usize, tile: usize| {
            let panels = pair(p);
            let weights = match is_packed {
                true => [0, 1].map(|half| scratch.wrapping_add((p % at_once * 2 + half) * panel_bytes).cast_const()),
                false => panels.map(|(segment, panel)| segment.panel(panel).as_ptr()),
            };
            TileHalf { panels, weights, rows: tile * TILE..rows.min((tile + 1) * TILE) }
        };
        let mut configured = None;
        // SAFETY: the buffer has space for `at_once` pairs of panels; the caller guarantees the rest.
        unsafe {
            for first in (0..pairs).step_by(at_once) {
                let block = first..pairs.min(first + at_once);
                if is_packed {
                    for p in block.clone() {
                        for (half, (segment, panel)) in pair(p).into_iter().enumerate() {
                            unpack_panel(segment, panel, scratch.add(((p - first) * 2 + half) * panel_bytes));
                        }
                    }
                }
                for tile in (0..rows.div_ceil(TILE)).step_by(2) {
                    let is_square = (tile + 1) * TILE < rows;
                    let (panels_on, rows_on) = if is_square { (0, 1) } else { (1, 0) };
                    for p in block.clone().step_by(1 + panels_on) {
                        let second = (p + panels_on).min(block.end - 1);
                        let halves = [half(p, tile), half(second, tile + rows_on)];
                        let count = if is_square || second > p { 2 } else { 1 };
                        let quad = TileBlock { halves, count, is_square, acts, target, groups };
                        // Reconfiguring stalls the tile unit, so it is done only when the shape changes.
                        if configured.replace(quad.tile_rows()) != Some(quad.tile_rows()) {
                            quad.configure();
                        }
                        quad.multiply();
                        quad.finish();
                    }
                }
            }
            release();
        }
    });
}

/// Two panels by a tile of rows.
struct TileHalf<'a> {
    panels: Pair<'a>,
    /// For each panel, one tile per group.
    weights: [*const u8; 2],
    /// At most one tile of rows.
    rows: Range<usize>,
}

/// The four tiles of sums that are computed together: two for the first half, one per panel, and two for the second. The
/// halves are either two tiles of rows with the same panels (a square) or two pairs of panels with the same rows.
struct TileBlock<'a, const PARTS: usize> {
    halves: [TileHalf<'a>; 2],
    /// How many of the halves are used.
    count: usize,
    is_square: bool,
    acts: &'a Bf16SplitActivations<PARTS>,
    target: &'a Target<'a>,
    groups: usize,
}

macro_rules! load {
    ($tile:literal, $at:expr) => {
        asm!(
            concat!("tileloadd tmm", $tile, ", [{at} + {stride}]"),
            at = in(reg) $at, stride = in(reg) LINE, options(nostack, readonly),
        )
    };
}

macro_rules! store {
    ($tile:literal, $at:expr, $stride:expr) => {
        asm!(
            concat!("tilestored [{at} + {stride}], tmm", $tile),
            at = in(reg) $at, stride = in(reg) $stride, options(nostack),
        )
    };
}

/// Adds the product of a tile of activations and one of weights to a tile of sums.
macro_rules! product {
    ($sum:literal, $a:literal, $b:literal) => {
        asm!(concat!("tdpbf16ps tmm", $sum, ", tmm", $a, ", tmm", $b), options(nostack, nomem))
    };
}

pub(super) use {load, product};

impl<const PARTS: usize> TileBlock<'_, PARTS> {
    /// Rows in the tiles of each half: 16, or fewer at the end.
    fn tile_rows(&self) -> [usize; 2] {
        [0, 1].map(|half| self.halves[half].rows.len())
    }

    unsafe fn configure(&self) {
        let [first, second] = self.tile_rows().map(|rows| (rows, LINE));
        let weights = (16, LINE);
        // SAFETY: the caller upholds the contract.
        unsafe { TileConfig::new([first, first, second, second, first, second, weights, weights]).load() };
    }

    /// Computes the sums over all inputs.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn multiply(&self) {
        let [first, second] = &self.halves;
        let ([mut b0, mut b1], [mut b2, mut b3]) = (first.weights, second.weights);
        let mut results = self.results();
        // SAFETY: the activations hold these tiles, the weights a panel of as many groups each.
        unsafe {
            tile_zero();
            for group in 0..self.groups {
                let block = group / GROUPS_PER_SUPER * self.acts.tiles + first.rows.start / TILE;
                let a0 = self.acts.values.as_ptr().add(block * PARTS * BLOCK + group % GROUPS_PER_SUPER * TILE * GROUP);
                load!(4, a0);
                load!(6, b0);
                product!(0, 4, 6);
                load!(7, b1);
                product!(1, 4, 7);
                if self.is_square {
                    self.prefetch_next(group, [b0, b1]);
                    let a1 = a0.add(PARTS * BLOCK);
                    load!(5, a1);
                    product!(2, 5, 6);
                    product!(3, 5, 7);
                    if PARTS == 2 {
                        load!(4, a0.add(BLOCK));
                        product!(0, 4, 6);
                        product!(1, 4, 7);
                        load!(5, a1.add(BLOCK));
                        product!(2, 5, 6);
                        product!(3, 5, 7);
                    }
                } else {
                    self.prefetch_next(group, [b0, b1, b2, b3]);
                    if PARTS == 2 {
                        load!(5, a0.add(BLOCK));
                        product!(0, 5, 6);
                        product!(1, 5, 7);
                    }
                    if self.count == 2 {
                        load!(6, b2);
                        product!(2, 4, 6);
                        load!(7, b3);
                        product!(3, 4, 7);
                        if PARTS == 2 {
                            product!(2, 5, 6);
                            product!(3, 5, 7);
                        }
                    }
                }
                results.prefetch();
                [b0, b1, b2, b3] = [b0, b1, b2, b3].map(|b| b.wrapping_add(TILE_BYTES));
            }
        }
    }

    /// Prefetches weights of these panels: one tile ahead or, with four panels, two, because those are mostly read for the
    /// first time. Past the end of these panels it prefetches the next panels.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn prefetch_next<const N: usize>(&self, group: usize, weights: [*const u8; N]) {
        let ahead = N / 2;
        let wrap = if group + ahead < self.groups { 0 } else { (N - 1) * self.groups };
        for line in 0..TILE {
            for weights in weights {
                let at = (ahead + wrap) * TILE_BYTES + line * LINE;
                _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(at).cast());
            }
        }
    }

    fn results(&self) -> Results {
        let [first, second] = &self.halves;
        let rows = second.rows.end - first.rows.start;
        let at_once = rows.div_ceil(self.groups);
        match self.target {
            Target::Rows(out) => Results {
                next: out.start.wrapping_add(first.rows.start * out.stride + first.panels[0].1 * PANEL),
                stride: out.stride,
                panels: if self.is_square { 2 } else { 4 },
                rows,
                at_once,
            },
            Target::Gated(..) => Results { next: std::ptr::null(), stride: 0, panels: 0, rows: 0, at_once },
        }
    }

    /// Writes the sums to the target.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn finish(&self) {
        let halves = &self.halves[..self.count];
        // SAFETY: whole panels lie within the output, and a tile has as many rows as its half; the caller guarantees the
        // rest.
        unsafe {
            if let Target::Rows(out) = self.target
                && halves.iter().all(|half| half.is_whole())
                && out.bias.is_none()
            {
                let stride = out.stride * size_of::<f32>();
                let at = |half: &TileHalf<'_>| out.start.add(half.rows.start * out.stride + half.panels[0].1 * PANEL);
                store!(0, at(&halves[0]), stride);
                store!(1, at(&halves[0]).add(PANEL), stride);
                if let [_, second] = halves {
                    store!(2, at(second), stride);
                    store!(3, at(second).add(PANEL), stride);
                }
                return;
            }
            let mut sums = MaybeUninit::<[Lines<TILE>; SUMS]>::uninit();
            tile_store(sums.as_mut_ptr().cast());
            let sums = sums.as_ptr().cast::<[f32; PANEL]>();
            for (index, half) in halves.iter().enumerate() {
                let sums = sums.add(index * 2 * TILE);
                match self.target {
                    Target::Rows(out) => half.put(sums, out),
                    Target::Gated(out, activation) => half.gate(sums, out, *activation),
                }
            }
        }
    }
}

/// Prefetches the cache lines of the results while the products are summed: rows are far apart in memory, and a store that
/// misses the cache delays the stores after it.
struct Results {
    next: *const f32,
    stride: usize,
    panels: usize,
    /// Rows that remain.
    rows: usize,
    at_once: usize,
}

impl Results {
    #[inline]
    fn prefetch(&mut self) {
        if self.rows == 0 {
            return;
        }
        for _ in 0..self.at_once {
            for panel in 0..self.panels {
                // SAFETY: a prefetch reads nothing and may point anywhere; SSE is part of the architecture.
                unsafe { _mm_prefetch::<_MM_HINT_ET0>(self.next.wrapping_add(panel * PANEL).cast()) };
            }
            self.next = self.next.wrapping_add(self.stride);
        }
        self.rows = self.rows.saturating_sub(self.at_once);
    }
}

impl TileHalf<'_> {
    fn is_whole(&self) -> bool {
        let [(segment, first), (_, second)] = self.panels;
        first < second && (second + 1) * PANEL <= segment.rows
    }

    /// Writes finished sums to their rows.
    #[inline]
    unsafe fn put(&self, sums: *const [f32; PANEL], out: &Output<'_>) {
        let [(segment, first), (_, second)] = self.panels;
        for row in self.rows.clone() {
            for panel in first..=second {
                // SAFETY: `sums` holds the sums of both panels; the caller guarantees the rest.
                unsafe { out.put(row, panel, segment.rows, &*sums.add((panel - first) * TILE + row % TILE)) };
            }
        }
    }

    /// Gates finished sums and writes them as half rows of the next layer's activation tiles.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn gate(&self, sums: *const [f32; PANEL], out: &RoundedOutput, activation: Activation) {
        let (group, half) = (self.panels[0].1 / 2, self.panels[0].1 % 2);
        for row in self.rows.clone() {
            // SAFETY: `sums` holds the sums of both panels, aligned to lines; `out` has space for these rows; the CPU has
            // AVX-512.
            unsafe {
                let [gate, up] = [0, TILE].map(|at| _mm512_load_ps(sums.add(at + row % TILE).cast()));
                let value = round_bf16(gate_lanes(gate, up, activation));
                let block = group / GROUPS_PER_SUPER * out.tiles + row / TILE;
                let line = block * BLOCK + (group % GROUPS_PER_SUPER * TILE + row % TILE) * GROUP;
                _mm256_store_si256(out.values.add(line + half * PANEL).cast(), _mm512_cvtepi32_epi16(value));
            }
        }
    }
}

/// `activation(x) * up`, accurate to six bits more than bf16: `x / (1 + 2^t)` with a short polynomial and the hardware's
/// approximate reciprocal.
#[inline]
#[target_feature(enable = "avx512f")]
fn gate_lanes(x: __m512, up: __m512, activation: Activation) -> __m512 {
    /// Polynomial of `2^f` for |f| <= 1/2, accurate to 2^-17.
    const POWER: [f32; 5] = [0.009_666_369, 0.055_921_976, 0.240_223_5, 0.693_121_1, 1.0];
    let splat = |value: f32| _mm512_set1_ps(value);
    let t = match activation {
        Activation::Silu => _mm512_mul_ps(x, splat(-std::f32::consts::LOG2_E)),
        Activation::GeluTanh => {
            // x (1 + tanh z) / 2 = x / (1 + exp(-2 z)) with z = sqrt(2 / pi) (x + 0.044715 x^3)
            const SCALE: f32 = -2.0 * 0.797_884_6 * std::f32::consts::LOG2_E;
            let square = _mm512_mul_ps(x, x);
            _mm512_mul_ps(x, _mm512_fmadd_ps(square, splat(SCALE * 0.044_715), splat(SCALE)))
        }
    };
    let whole = _mm512_roundscale_ps::<0>(t);
    let rest = _mm512_sub_ps(t, whole);
    let power = POWER[1..].iter().fold(splat(POWER[0]), |sum, c| _mm512_fmadd_ps(sum, rest, splat(*c)));
    let below = _mm512_add_ps(splat(1.0), _mm512_scalef_ps(power, whole));
    _mm512_mul_ps(_mm512_mul_ps(x, _mm512_rcp14_ps(below)), up)
}
