//! Tile kernels for quantised weights: 16 rows by 16 features at a time.
//!
//! Integers come out of the tile unit exact, so scales can be applied by vectors in the order that all kernels share. A format
//! with a scale per group brings its 16x16 integers back after every 32 inputs. A K format is multiplied with its integer
//! sub-block scales folded into the weights, which then need two bytes: `scale * q = 128 high + low`, each with a tile of its own,
//! and comes back once per superblock.
//!
//! On stable Rust tiles are reached through inline assembly; `Level::Amx` says that the kernel granted them to this process.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{BLOCK, GroupActivations, SuperActivations, TILE};
use super::super::matrix::{
    Bits, Format, GROUP, GROUPS_PER_SUPER, GroupScales, LINE, PANEL, SUPER, Segment, SuperScales,
};
use super::super::tiles::{TileConfig, release};
use super::avx512::{min_pair, sub_scale, unpack};
use super::{Inputs, Output};

/// Row tiles that pass by an unpacked superblock of weights before the next one is unpacked.
const TILES_AT_ONCE: usize = 16;
/// Panels that share a load of activations: four superblocks of byte weights fill 16 KiB of the first-level cache.
const PANELS_AT_ONCE: usize = 4;
/// Activations that stay in the second-level cache while the panels of a chunk pass by.
const ACTIVATION_BYTES: usize = 768 * 1024;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(super) struct Lines<const N: usize>([[u8; LINE]; N]);

/// f32 sums of one tile of rows by one panel.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct TileSums([[f32; PANEL]; TILE]);

/// Sums of all tiles and panels that are worked on at once, kept while the superblocks pass by.
type Sums = [[TileSums; PANELS_AT_ONCE]; TILES_AT_ONCE];

