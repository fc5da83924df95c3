//! bf16 tile kernels: for bf16 weights, and for the prompt rows of quantised weights.
//!
//! Activations are bf16 in one part (prompt rows, for quantised weights) or in two, high and low (for bf16 weights). Four tiles of
//! sums stay in the tile unit while all inputs pass by, and the products of both parts go into the same sums, group after group,
//! high before low: one order for one row and for many. The four tiles are two panels by 32 rows, so that each load serves at least
//! two products; a tile of rows without a second one, such as the one row of decoding, takes four panels instead. That counts most
//! when another program shares the core, for then loads and products take turns, and a load costs nearly as much as a product. All
//! rows pass by as many panels as the second-level cache holds, which for quantised weights are unpacked to bf16.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{BLOCK, SplitActivations, TILE, round_bf16};
use super::super::matrix::{Format, GROUP, GROUPS_PER_SUPER, LINE, PANEL, Segment};
use super::super::tiles::{TileConfig, release};
use super::amx::{Lines, tile_store, tile_zero};
use super::unpack_bf16::{TILE_BYTES, unpack_panel};
use super::{Inputs, Output};
use crate::Activation;

/// Tiles of sums.
const SUMS: usize = 4;
/// Weights that stay in the second-level cache while all rows pass by.
const BLOCK_BYTES: usize = 768 * 1024;

thread_local! {
    /// Unpacked panels, one after the other. A thread keeps its memory from call to call.
    static UNPACKED: RefCell<Vec<Lines<{ TILE_BYTES / LINE }>>> = const { RefCell::new(Vec::new()) };
}

/// Multiplies prompt rows, rounded to bf16, with quantised weights, unpacked to bf16.
///
/// # Safety
/// As for [`super::avx512::panels`], and this process may use tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn rounded(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    // SAFETY: passed on.
    unsafe { segment_rows(segment, panels, inputs.rounded, inputs.rows, out) };
}

/// The same for a stack of gate and up projection, whose products are gated and rounded at once: they go to `out` as the activations
/// of the next linear layer.
///
/// # Safety
/// As for [`rounded`]; `panels` are panels of both segments, whole ones; `out` has room for the rows and nobody else
/// writes these columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn gated(
    [gate, up]: [&Segment; 2],
    panels: Range<usize>,
    inputs: &Inputs<'_>,
    activation: Activation,
    out: RoundedOutput,
) {
    let pair = |pair: usize| [(gate, panels.start + pair), (up, panels.start + pair)];
    // SAFETY: passed on.
    unsafe { pass(panels.len(), pair, inputs.rounded, inputs.rows, &Target::Gated(out, activation)) };
}

/// Multiplies f32 activations, in two parts, with bf16 weights.
///
/// # Safety
/// As for [`rounded`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    // SAFETY: passed on.
    unsafe { segment_rows(segment, panels, inputs.split, inputs.rows, out) };
}

/// Where gated results go: the values of a [`SplitActivations`] of one part.
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

type Pair<'a> = [(&'a Segment, usize); 2];

/// Takes all rows past some panels of a segment.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn segment_rows<const PARTS: usize>(
    segment: &Segment,
    panels: Range<usize>,
    acts: &SplitActivations<PARTS>,
    rows: usize,
    out: Output<'_>,
) {
    let pair = |pair: usize| {
        let first = panels.start + 2 * pair;
        [(segment, first), (segment, (first + 1).min(panels.end - 1))]
    };
    // SAFETY: passed on.
    unsafe { pass(panels.len().div_ceil(2), pair, acts, rows, &Target::Rows(out)) };
}

