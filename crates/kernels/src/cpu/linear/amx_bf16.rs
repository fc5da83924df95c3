//! bf16 tile kernels: for bf16 weights, and for the prompt rows of quantised weights.
//!
//! Four tiles of sums stay in the tile unit while all inputs pass by. For bf16 weights they are two panels by the high and the low
//! part of 16 rows, which are added at the end. Prompt rows are rounded to bf16, and their four tiles are two panels by 32 rows: so
//! each load serves two products. That counts most when another program shares the core, for then loads and products take
//! turns, and a load costs nearly as much as a product. As many panels as the second-level cache holds are unpacked to bf16, and all
//! rows pass by them.

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{BLOCK, TILE, round_bf16};
use super::super::matrix::{GROUP, GROUPS_PER_SUPER, LINE, PANEL, Segment};
use super::super::tiles::{TileConfig, release};
use super::amx::{Lines, PANELS_AT_ONCE, batches, tile_store, tile_zero};
use super::unpack_bf16::{TILE_BYTES, unpack_panel};
use super::{Inputs, Output};
use crate::Activation;

/// Tiles of sums.
const SUMS: usize = 4;
/// Unpacked weights that stay in the second-level cache while all rows pass by.
const UNPACKED_BYTES: usize = 768 * 1024;
/// How far ahead of their use unpacked weights are asked for.
const AHEAD: usize = TILE_BYTES;

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
    let pair = |pair: usize| {
        let first = panels.start + 2 * pair;
        [(segment, first), (segment, (first + 1).min(panels.end - 1))]
    };
    // SAFETY: passed on.
    unsafe { pass(panels.len().div_ceil(2), pair, inputs, &Target::Rows(out)) };
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
    unsafe { pass(panels.len(), pair, inputs, &Target::Gated(out, activation)) };
}

/// Where gated results go: the values of a [`SplitActivations`](super::super::activations::SplitActivations) of one part.
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