/// # Safety
/// As for [`super::avx512::panels`], and this process may use tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn group(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    // Two sets of (sums, activations, weights), so that one group's tiles load while the other's multiply.
    let set = [(16, 64), (16, 32), (8, 64)];
    let config = TileConfig::new([set[0], set[1], set[2], set[0], set[1], set[2], (0, 0), (0, 0)]);
    // SAFETY: passed on.
    unsafe {
        config.load();
        for (tiles, panels) in batches(inputs.rows, segment.cols, panels) {
            match segment.format {
                Format::Group { bits: Bits::B8, .. } => group_batch::<8, false>(segment, panels, tiles, 0, inputs, out),
                Format::Group { bits: Bits::B5, offset, mins: false } => {
                    group_batch::<5, false>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Group { bits: Bits::B5, offset, mins: true } => {
                    group_batch::<5, true>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Group { offset, mins: false, .. } => {
                    group_batch::<4, false>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Group { offset, mins: true, .. } => {
                    group_batch::<4, true>(segment, panels, tiles, offset, inputs, out);
                }
                _ => unreachable!("formats with a scale per group"),
            }
        }
        release();
    }
}

/// Batches of row tiles, whose activations of `row_bytes` a row fit the cache, by batches of panels.
pub(super) fn batches(
    rows: usize,
    row_bytes: usize,
    panels: Range<usize>,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let tiles = rows.div_ceil(TILE);
    let batch = (ACTIVATION_BYTES / (row_bytes * TILE)).clamp(2, TILES_AT_ONCE) & !1;
    (0..tiles).step_by(batch).flat_map(move |first| {
        let (tiles, end) = (first..tiles.min(first + batch), panels.end);
        panels.clone().step_by(PANELS_AT_ONCE).map(move |panel| (tiles.clone(), panel..end.min(panel + PANELS_AT_ONCE)))
    })
}

/// Asks for a part of the weights that come next: superblock `next` of these panels, or the first of the panels after
/// them. Called once for each of `tiles` tiles, it spreads the requests over the time that this superblock takes.
fn prefetch_weights(segment: &Segment, panels: &Range<usize>, next: usize, record: usize, tile: usize, tiles: usize) {
    let bytes = GROUPS_PER_SUPER * record;
    let share = bytes.div_ceil(tiles).next_multiple_of(LINE);
    let start = segment.bytes.as_ptr();
    for panel in panels.clone() {
        let at = match next * SUPER < segment.cols {
            true => panel * segment.stride + next * bytes,
            false => (panel + panels.len()) * segment.stride,
        };
        for line in (tile * share..bytes.min((tile + 1) * share)).step_by(LINE) {
            // SAFETY: a prefetch reads nothing and may point anywhere; SSE is part of the architecture.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(at + line).cast()) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group_batch<const BITS: usize, const MINS: bool>(
    segment: &Segment,
    panels: Range<usize>,
    tiles: Range<usize>,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let groups = segment.cols / GROUP;
    let supers = segment.cols.div_ceil(SUPER);
    let mut unpacked = MaybeUninit::<[Lines<{ 8 * GROUPS_PER_SUPER }>; PANELS_AT_ONCE]>::uninit();
    let mut sums = MaybeUninit::<Sums>::uninit();
    let sums = sums.as_mut_ptr().cast::<TileSums>();
    for index in 0..supers {
        let count = GROUPS_PER_SUPER.min(groups - index * GROUPS_PER_SUPER);
        // SAFETY: the superblock's groups are the segment's; the activations hold these tiles.
        unsafe {
            let mut blocks =
                [GroupBlock { lines: std::ptr::null(), scales: std::ptr::null(), count, first: index == 0 };
                    PANELS_AT_ONCE];
            for (p, panel) in panels.clone().enumerate() {
                let weights = segment.panel(panel).as_ptr();
                let records = weights.add(index * GROUPS_PER_SUPER * BITS * LINE);
                blocks[p].scales = weights.add(segment.scales_at + index * GROUPS_PER_SUPER * GroupScales::bytes(MINS));
                blocks[p].lines = records;
                if BITS != 8 {
                    let lines = unpacked.as_mut_ptr().cast::<Lines<{ 8 * GROUPS_PER_SUPER }>>().add(p).cast::<u8>();
                    let offset = _mm512_set1_epi8(offset as i8);
                    for g in 0..count {
                        for (r, line) in unpack::<BITS>(records.add(g * BITS * LINE)).into_iter().enumerate() {
                            let to = lines.add((g * 8 + r) * LINE);
                            _mm512_store_si512(to.cast(), _mm512_sub_epi8(line, offset));
                        }
                    }
                    blocks[p].lines = lines;
                }
            }
            for tile in tiles.clone() {
                if index + 1 == supers {
                    out.prefetch(tile, panels.clone(), inputs.rows);
                }
                prefetch_weights(segment, &panels, index + 1, BITS * LINE, tile - tiles.start, tiles.len());
                for (p, block) in blocks[..panels.len()].iter().enumerate() {
                    let at = index * inputs.group.tiles + tile;
                    group_tile::<MINS>(block, inputs.group, at, sums.add((tile - tiles.start) * PANELS_AT_ONCE + p));
                }
            }
        }
    }
    // SAFETY: every sum of these tiles and panels was written above.
    unsafe { put_tiles(segment, panels, inputs.rows, tiles, sums, out) };
}

/// Up to 8 groups of one panel, as signed bytes.
#[derive(Clone, Copy)]
struct GroupBlock {
    lines: *const u8,
    scales: *const u8,
    count: usize,
    /// Whether sums begin with this block.
    first: bool,
}

/// Adds the groups of `block` to the sums of one tile. First all integers, then all vectors: the tile unit and the vector
/// unit hardly work at the same time, and taking turns at every group was slower.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group_tile<const MINS: bool>(block: &GroupBlock, acts: &GroupActivations, at: usize, sums: *mut TileSums) {
    let mut integers = MaybeUninit::<[Lines<TILE>; GROUPS_PER_SUPER]>::uninit();
    let integers = integers.as_mut_ptr().cast::<i32>();
    // SAFETY: the caller's pointers hold `count` groups of 8 lines, scales, and the activations of this tile.
    unsafe {
        let values = acts.values.as_ptr().add(at * BLOCK);
        for g in 0..block.count {
            let (a, b) = (values.add(g * GROUP * TILE), block.lines.add(g * 8 * LINE));
            multiply_group(g, a, b, integers.add(g * TILE * PANEL));
        }
        let sums = sums.cast::<f32>();
        let mut sum = [_mm512_setzero_ps(); TILE];
        if !block.first {
            for (r, sum) in sum.iter_mut().enumerate() {
                *sum = _mm512_load_ps(sums.add(r * PANEL));
            }
        }
        for g in 0..block.count {
            let integers = integers.add(g * TILE * PANEL);
            let scales = block.scales.add(g * GroupScales::bytes(MINS));
            let scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
            let at = (at * GROUPS_PER_SUPER + g) * TILE;
            let act_scales = acts.scales.as_ptr().add(at);
            for (r, sum) in sum.iter_mut().enumerate() {
                let integer = _mm512_cvtepi32_ps(_mm512_load_si512(integers.add(r * PANEL).cast()));
                let scaled = _mm512_mul_ps(integer, _mm512_set1_ps(*act_scales.add(r)));
                *sum = _mm512_fmadd_ps(scaled, scale, *sum);
            }
            if MINS {
                let min = _mm512_cvtph_ps(_mm256_loadu_si256(scales.add(32).cast()));
                let weighted = acts.weighted.as_ptr().add(at);
                for (r, sum) in sum.iter_mut().enumerate() {
                    *sum = _mm512_fmadd_ps(_mm512_set1_ps(*weighted.add(r)), min, *sum);
                }
            }
        }
        for (r, sum) in sum.into_iter().enumerate() {
            _mm512_store_ps(sums.add(r * PANEL), sum);
        }
    }
}

/// 16 rows by 32 inputs by 16 features; even and odd items use different tiles.
#[inline(always)]
unsafe fn multiply_group(item: usize, a: *const i8, b: *const u8, integers: *mut i32) {
    // SAFETY: the caller points at 16 rows of 32 bytes, at 8 lines, and at room for a tile.
    unsafe {
        if item.is_multiple_of(2) {
            asm!(
                "tilezero tmm0",
                "tileloadd tmm1, [{a} + {a_stride}]",
                "tileloadd tmm2, [{b} + {b_stride}]",
                "tdpbssd tmm0, tmm1, tmm2",
                "tilestored [{c} + {b_stride}], tmm0",
                a = in(reg) a, b = in(reg) b, c = in(reg) integers,
                a_stride = in(reg) GROUP, b_stride = in(reg) LINE, options(nostack),
            );
        } else {
            asm!(
                "tilezero tmm3",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm5, [{b} + {b_stride}]",
                "tdpbssd tmm3, tmm4, tmm5",
                "tilestored [{c} + {b_stride}], tmm3",
                a = in(reg) a, b = in(reg) b, c = in(reg) integers,
                a_stride = in(reg) GROUP, b_stride = in(reg) LINE, options(nostack),
            );
        }
    }
}

/// # Safety
/// As for [`group`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn superblock(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    let config = TileConfig::new([(16, 64); 8]);
    // SAFETY: passed on.
    unsafe {
        config.load();
        for (tiles, panels) in batches(inputs.rows, segment.cols, panels) {
            match segment.format {
                Format::Super { bits: Bits::B2, offset, .. } => {
                    super_batch::<2, 16, true>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Super { bits: Bits::B3, offset, .. } => {
                    super_batch::<3, 16, false>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Super { bits: Bits::B5, offset, .. } => {
                    super_batch::<5, 8, true>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Super { bits: Bits::B6, offset, .. } => {
                    super_batch::<6, 16, false>(segment, panels, tiles, offset, inputs, out);
                }
                Format::Super { offset, .. } => {
                    super_batch::<4, 8, true>(segment, panels, tiles, offset, inputs, out);
                }
                _ => unreachable!("K formats"),
            }
        }
        release();
    }
}

/// A superblock of one panel with its scales folded in: `scale * (q - offset) = 128 high + low`.
struct Digits {
    high: Lines<64>,
    low: Lines<64>,
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn super_batch<const BITS: usize, const SUBS: usize, const MINS: bool>(
    segment: &Segment,
    panels: Range<usize>,
    tiles: Range<usize>,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let acts = inputs.superblock;
    let supers = segment.cols / SUPER;
    let mut digits = MaybeUninit::<[Digits; PANELS_AT_ONCE]>::uninit();
    let digits = digits.as_mut_ptr().cast::<Digits>();
    let mut sums = MaybeUninit::<Sums>::uninit();
    let sums = sums.as_mut_ptr().cast::<TileSums>();
    for index in 0..supers {
        // SAFETY: the superblock is the segment's; the activations hold these tiles.
        unsafe {
            let scales_at = segment.scales_at + index * SuperScales::bytes(SUBS, MINS);
            for (p, panel) in panels.clone().enumerate() {
                let weights = segment.panel(panel).as_ptr();
                let records = weights.add(index * GROUPS_PER_SUPER * BITS * LINE);
                fold::<BITS, SUBS, MINS>(records, weights.add(scales_at), offset, digits.add(p));
            }
            for tile in tiles.clone().step_by(2) {
                // The last tile of an odd number is paired with itself.
                let second = (tile + 1).min(tiles.end - 1);
                for tile in tile..=second {
                    if index + 1 == supers {
                        out.prefetch(tile, panels.clone(), inputs.rows);
                    }
                    prefetch_weights(segment, &panels, index + 1, BITS * LINE, tile - tiles.start, tiles.len());
                }
                let values = |tile: usize| acts.values.as_ptr().add((index * acts.tiles + tile) * BLOCK);
                for (p, panel) in panels.clone().enumerate() {
                    let mut integers = MaybeUninit::<[Lines<TILE>; 4]>::uninit();
                    let integers = integers.as_mut_ptr().cast::<i32>();
                    tile_zero();
                    for quarter in 0..4 {
                        let at = quarter * 64 * TILE;
                        multiply_quarter(values(tile).add(at), values(second).add(at), digits.add(p), quarter);
                    }
                    tile_store(integers.cast());
                    let scales = segment.panel(panel).as_ptr().add(scales_at);
                    let block = SuperBlock::new::<SUBS, MINS>(scales, index == 0);
                    for (i, tile) in (tile..=second).enumerate() {
                        let (at, integers) = (index * acts.tiles + tile, integers.add(i * 2 * TILE * PANEL));
                        let sums = sums.add((tile - tiles.start) * PANELS_AT_ONCE + p);
                        super_tile::<SUBS, MINS>(&block, acts, at, integers, sums);
                    }
                }
            }
        }
    }
    // SAFETY: every sum of these tiles and panels was written above.
    unsafe { put_tiles(segment, panels, inputs.rows, tiles, sums, out) };
}

/// The scales of one superblock of one panel, one lane per feature.
struct SuperBlock {
    d: __m512,
    dmin: __m512,
    /// Minimums of pairs of sub-blocks.
    mins: [__m512i; 8],
    /// Whether sums begin with this block.
    first: bool,
}

impl SuperBlock {
    /// # Safety
    /// `scales` points to the scales of a superblock.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn new<const SUBS: usize, const MINS: bool>(scales: *const u8, first: bool) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let halves = scales.add(SuperScales::integers(SUBS, MINS));
            let d = _mm512_cvtph_ps(_mm256_loadu_si256(halves.cast()));
            let mut block = Self { d, dmin: d, mins: [_mm512_setzero_si512(); 8], first };
            if MINS {
                block.dmin = _mm512_cvtph_ps(_mm256_loadu_si256(halves.add(32).cast()));
                for (i, pair) in block.mins[..SUBS / 2].iter_mut().enumerate() {
                    *pair = min_pair::<SUBS>(scales, i);
                }
            }
            block
        }
    }
}

/// Adds the integers `[high, low][16][16]` of one superblock to the sums of one tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn super_tile<const SUBS: usize, const MINS: bool>(
    block: &SuperBlock,
    acts: &SuperActivations,
    at: usize,
    integers: *const i32,
    sums: *mut TileSums,
) {
    let sums = sums.cast::<f32>();
    for r in 0..TILE {
        // SAFETY: the caller points at two tiles of integers, and at the sums and activations of one tile.
        unsafe {
            let high = _mm512_load_si512(integers.add(r * PANEL).cast());
            let low = _mm512_load_si512(integers.add((TILE + r) * PANEL).cast());
            let integer = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<7>(high), low));
            let row = at * TILE + r;
            let scale = _mm512_set1_ps(*acts.scales.as_ptr().add(row));
            let sum = sums.add(r * PANEL);
            let mut total = if block.first { _mm512_setzero_ps() } else { _mm512_load_ps(sum) };
            total = _mm512_fmadd_ps(_mm512_mul_ps(block.d, scale), integer, total);
            if MINS {
                let minimum = row_minimum::<SUBS>(&block.mins, acts, row);
                total = _mm512_fnmadd_ps(_mm512_mul_ps(block.dmin, scale), minimum, total);
            }
            _mm512_store_ps(sum, total);
        }
    }
}

/// `sum over sub-blocks of min * sum of activations` of one row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn row_minimum<const SUBS: usize>(mins: &[__m512i; 8], acts: &SuperActivations, row: usize) -> __m512 {
    let mut minimum = _mm512_setzero_si512();
    for (i, pair) in mins[..SUBS / 2].iter().enumerate() {
        // SAFETY: the caller's row has `SUBS` sums of as many sub-blocks.
        let two = unsafe {
            let sums = if SUBS == 8 { acts.sums32.as_ptr().add(row * 8) } else { acts.sums.as_ptr().add(row * 16) };
            sums.add(2 * i).cast::<i32>().read_unaligned()
        };
        minimum = _mm512_dpwssd_epi32(minimum, *pair, _mm512_set1_epi32(two));
    }
    _mm512_cvtepi32_ps(minimum)
}