/// Takes all rows past so many pairs of panels.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn pass<'a, const PARTS: usize>(
    pairs: usize,
    pair: impl Fn(usize) -> Pair<'a>,
    acts: &SplitActivations<PARTS>,
    rows: usize,
    target: &Target<'_>,
) {
    let first = pair(0)[0].0;
    let groups = first.cols.div_ceil(GROUP);
    let is_packed = first.format != Format::Bf16;
    let panel_bytes = groups * TILE_BYTES;
    // What only one tile of rows passes by need not stay.
    let most = if rows <= TILE { 2 } else { (BLOCK_BYTES / (2 * panel_bytes)).max(1) };
    // As many each time.
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
            Half { panels, weights, rows: tile * TILE..rows.min((tile + 1) * TILE) }
        };
        let mut configured = None;
        // SAFETY: there is room for `at_once` pairs of panels; the rest is passed on.
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
                        let quad = Quad { halves, count, is_square, acts, target, groups };
                        // The unit comes to a halt for it.
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
struct Half<'a> {
    panels: Pair<'a>,
    /// Of each panel, a tile for each group.
    weights: [*const u8; 2],
    /// At most a tile of them.
    rows: Range<usize>,
}

/// What is summed at once: the unit's first two tiles are the sums of the first half, one for each panel, the next two those
/// of the second. Either the halves are two tiles of rows that share their panels, which is a square, or they
/// are two pairs of panels that share their rows.
struct Quad<'a, const PARTS: usize> {
    halves: [Half<'a>; 2],
    /// How many of the halves are logit_rows.
    count: usize,
    is_square: bool,
    acts: &'a SplitActivations<PARTS>,
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

impl<const PARTS: usize> Quad<'_, PARTS> {
    /// Of the tiles of each half: 16, or fewer at the end.
    fn tile_rows(&self) -> [usize; 2] {
        [0, 1].map(|half| self.halves[half].rows.len())
    }

    unsafe fn configure(&self) {
        let [first, second] = self.tile_rows().map(|rows| (rows, LINE));
        let weights = (16, LINE);
        // SAFETY: passed on.
        unsafe { TileConfig::new([first, first, second, second, first, second, weights, weights]).load() };
    }

    /// Sums the products of all inputs.
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
                    self.ask_ahead(group, [b0, b1]);
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
                    self.ask_ahead(group, [b0, b1, b2, b3]);
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
                results.ask();
                [b0, b1, b2, b3] = [b0, b1, b2, b3].map(|b| b.wrapping_add(TILE_BYTES));
            }
        }
    }

    /// Asks for weights of these panels, a tile further on or, of four panels, two: those are mostly read for the first time.
    /// Beyond the end of these panels the next ones begin.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn ask_ahead<const N: usize>(&self, group: usize, weights: [*const u8; N]) {
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

    /// Hands over the sums.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn finish(&self) {
        let halves = &self.halves[..self.count];
        // SAFETY: whole panels lie within the output, and a tile has as many rows as its half; the rest is passed on.
        unsafe {
            if let Target::Rows(out) = self.target
                && halves.iter().all(|half| half.is_whole())
                && out.bias.is_none()
            {
                let stride = out.stride * size_of::<f32>();
                let at = |half: &Half<'_>| out.start.add(half.rows.start * out.stride + half.panels[0].1 * PANEL);
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

/// The lines that results will go to. They are asked for while the products are summed: rows lie far apart, and a store that misses
/// the caches holds up the ones after it.
struct Results {
    next: *const f32,
    stride: usize,
    panels: usize,
    /// Those that remain.
    rows: usize,
    at_once: usize,
}

impl Results {
    #[inline]
    fn ask(&mut self) {
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

impl Half<'_> {
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
                // SAFETY: the sums of both panels; the rest is passed on.
                unsafe { out.put(row, panel, segment.rows, &*sums.add((panel - first) * TILE + row % TILE)) };
            }
        }
    }

    /// Gates finished sums and writes them as halves of rows of the next layer's tiles.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn gate(&self, sums: *const [f32; PANEL], out: &RoundedOutput, activation: Activation) {
        let (group, half) = (self.panels[0].1 / 2, self.panels[0].1 % 2);
        for row in self.rows.clone() {
            // SAFETY: the sums of both panels, on lines; `out` has room for these rows; AVX-512 is there.
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

/// `activation(x) * up`, six bits better than its rounding to bf16: `x / (1 + 2^t)` with a short polynomial and the hardware's
/// reciprocal.
#[inline]
#[target_feature(enable = "avx512f")]
fn gate_lanes(x: __m512, up: __m512, activation: Activation) -> __m512 {
    /// `2^f` for f within a half of zero, to 2^-17.
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
