//! Tile kernels for formats with a scale per group of 32: integers are stored to memory after every group.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::activations::{BLOCK, Q8Activations, TILE};
use super::super::matrix::{Bits, Blocks, Format, GROUP, GROUPS_PER_SUPER, LINE, MatrixSegment, PANEL, SUPER};
use super::super::tiles::{TileConfig, release};
use super::amx::{Lines, PANELS_AT_ONCE, Sums, SuperblockPrefetcher, TileSums, batches, put_tiles, tile_store};
use super::avx512::unpack;
use super::{Inputs, Output};

/// # Safety
/// As for [`super::avx512::panels`], and this process may use tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn panels(segment: &MatrixSegment, panels: Range<usize>, inputs: &Inputs<'_>, out: Output<'_>) {
    // Four tiles of sums, two of activations and two of weights: the tiles of one group load while another's multiply.
    let (sums, rows, weights) = ((TILE, 64), (TILE, 32), (8, 64));
    let config = TileConfig::new([sums, sums, sums, sums, rows, rows, weights, weights]);
    // SAFETY: the caller upholds the contract.
    unsafe {
        config.load();
        for (tiles, panels) in batches(inputs.rows * inputs.group.parts, segment.cols, panels, PANELS_AT_ONCE) {
            match segment.format {
                Format::Group { bits: Bits::B8, .. } => {
                    group_batch::<8, false>(segment, panels, tiles, 0, inputs, out);
                }
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

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group_batch<const BITS: usize, const MINS: bool>(
    segment: &MatrixSegment,
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
            let steps = tiles.len() * panels.len() * count * 2;
            let places = const { Blocks::groups(BITS, MINS) };
            let bytes = places.start(GROUPS_PER_SUPER);
            let mut ahead = SuperblockPrefetcher::new(segment, &panels, (index + 1) * bytes, bytes, steps);
            let mut blocks: [GroupBlock; PANELS_AT_ONCE] = std::array::from_fn(|p| {
                let panel = (panels.start + p).min(panels.end - 1);
                let packed = segment.panel(panel).as_ptr().add(index * bytes);
                GroupBlock { packed, unpacked: packed, count, first: index == 0 }
            });
            for p in 0..panels.len() {
                if BITS != 8 {
                    let lines = unpacked.as_mut_ptr().cast::<Lines<{ 8 * GROUPS_PER_SUPER }>>().add(p).cast::<u8>();
                    let offset = _mm512_set1_epi8(offset as i8);
                    for g in 0..count {
                        let record = blocks[p].packed.add(places.weights(g));
                        for (r, line) in unpack::<BITS>(record).into_iter().enumerate() {
                            let to = lines.add((g * 8 + r) * LINE);
                            // Formats with minimums have no offset.
                            let line = if MINS { line } else { _mm512_sub_epi8(line, offset) };
                            _mm512_store_si512(to.cast(), line);
                        }
                    }
                    blocks[p].unpacked = lines;
                }
            }
            for tile in tiles.clone() {
                if index + 1 == supers {
                    out.prefetch(tile, panels.clone(), inputs.rows, inputs.group.parts);
                }
                let at = index * inputs.group.tiles + tile;
                let mut sums = sums.add((tile - tiles.start) * PANELS_AT_ONCE);
                // Unpacked weights are in the cache. 8-bit weights are read from memory, which is faster one panel at a time.
                for blocks in blocks[..panels.len()].chunks(if BITS == 8 { 1 } else { 2 }) {
                    match *blocks {
                        [first, second] => {
                            group_tile::<BITS, 2, MINS>([first, second], inputs.group, at, sums, &mut ahead)
                        }
                        [only, ..] => group_tile::<BITS, 1, MINS>([only], inputs.group, at, sums, &mut ahead),
                        [] => unreachable!("chunks are not empty"),
                    }
                    sums = sums.add(blocks.len());
                }
            }
        }
    }
    // SAFETY: every sum of these tiles and panels was written above.
    unsafe { put_tiles(segment, panels, inputs.rows, inputs.group.parts, tiles, sums, out) };
}

/// Up to 8 groups of one panel.
#[derive(Clone, Copy)]
struct GroupBlock {
    /// The packed record.
    packed: *const u8,
    /// The weights as signed bytes, one group after the other. With 8 bits, the same address as `packed`.
    unpacked: *const u8,
    count: usize,
    /// Whether this is the first block, which initialises the sums.
    first: bool,
}

impl GroupBlock {
    /// The weights of a group as signed bytes. If the group's index is even, the weights of the next group follow.
    #[inline(always)]
    fn lines<const BITS: usize, const MINS: bool>(&self, group: usize) -> *const u8 {
        let whole = const { Blocks::groups(BITS, MINS) }.weights(group);
        self.unpacked.wrapping_add(if BITS == 8 { whole } else { group * 8 * LINE })
    }
}

/// A row of integers.
#[repr(align(64))]
struct Integers([i32; PANEL]);

/// The bits of `1.5 * 2^23`: adding an integer below 2^22 to these bits gives the float `1.5 * 2^23 + integer`.
static REBASE: Integers = Integers([0x4b40_0000; PANEL]);

/// Adds the groups of the blocks of one or two adjacent panels to the sums of one tile: first all tile products, then all
/// vector operations, because the tile unit and the vector unit hardly overlap and alternating per group costs more.
///
/// Integer sums start at [`REBASE`], so the stored results are the bits of floats, and
/// `fma(float, scale, -1.5 * 2^23 * scale)` is `integer * scale`, rounded once: see [`Q8Activations::rebase`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn group_tile<const BITS: usize, const P: usize, const MINS: bool>(
    blocks: [GroupBlock; P],
    acts: &Q8Activations,
    at: usize,
    sums: *mut TileSums,
    ahead: &mut SuperblockPrefetcher,
) {
    /// Rows whose sums stay in registers.
    const AT_ONCE: usize = 8;
    /// Groups whose products are stored before vectors read them: few enough not to evict weights from the first-level cache.
    const GROUPS_AT_ONCE: usize = 4;
    let mut floats = MaybeUninit::<[[Lines<TILE>; 2]; GROUPS_AT_ONCE]>::uninit();
    let floats = floats.as_mut_ptr().cast::<f32>();
    let GroupBlock { count, first, .. } = blocks[0];
    for start in (0..count).step_by(GROUPS_AT_ONCE) {
        let groups = start..count.min(start + GROUPS_AT_ONCE);
        // SAFETY: the caller's pointers hold `count` groups of 8 lines, scales, and the activations of this tile.
        unsafe {
            let per_four = 4 / P;
            for g in groups.clone().step_by(per_four) {
                let lines = |p: usize, g: usize| blocks[p].lines::<BITS, MINS>(g);
                let rows = acts.values.as_ptr().add(at * BLOCK + g * GROUP * TILE);
                let floats = floats.add((g - start) * P * TILE * PANEL);
                match groups.end - g >= per_four {
                    true if P == 2 => multiply_four::<P>(rows, [lines(0, g), lines(P - 1, g)], floats),
                    true => multiply_four::<P>(rows, [lines(0, g), lines(0, g + 2)], floats),
                    false => (0..groups.end - g).for_each(|i| {
                        let weights = [lines(0, g + i), lines(P - 1, g + i)];
                        multiply_group::<P>(rows.add(i * GROUP * TILE), weights, floats.add(i * P * TILE * PANEL));
                    }),
                }
                (g..groups.end.min(g + per_four)).for_each(|_| ahead.step());
            }
            for row in (0..TILE).step_by(AT_ONCE) {
                let place = |p: usize, r: usize| sums.add(p).cast::<f32>().add((row + r) * PANEL);
                let mut sum = [[_mm512_setzero_ps(); AT_ONCE]; P];
                if !first || start > 0 {
                    for (p, sum) in sum.iter_mut().enumerate() {
                        for (r, sum) in sum.iter_mut().enumerate() {
                            *sum = _mm512_load_ps(place(p, r));
                        }
                    }
                }
                for g in groups.clone() {
                    if row == 0 {
                        ahead.step();
                    }
                    let at = (at * GROUPS_PER_SUPER + g) * TILE + row;
                    let floats = floats.add(((g - start) * P * TILE + row) * PANEL);
                    let half = |p: usize, which: usize| {
                        let scales =
                            blocks[p].packed.add(const { Blocks::groups(BITS, MINS) }.scales(g) + which * 2 * PANEL);
                        _mm512_cvtph_ps(_mm256_loadu_si256(scales.cast()))
                    };
                    let scales: [__m512; P] = std::array::from_fn(|p| half(p, 0));
                    for r in 0..AT_ONCE {
                        let scale = _mm512_set1_ps(*acts.scales.as_ptr().add(at + r));
                        let rebase = _mm512_set1_ps(*acts.rebase.as_ptr().add(at + r));
                        for p in 0..P {
                            let float = _mm512_load_ps(floats.add((p * TILE + r) * PANEL));
                            let scaled = _mm512_fmadd_ps(float, scale, rebase);
                            sum[p][r] = _mm512_fmadd_ps(scaled, scales[p], sum[p][r]);
                        }
                    }
                    if MINS {
                        let mins: [__m512; P] = std::array::from_fn(|p| half(p, 1));
                        for r in 0..AT_ONCE {
                            let weighted = _mm512_set1_ps(*acts.weighted.as_ptr().add(at + r));
                            for p in 0..P {
                                sum[p][r] = _mm512_fmadd_ps(weighted, mins[p], sum[p][r]);
                            }
                        }
                    }
                }
                for (p, sum) in sum.into_iter().enumerate() {
                    for (r, sum) in sum.into_iter().enumerate() {
                        _mm512_store_ps(place(p, r), sum);
                    }
                }
            }
        }
    }
}