/// Unpacks a superblock and multiplies it with its integer scales.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn fold<const BITS: usize, const SUBS: usize, const MINS: bool>(
    records: *const u8,
    scales: *const u8,
    offset: i32,
    digits: *mut Digits,
) {
    let (offset, low_bits) = (_mm512_set1_epi8(offset as i8), _mm512_set1_epi16(127));
    let low_byte = _mm512_set1_epi16(255);
    for g in 0..GROUPS_PER_SUPER {
        // SAFETY: the caller points at a superblock's records and scales.
        unsafe {
            let lines = unpack::<BITS>(records.add(g * BITS * LINE));
            for (r, line) in lines.into_iter().enumerate() {
                let sub = (g * 8 + r) * SUBS / 64;
                let scale = sub_scale::<SUBS, MINS>(scales, sub);
                // The scale of a feature in both 16-bit halves of its lane.
                let scale =
                    _mm512_or_si512(_mm512_slli_epi32::<16>(scale), _mm512_and_si512(scale, _mm512_set1_epi32(0xffff)));
                let weight = _mm512_sub_epi8(line, offset);
                let even = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(weight)), scale);
                let odd = _mm512_mullo_epi16(_mm512_srai_epi16::<8>(weight), scale);
                let join = |even, odd| _mm512_or_si512(_mm512_and_si512(even, low_byte), _mm512_slli_epi16::<8>(odd));
                let low = join(_mm512_and_si512(even, low_bits), _mm512_and_si512(odd, low_bits));
                let high = join(_mm512_srai_epi16::<7>(even), _mm512_srai_epi16::<7>(odd));
                _mm512_store_si512((&raw mut (*digits).low.0[g * 8 + r]).cast(), low);
                _mm512_store_si512((&raw mut (*digits).high.0[g * 8 + r]).cast(), high);
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn tile_zero() {
    // SAFETY: the caller configured these tiles.
    unsafe { asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem)) };
}

