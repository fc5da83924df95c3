//! Tile kernels: 16 rows by 16 features at a time.
//!
//! Integers come out of the tile unit exact, so scales can be applied by vectors in the order that all kernels share. A format
//! with a scale per group brings its 16x16 integers back after every 32 inputs. A K format is multiplied with its integer
//! sub-block scales folded into the weights, which then need two bytes: `scale * q = 128 high + low`, each with a tile of its own,
//! and comes back once per superblock. bf16 weights meet f32 activations as three bf16 parts, whose tiles are added at the end.
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
use super::avx512::{sub_scale, unpack};
use super::{Inputs, Output};

/// Row tiles that share one unpacking of a superblock of weights: their sums fill 32 KiB.
const TILES_AT_ONCE: usize = 32;
/// Activations that stay in the second-level cache while the panels of a chunk pass by.
const ACTIVATION_BYTES: usize = 768 * 1024;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Lines<const N: usize>([[u8; LINE]; N]);

/// f32 sums of up to [`TILES_AT_ONCE`] tiles of one panel.
type Sums = [[[f32; PANEL]; TILE]; TILES_AT_ONCE];

#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// Tiles of up to 16 rows of 64 bytes: `(rows, bytes per row)` of each.
    fn new(tiles: [(usize, usize); 8]) -> Self {
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (i, (rows, bytes)) in tiles.into_iter().enumerate() {
            config.rows[i] = rows as u8;
            config.row_bytes[i] = bytes as u16;
        }
        config
    }

    /// # Safety
    /// This process may use tiles.
    unsafe fn load(&self) {
        // SAFETY: a valid configuration of 64 bytes; the caller's promise.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, readonly)) };
    }
}

/// # Safety
/// This process may use tiles.
unsafe fn release() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

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
        for (tiles, panel) in
            tile_batches(inputs.rows, segment.cols).flat_map(|t| panels.clone().map(move |p| (t.clone(), p)))
        {
            match segment.format {
                Format::Group { bits: Bits::B8, .. } => group_panel::<8, false>(segment, panel, tiles, 0, inputs, out),
                Format::Group { bits: Bits::B5, offset, mins: false } => {
                    group_panel::<5, false>(segment, panel, tiles, offset, inputs, out);
                }
                Format::Group { bits: Bits::B5, offset, mins: true } => {
                    group_panel::<5, true>(segment, panel, tiles, offset, inputs, out);
                }
                Format::Group { offset, mins: false, .. } => {
                    group_panel::<4, false>(segment, panel, tiles, offset, inputs, out)
                }
                Format::Group { offset, mins: true, .. } => {
                    group_panel::<4, true>(segment, panel, tiles, offset, inputs, out)
                }
                _ => unreachable!("formats with a scale per group"),
            }
        }
        release();
    }
}