/// Multiplies a tile of rows by two groups of two panels, or by four groups of one panel. All products are issued before the
/// first store, because a store waits for its product and delays the instructions after it.
#[inline(always)]
unsafe fn multiply_four<const P: usize>(a: *const i8, b: [*const u8; 2], floats: *mut f32) {
    // SAFETY: the caller's pointers refer to that many groups of rows of 32 bytes, to groups of 8 lines of each panel, and to
    // space for four tiles.
    unsafe {
        if P == 2 {
            asm!(
                "tileloadd tmm0, [{rebase} + {zero}]",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm6, [{b0} + {line}]",
                "tileloadd tmm1, [{rebase} + {zero}]",
                "tdpbssd tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b1} + {line}]",
                "tileloadd tmm2, [{rebase} + {zero}]",
                "tdpbssd tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a} + {a_stride} + 512]",
                "tileloadd tmm6, [{b0} + {line} + 512]",
                "tileloadd tmm3, [{rebase} + {zero}]",
                "tdpbssd tmm2, tmm5, tmm6",
                "tileloadd tmm7, [{b1} + {line} + 512]",
                "tdpbssd tmm3, tmm5, tmm7",
                a = in(reg) a, b0 = in(reg) b[0], b1 = in(reg) b[1], rebase = in(reg) REBASE.0.as_ptr(),
                a_stride = in(reg) GROUP, line = in(reg) LINE, zero = in(reg) 0usize, options(nostack, readonly),
            );
        } else {
            asm!(
                "tileloadd tmm0, [{rebase} + {zero}]",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm6, [{b0} + {line}]",
                "tileloadd tmm1, [{rebase} + {zero}]",
                "tdpbssd tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a} + {a_stride} + 512]",
                "tileloadd tmm7, [{b0} + {line} + 512]",
                "tileloadd tmm2, [{rebase} + {zero}]",
                "tdpbssd tmm1, tmm5, tmm7",
                "tileloadd tmm4, [{a} + {a_stride} + 1024]",
                "tileloadd tmm6, [{b1} + {line}]",
                "tileloadd tmm3, [{rebase} + {zero}]",
                "tdpbssd tmm2, tmm4, tmm6",
                "tileloadd tmm5, [{a} + {a_stride} + 1536]",
                "tileloadd tmm7, [{b1} + {line} + 512]",
                "tdpbssd tmm3, tmm5, tmm7",
                a = in(reg) a, b0 = in(reg) b[0], b1 = in(reg) b[1], rebase = in(reg) REBASE.0.as_ptr(),
                a_stride = in(reg) GROUP, line = in(reg) LINE, zero = in(reg) 0usize, options(nostack, readonly),
            );
        }
        tile_store(floats.cast());
    }
}