/// Adds two tiles of rows by a quarter of a superblock: high and low digits of the first, then of the second.
#[inline(always)]
unsafe fn multiply_quarter(a0: *const i8, a1: *const i8, digits: *const Digits, quarter: usize) {
    // SAFETY: the caller points at two tiles of 16 rows by 64 inputs and at a superblock's digits.
    unsafe {
        let high = (&raw const (*digits).high).cast::<u8>().add(quarter * TILE * LINE);
        let low = (&raw const (*digits).low).cast::<u8>().add(quarter * TILE * LINE);
        asm!(
            "tileloadd tmm4, [{a0} + {stride}]",
            "tileloadd tmm6, [{high} + {stride}]",
            "tdpbssd tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{low} + {stride}]",
            "tdpbssd tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a1} + {stride}]",
            "tdpbssd tmm2, tmm5, tmm6",
            "tdpbssd tmm3, tmm5, tmm7",
            a0 = in(reg) a0, a1 = in(reg) a1, high = in(reg) high, low = in(reg) low,
            stride = in(reg) LINE, options(nostack, readonly),
        );
    }
}

/// Stores the sums `[row tile][high, low][16][16]`.
#[inline(always)]
pub(super) unsafe fn tile_store(integers: *mut u8) {
    // SAFETY: the caller has room for four tiles.
    unsafe {
        asm!(
            "tilestored [{c} + {stride}], tmm0",
            "tilestored [{c} + {stride} + 1024], tmm1",
            "tilestored [{c} + {stride} + 2048], tmm2",
            "tilestored [{c} + {stride} + 3072], tmm3",
            c = in(reg) integers, stride = in(reg) LINE, options(nostack),
        );
    }
}

unsafe fn put_tiles(
    segment: &Segment,
    panels: Range<usize>,
    rows: usize,
    tiles: Range<usize>,
    sums: *const TileSums,
    out: Output<'_>,
) {
    for tile in tiles.clone() {
        for r in 0..TILE.min(rows - tile * TILE) {
            for (p, panel) in panels.clone().enumerate() {
                // SAFETY: the caller wrote the sums of these tiles and panels; its promise about `out`.
                unsafe {
                    let sums = &*sums.add((tile - tiles.start) * PANELS_AT_ONCE + p);
                    out.put(tile * TILE + r, panel, segment.rows, &sums.0[r]);
                }
            }
        }
    }
}