/// Takes all rows past so many pairs of panels.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn pass<'a>(
    pairs: usize,
    pair: impl Fn(usize) -> [(&'a Segment, usize); 2],
    inputs: &Inputs<'_>,
    target: &Target<'_>,
) {
    let groups = pair(0)[0].0.cols / GROUP;
    let most = (UNPACKED_BYTES / (2 * groups * TILE_BYTES)).max(1);
    // As many each time.
    let at_once = pairs.div_ceil(pairs.div_ceil(most));
    UNPACKED.with_borrow_mut(|unpacked| {
        let len = at_once * 2 * groups;
        if unpacked.len() < len {
            unpacked.resize(len, Lines([[0; LINE]; TILE_BYTES / LINE]));
        }
        let weights: *mut u8 = unpacked.as_mut_ptr().cast();
        let at = |pair: usize, half: usize| weights.wrapping_add((2 * pair + half) * groups * TILE_BYTES);
        // SAFETY: there is room for `at_once` pairs of panels; the rest is passed on.
        unsafe {
            TileConfig::new([(16, 64); 8]).load();
            for first in (0..pairs).step_by(at_once) {
                let count = at_once.min(pairs - first);
                for p in 0..count {
                    for (half, (segment, panel)) in pair(first + p).into_iter().enumerate() {
                        unpack_panel(segment, panel, at(p, half));
                    }
                }
                for tile in (0..inputs.rows.div_ceil(TILE)).step_by(2) {
                    for p in 0..count {
                        let square = Square { panels: pair(first + p), tile, inputs, target, groups };
                        square.multiply([at(p, 0), at(p, 1)]);
                        square.finish();
                    }
                }
            }
            release();
        }
    });
}

/// Two panels by two tiles of rows. The unit's first two tiles are the sums of the first row tile, one for each panel.
struct Square<'a> {
    panels: [(&'a Segment, usize); 2],
    /// The first of the two.
    tile: usize,
    inputs: &'a Inputs<'a>,
    target: &'a Target<'a>,
    groups: usize,
}

impl Square<'_> {
    /// Sums the products of all inputs. Meanwhile it asks for the lines that the results will go to: rows lie far apart, and a store
    /// that misses the caches holds up the ones after it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn multiply(&self, [mut b0, mut b1]: [*mut u8; 2]) {
        let acts = self.inputs.rounded;
        let is_pair = self.tile + 1 < acts.tiles;
        let mut out = match self.target {
            Target::Rows(out) => {
                Some((out.start.wrapping_add(self.tile * TILE * out.stride + self.panels[0].1 * PANEL), out.stride))
            }
            Target::Gated(..) => None,
        };
        let rows = (2 * TILE).div_ceil(self.groups);
        // SAFETY: the activations hold these tiles, `b0` and `b1` a panel of as many groups each. A prefetch may point anywhere.
        unsafe {
            tile_zero();
            for group in 0..self.groups {
                let at = (group / GROUPS_PER_SUPER * acts.tiles + self.tile) * BLOCK
                    + group % GROUPS_PER_SUPER * TILE * GROUP;
                let a0 = acts.values.as_ptr().add(at).cast::<u8>();
                let a1 = if is_pair { a0.add(2 * BLOCK) } else { a0 };
                for line in 0..TILE {
                    for b in [b0, b1] {
                        _mm_prefetch::<_MM_HINT_T0>(b.wrapping_add(AHEAD + line * LINE).cast());
                    }
                }
                asm!(
                    "tileloadd tmm4, [{a0} + {stride}]",
                    "tileloadd tmm6, [{b0} + {stride}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b1} + {stride}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{a1} + {stride}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    a0 = in(reg) a0, a1 = in(reg) a1, b0 = in(reg) b0, b1 = in(reg) b1, stride = in(reg) LINE,
                    options(nostack, readonly),
                );
                if let Some((row, stride)) = &mut out {
                    for _ in 0..rows {
                        for panel in 0..2 {
                            _mm_prefetch::<_MM_HINT_ET0>(row.wrapping_add(panel * PANEL).cast());
                        }
                        *row = row.wrapping_add(*stride);
                    }
                }
                (b0, b1) = (b0.add(TILE_BYTES), b1.add(TILE_BYTES));
            }
        }
    }

    /// Hands over the sums.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn finish(&self) {
        let rows = self.tile * TILE..self.inputs.rows.min((self.tile + 2) * TILE);
        // SAFETY: passed on.
        unsafe {
            match self.target {
                Target::Rows(out) => self.put(out, rows),
                Target::Gated(out, activation) => self.gate(out, *activation, rows),
            }
        }
    }

    /// Writes finished sums to their rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn put(&self, out: &Output<'_>, rows: Range<usize>) {
        let [(segment, first), (_, second)] = self.panels;
        let is_whole = first < second && (second + 1) * PANEL <= segment.rows && rows.len() == 2 * TILE;
        // SAFETY: 32 whole rows and two whole panels lie within the output.
        unsafe {
            if is_whole && out.bias.is_none() {
                let start = out.start.add(rows.start * out.stride + first * PANEL);
                asm!(
                    "tilestored [{out0} + {stride}], tmm0",
                    "tilestored [{out0} + {stride} + 64], tmm1",
                    "tilestored [{out1} + {stride}], tmm2",
                    "tilestored [{out1} + {stride} + 64], tmm3",
                    out0 = in(reg) start, out1 = in(reg) start.add(TILE * out.stride),
                    stride = in(reg) out.stride * 4, options(nostack),
                );
                return;
            }
            let mut sums = MaybeUninit::<[Lines<TILE>; SUMS]>::uninit();
            tile_store(sums.as_mut_ptr().cast());
            let sums = sums.as_ptr().cast::<[f32; PANEL]>();
            for row in rows.clone() {
                for panel in first..=second {
                    let tile = (row - rows.start) / TILE * 2 + panel - first;
                    out.put(row, panel, segment.rows, &*sums.add(tile * TILE + row % TILE));
                }
            }
        }
    }

    /// Gates finished sums and writes them as halves of rows of the next layer's tiles.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    unsafe fn gate(&self, out: &RoundedOutput, activation: Activation, rows: Range<usize>) {
        let (group, half) = (self.panels[0].1 / 2, self.panels[0].1 % 2);
        let mut sums = MaybeUninit::<[Lines<TILE>; SUMS]>::uninit();
        // SAFETY: `out` has room for these rows; AVX-512 is there.
        unsafe {
            tile_store(sums.as_mut_ptr().cast());
            let sums = sums.as_ptr().cast::<f32>();
            for row in rows.clone() {
                let at = (row - rows.start) / TILE * 2 * TILE + row % TILE;
                let [gate, up] = [at, at + TILE].map(|at| _mm512_load_ps(sums.add(at * PANEL)));
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
    let mut sums = MaybeUninit::<[Lines<TILE>; SUMS]>::uninit();
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
            let mut sums = MaybeUninit::<[Lines<TILE>; SUMS]>::uninit();
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