/// Multiplies a tile of rows by one group of 32 inputs of each panel.
#[inline(always)]
unsafe fn multiply_group<const P: usize>(a: *const i8, b: [*const u8; 2], floats: *mut f32) {
    // SAFETY: the caller's pointers refer to rows of 32 bytes, to 8 lines of each panel, and to space for a tile per panel.
    unsafe {
        if P == 2 {
            asm!(
                "tileloadd tmm0, [{rebase} + {zero}]",
                "tileloadd tmm1, [{rebase} + {zero}]",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm6, [{b0} + {line}]",
                "tdpbssd tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b1} + {line}]",
                "tdpbssd tmm1, tmm4, tmm7",
                "tilestored [{c} + {line}], tmm0",
                "tilestored [{c} + {line} + 1024], tmm1",
                a = in(reg) a, b0 = in(reg) b[0], b1 = in(reg) b[1], c = in(reg) floats, rebase = in(reg) REBASE.0.as_ptr(),
                a_stride = in(reg) GROUP, line = in(reg) LINE, zero = in(reg) 0usize, options(nostack),
            );
        } else {
            asm!(
                "tileloadd tmm0, [{rebase} + {zero}]",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm6, [{b} + {line}]",
                "tdpbssd tmm0, tmm4, tmm6",
                "tilestored [{c} + {line}], tmm0",
                a = in(reg) a, b = in(reg) b[0], c = in(reg) floats, rebase = in(reg) REBASE.0.as_ptr(),
                a_stride = in(reg) GROUP, line = in(reg) LINE, zero = in(reg) 0usize, options(nostack),
            );
        }
    }
}