/// Tiles of rows in batches whose activations, of `row_bytes` each, fit the cache.
fn tile_batches(rows: usize, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let tiles = rows.div_ceil(TILE);
    let batch = (ACTIVATION_BYTES / (row_bytes * TILE)).clamp(2, TILES_AT_ONCE) & !1;
    (0..tiles).step_by(batch).map(move |first| first..tiles.min(first + batch))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group_panel<const BITS: usize, const MINS: bool>(
    segment: &Segment,
    panel: usize,
    tiles: Range<usize>,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let (weights, acts) = (segment.panel(panel).as_ptr(), inputs.group);
    let groups = segment.cols / GROUP;
    let mut unpacked = MaybeUninit::<Lines<{ 8 * GROUPS_PER_SUPER }>>::uninit();
    let mut sums = MaybeUninit::<Sums>::uninit();
    let sums = sums.as_mut_ptr().cast::<[[f32; PANEL]; TILE]>();
    for index in 0..segment.cols.div_ceil(SUPER) {
        let count = GROUPS_PER_SUPER.min(groups - index * GROUPS_PER_SUPER);
        // SAFETY: the superblock's groups are the segment's; the activations hold these tiles.
        unsafe {
            let records = weights.add(index * GROUPS_PER_SUPER * BITS * LINE);
            let lines: *const u8 = if BITS == 8 {
                records
            } else {
                let lines = unpacked.as_mut_ptr().cast::<u8>();
                let offset = _mm512_set1_epi8(offset as i8);
                for g in 0..count {
                    for (r, line) in unpack::<BITS>(records.add(g * BITS * LINE)).into_iter().enumerate() {
                        let to = lines.add((g * 8 + r) * LINE);
                        _mm512_store_si512(to.cast(), _mm512_sub_epi8(line, offset));
                    }
                }
                lines
            };
            let block = GroupBlock {
                lines,
                scales: weights.add(segment.scales_at + index * GROUPS_PER_SUPER * GroupScales::bytes(MINS)),
                count,
                first: index == 0,
            };
            group_tiles::<MINS>(&block, acts, index * acts.tiles, tiles.clone(), sums);
        }
    }
    // SAFETY: every sum of these tiles was written above.
    unsafe { put_tiles(segment, panel, inputs.rows, tiles, sums, out) };
}

/// Up to 8 groups of one panel, as signed bytes.
struct GroupBlock {
    lines: *const u8,
    scales: *const u8,
    count: usize,
    /// Whether sums begin with this block.
    first: bool,
}

/// Groups whose integers are under way while the vectors finish an earlier one: a tile's result must have left the store
/// buffer before it can be loaded, which takes longer than its multiplication.
const AHEAD: usize = 4;

/// Adds the groups of `block` to the sums of all `tiles`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group_tiles<const MINS: bool>(
    block: &GroupBlock,
    acts: &GroupActivations,
    superblock: usize,
    tiles: Range<usize>,
    sums: *mut [[f32; PANEL]; TILE],
) {
    let mut ring = MaybeUninit::<[Lines<TILE>; 2 * AHEAD]>::uninit();
    let ring = ring.as_mut_ptr().cast::<Lines<TILE>>();
    // SAFETY: the caller's pointers hold `count` groups of 8 lines, scales, and the activations of all `tiles`.
    unsafe {
        let values = acts.values.as_ptr().add(superblock * BLOCK);
        // Item `i` is group `i % count` of tile `tiles.start + i / count`.
        let total = tiles.len() * block.count;
        let (mut tile, mut group) = (tiles.start, 0);
        let mut start_next = |item: usize| {
            if item < total {
                let (a, b) = (values.add(tile * BLOCK + group * GROUP * TILE), block.lines.add(group * 8 * LINE));
                multiply_group(item, a, b, ring.add(item % (2 * AHEAD)).cast());
                group += 1;
                if group == block.count {
                    (tile, group) = (tile + 1, 0);
                }
            }
        };
        for item in 0..AHEAD {
            start_next(item);
        }
        let mut item = 0;
        for tile in tiles.clone() {
            let sums = sums.add(tile - tiles.start).cast::<f32>();
            let mut sum = [_mm512_setzero_ps(); TILE];
            if !block.first {
                for (r, sum) in sum.iter_mut().enumerate() {
                    *sum = _mm512_loadu_ps(sums.add(r * PANEL));
                }
            }
            for g in 0..block.count {
                start_next(item + AHEAD);
                let integers = ring.add(item % (2 * AHEAD)).cast::<i32>();
                item += 1;
                let scales = block.scales.add(g * GroupScales::bytes(MINS));
                let scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()));
                let at = ((superblock + tile) * GROUPS_PER_SUPER + g) * TILE;
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
                _mm512_storeu_ps(sums.add(r * PANEL), sum);
            }
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
        for (tiles, panel) in
            tile_batches(inputs.rows, segment.cols).flat_map(|t| panels.clone().map(move |p| (t.clone(), p)))
        {
            match segment.format {
                Format::Super { bits: Bits::B2, offset, .. } => {
                    super_panel::<2, 16, true>(segment, panel, tiles, offset, inputs, out);
                }
                Format::Super { bits: Bits::B3, offset, .. } => {
                    super_panel::<3, 16, false>(segment, panel, tiles, offset, inputs, out);
                }
                Format::Super { bits: Bits::B5, offset, .. } => {
                    super_panel::<5, 8, true>(segment, panel, tiles, offset, inputs, out);
                }
                Format::Super { bits: Bits::B6, offset, .. } => {
                    super_panel::<6, 16, false>(segment, panel, tiles, offset, inputs, out);
                }
                Format::Super { offset, .. } => super_panel::<4, 8, true>(segment, panel, tiles, offset, inputs, out),
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
unsafe fn super_panel<const BITS: usize, const SUBS: usize, const MINS: bool>(
    segment: &Segment,
    panel: usize,
    tiles: Range<usize>,
    offset: i32,
    inputs: &Inputs<'_>,
    out: Output<'_>,
) {
    let (weights, acts) = (segment.panel(panel).as_ptr(), inputs.superblock);
    let mut digits = MaybeUninit::<Digits>::uninit();
    let mut sums = MaybeUninit::<Sums>::uninit();
    let sums = sums.as_mut_ptr().cast::<[[f32; PANEL]; TILE]>();
    for index in 0..segment.cols / SUPER {
        // SAFETY: the superblock is the segment's; the activations hold these tiles.
        unsafe {
            let records = weights.add(index * GROUPS_PER_SUPER * BITS * LINE);
            let scales = weights.add(segment.scales_at + index * SuperScales::bytes(SUBS, MINS));
            fold::<BITS, SUBS, MINS>(records, scales, offset, digits.as_mut_ptr());
            let block = SuperBlock { digits: digits.as_ptr(), scales, first: index == 0 };
            super_tiles::<SUBS, MINS>(&block, acts, index * acts.tiles, tiles.clone(), sums);
        }
    }
    // SAFETY: every sum of these tiles was written above.
    unsafe { put_tiles(segment, panel, inputs.rows, tiles, sums, out) };
}

/// One superblock of one panel.
struct SuperBlock {
    digits: *const Digits,
    scales: *const u8,
    /// Whether sums begin with this block.
    first: bool,
}

/// Adds a superblock to the sums of all `tiles`, two at a time: while the tile unit multiplies a pair, vectors finish the
/// pair before it.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn super_tiles<const SUBS: usize, const MINS: bool>(
    block: &SuperBlock,
    acts: &SuperActivations,
    superblock: usize,
    tiles: Range<usize>,
    sums: *mut [[f32; PANEL]; TILE],
) {
    let mut integers = MaybeUninit::<[[Lines<TILE>; 4]; 2]>::uninit();
    let integers = integers.as_mut_ptr().cast::<[Lines<TILE>; 4]>();
    let pairs = tiles.len().div_ceil(2);
    // SAFETY: the caller's pointers hold the superblock's digits and scales and the activations of all `tiles`.
    unsafe {
        let halves = block.scales.add(SuperScales::integers(SUBS, MINS));
        let d = _mm512_cvtph_ps(_mm256_loadu_si256(halves.cast()));
        let dmin = if MINS { _mm512_cvtph_ps(_mm256_loadu_si256(halves.add(32).cast())) } else { d };
        let mins = if MINS { min_pairs::<SUBS>(block.scales) } else { [_mm512_setzero_si512(); 8] };
        for pair in 0..=pairs {
            let start = tiles.start + pair * 2;
            if pair < pairs {
                tile_zero();
            }
            for quarter in 0..4 {
                if pair < pairs {
                    // The last tile of an odd number is paired with itself.
                    let second = (start + 1).min(tiles.end - 1);
                    let values =
                        |tile: usize| acts.values.as_ptr().add((superblock + tile) * BLOCK + quarter * 64 * TILE);
                    multiply_quarter(values(start), values(second), block.digits, quarter);
                }
                if pair > 0 {
                    let tile = start - 2 + quarter / 2;
                    if tile < tiles.end {
                        let integers =
                            integers.add((pair - 1) % 2).cast::<Lines<TILE>>().add(quarter / 2 * 2).cast::<i32>();
                        let sums = sums.add(tile - tiles.start).cast::<f32>();
                        for r in quarter % 2 * 8..quarter % 2 * 8 + 8 {
                            let high = _mm512_load_si512(integers.add(r * PANEL).cast());
                            let low = _mm512_load_si512(integers.add((TILE + r) * PANEL).cast());
                            let integer = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32::<7>(high), low));
                            let row = (superblock + tile) * TILE + r;
                            let scale = _mm512_set1_ps(*acts.scales.as_ptr().add(row));
                            let sum = sums.add(r * PANEL);
                            let mut total = if block.first { _mm512_setzero_ps() } else { _mm512_loadu_ps(sum) };
                            total = _mm512_fmadd_ps(_mm512_mul_ps(d, scale), integer, total);
                            if MINS {
                                let minimum = row_minimum::<SUBS>(&mins, acts, row);
                                total = _mm512_fnmadd_ps(_mm512_mul_ps(dmin, scale), minimum, total);
                            }
                            _mm512_storeu_ps(sum, total);
                        }
                    }
                }
            }
            if pair < pairs {
                tile_store(integers.add(pair % 2).cast());
            }
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
unsafe fn tile_zero() {
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
unsafe fn tile_store(integers: *mut u8) {
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

/// Minimums of two neighbouring sub-blocks in the 16-bit halves of each feature's lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn min_pairs<const SUBS: usize>(scales: *const u8) -> [__m512i; 8] {
    let mut pairs = [_mm512_setzero_si512(); 8];
    for (i, pair) in pairs[..SUBS / 2].iter_mut().enumerate() {
        // SAFETY: the caller points at the scales of a superblock.
        unsafe {
            let min = |sub: usize| {
                if SUBS == 8 {
                    _mm512_cvtepu8_epi32(_mm_loadu_si128(scales.add((8 + sub) * PANEL).cast()))
                } else {
                    let bytes = _mm_loadu_si128(scales.add(sub * PANEL).cast());
                    _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16::<4>(bytes), _mm_set1_epi8(15)))
                }
            };
            *pair = _mm512_or_si512(min(2 * i), _mm512_slli_epi32::<16>(min(2 * i + 1)));
        }
    }
    pairs
}

unsafe fn put_tiles(
    segment: &Segment,
    panel: usize,
    rows: usize,
    tiles: Range<usize>,
    sums: *const [[f32; PANEL]; TILE],
    out: Output<'_>,
) {
    for tile in tiles.clone() {
        for r in 0..TILE.min(rows - tile * TILE) {
            // SAFETY: the caller wrote the sums of these tiles; its promise about `out`.
            unsafe { out.put(tile * TILE + r, panel, segment.rows, &(&(*sums.add(tile - tiles.start)))[r]) };
        }
    }
}

/// # Safety
/// As for [`group`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn bf16(segment: &Segment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    let rows = inputs.rows.min(TILE);
    // Sums 0..6: three parts of two panels; 6: activations; 7: weights. Fewer than 16 rows make shorter tiles.
    let config =
        TileConfig::new([(rows, 64), (rows, 64), (rows, 64), (rows, 64), (rows, 64), (rows, 64), (rows, 64), (16, 64)]);
    // SAFETY: passed on.
    unsafe {
        config.load();
        for tiles in tile_batches(inputs.rows, segment.cols * 6) {
            let mut panel = panels.start;
            while panel < panels.end {
                // Two panels: their streams from memory, and each tile of activations, are used together.
                let second = if panel + 1 < panels.end { panel + 1 } else { panel };
                for tile in tiles.clone() {
                    bf16_tile(segment, [panel, second], tile, inputs, out);
                }
                panel += 2;
            }
        }
        release();
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn bf16_tile(segment: &Segment, panels: [usize; 2], tile: usize, inputs: &Inputs<'_>, out: Output<'_>) {
    let steps = segment.cols.div_ceil(GROUP);
    let mut sums = MaybeUninit::<[Lines<TILE>; 6]>::uninit();
    // SAFETY: a panel has `steps` tiles of 1 KiB, the split activations have as many for each part of this tile.
    unsafe {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", options(nostack, nomem));
        asm!("tilezero tmm3", "tilezero tmm4", "tilezero tmm5", options(nostack, nomem));
        let mut b = panels.map(|panel| segment.panel(panel).as_ptr());
        for index in 0..steps.div_ceil(GROUPS_PER_SUPER) {
            let mut a = inputs.split.values.as_ptr().add((index * inputs.split.tiles + tile) * 3 * BLOCK);
            for _ in 0..GROUPS_PER_SUPER.min(steps - index * GROUPS_PER_SUPER) {
                asm!(
                    "tileloadd tmm7, [{b0} + {stride}]",
                    "tileloadd tmm6, [{a} + {stride}]",
                    "tdpbf16ps tmm0, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {stride} + 8192]",
                    "tdpbf16ps tmm1, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {stride} + 16384]",
                    "tdpbf16ps tmm2, tmm6, tmm7",
                    "tileloadd tmm7, [{b1} + {stride}]",
                    "tdpbf16ps tmm5, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {stride}]",
                    "tdpbf16ps tmm3, tmm6, tmm7",
                    "tileloadd tmm6, [{a} + {stride} + 8192]",
                    "tdpbf16ps tmm4, tmm6, tmm7",
                    a = in(reg) a, b0 = in(reg) b[0], b1 = in(reg) b[1], stride = in(reg) LINE, options(nostack),
                );
                a = a.add(TILE * GROUP);
                b = b.map(|b| b.add(TILE * LINE));
            }
        }
        asm!(
            "tilestored [{c} + {stride}], tmm0",
            "tilestored [{c} + {stride} + 1024], tmm1",
            "tilestored [{c} + {stride} + 2048], tmm2",
            "tilestored [{c} + {stride} + 3072], tmm3",
            "tilestored [{c} + {stride} + 4096], tmm4",
            "tilestored [{c} + {stride} + 5120], tmm5",
            c = in(reg) sums.as_mut_ptr(), stride = in(reg) LINE, options(nostack),
        );
        let sums = sums.as_ptr().cast::<f32>();
        for (p, panel) in panels.into_iter().enumerate().take(if panels[0] == panels[1] { 1 } else { 2 }) {
            for r in 0..TILE.min(inputs.rows - tile * TILE) {
                let part = |part: usize| _mm512_load_ps(sums.add(((p * 3 + part) * TILE + r) * PANEL));
                let sum = _mm512_add_ps(_mm512_add_ps(part(0), part(1)), part(2));
                let mut values = [0f32; PANEL];
                _mm512_storeu_ps(values.as_mut_ptr(), sum);
                out.put(tile * TILE + r, panel, segment.rows, &values);
            }
        }
    }
}
