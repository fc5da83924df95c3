//! Weights in the packed layout that every CPU kernel reads, on every level.
//!
//! A matrix is cut into *panels* of 16 output features (the last one padded with zeros). Within a panel, four
//! consecutive inputs of the 16 features make a 64-byte *line*: byte `4 f + i` is input `i` of feature `f`. That is
//! one row of an int8 tile and one operand of a VNNI dot product, and one vector lane is one feature, so no kernel ever
//! adds across lanes. Every 32 inputs make a *group*, every 256 a *superblock*, as in the formats themselves.
//!
//! Quantised weights keep their bits: a group of `b`-bit weights is a record of `64 b` bytes ([`Bits`]). The scales of a
//! block are stored directly before its records ([`Blocks`]), so a panel is one linear stream that is read once per step; on
//! some machines a thread reads two separate streams more slowly. On AMX, bf16 weights are packed in 12 bits without loss
//! ([`super::packed12`]).

use half::f16;
use types::DType;

use super::arena::{Allocation, Arena};
use super::level::Level;
use super::packed12::{self, Found, Outliers};
use super::pool::Pool;
use crate::{BackendError, MatrixSource};

/// Output features in a panel: the lanes of a 512-bit vector of f32.
pub(crate) const PANEL: usize = 16;
/// Inputs in a group, which share a scale in the non-K formats.
pub(crate) const GROUP: usize = 32;
/// Inputs in a superblock of the K formats, and the depth of one kernel iteration over a panel.
pub(crate) const SUPER: usize = 256;
pub(crate) const GROUPS_PER_SUPER: usize = SUPER / GROUP;
pub(crate) const LINE: usize = 64;

/// Bits of a stored weight. The record of a group consists of some of these bit planes, in this order:
/// a low nibble plane (4 lines: nibbles of lines `j` and `j + 4` share a byte), a two-bit plane (2 lines: field `f` of
/// line `j` belongs to line `4 j + f`), a one-bit plane (8 words of 64 bits, one per line), or 8 lines of whole bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bits {
    B2 = 2,
    B3 = 3,
    B4 = 4,
    B5 = 5,
    B6 = 6,
    B8 = 8,
}

impl Bits {
    /// Bytes of the record of one group of one panel.
    pub(crate) const fn record(self) -> usize {
        self as usize * LINE
    }
}

/// The storage format of a panel, and how its integers are dequantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    F16,
    /// Pairs of inputs interleaved, as bf16 tiles require: `[cols / 2][feature][2]`.
    Bf16,
    /// The same weights in 12 bits: see [`super::packed12`].
    Bf16Packed12,
    /// `w = scale * (q - offset) + min`, one f16 scale (and min) per feature and group: 32 (or 64) bytes per group.
    Group {
        bits: Bits,
        offset: i32,
        mins: bool,
    },
    /// `w = d * scale * (q - offset) - dmin * min`, one d (and dmin) per feature and superblock, integer scales per
    /// sub-block of `256 / subs` inputs.
    Super {
        bits: Bits,
        offset: i32,
        subs: usize,
        mins: bool,
    },
}

impl Format {
    pub(crate) fn of(dtype: DType) -> Self {
        use Bits::{B2, B3, B4, B5, B6, B8};
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
            DType::Q8_0 => Self::Group { bits: B8, offset: 0, mins: false },
            DType::Q4_0 => Self::Group { bits: B4, offset: 8, mins: false },
            DType::Q4_1 => Self::Group { bits: B4, offset: 0, mins: true },
            DType::Q5_0 => Self::Group { bits: B5, offset: 16, mins: false },
            DType::Q5_1 => Self::Group { bits: B5, offset: 0, mins: true },
            DType::Q2_K => Self::Super { bits: B2, offset: 0, subs: 16, mins: true },
            DType::Q3_K => Self::Super { bits: B3, offset: 4, subs: 16, mins: false },
            DType::Q4_K => Self::Super { bits: B4, offset: 0, subs: 8, mins: true },
            DType::Q5_K => Self::Super { bits: B5, offset: 0, subs: 8, mins: true },
            DType::Q6_K => Self::Super { bits: B6, offset: 32, subs: 16, mins: false },
        }
    }

    /// Bytes from one panel to the next.
    fn stride(self, cols: usize) -> usize {
        match self {
            Self::F32 => cols * PANEL * 4,
            Self::F16 => (cols * PANEL * 2).next_multiple_of(LINE),
            Self::Bf16 => cols.next_multiple_of(GROUP) * PANEL * 2,
            Self::Bf16Packed12 => packed12::stride(cols),
            Self::Group { bits, mins, .. } => Blocks::groups(bits as usize, mins).bytes(cols / GROUP),
            Self::Super { bits, subs, mins, .. } => Blocks::superblocks(bits as usize, subs, mins).bytes(cols / SUPER),
        }
    }

    /// Bytes of all panels of `rows` features.
    fn panels_bytes(self, rows: usize, cols: usize) -> usize {
        rows.div_ceil(PANEL) * self.stride(cols)
    }
}

/// The layout of a panel's blocks (groups or superblocks): the scales of a block, then its weights. If the scales of one
/// block are not a whole number of lines, the scales of two blocks precede the weights of both, so that weights are always
/// aligned to a line.
///
/// Scales of a group are 16 f16, then 16 f16 minimums if the format has them.
#[derive(Clone, Copy)]
pub(crate) struct Blocks {
    /// Bytes of a block's scales and of its weights.
    scales: usize,
    weights: usize,
}

impl Blocks {
    pub(crate) const fn groups(bits: usize, mins: bool) -> Self {
        Self { scales: if mins { 64 } else { 32 }, weights: bits * LINE }
    }

    pub(crate) const fn superblocks(bits: usize, subs: usize, mins: bool) -> Self {
        Self { scales: SuperScales::bytes(subs, mins), weights: GROUPS_PER_SUPER * bits * LINE }
    }

    /// How many blocks are stored together: the scales of all, then the weights of all.
    pub(crate) const fn together(self) -> usize {
        if self.scales.is_multiple_of(LINE) { 1 } else { 2 }
    }

    /// The offset of the blocks that are stored together with `block`.
    pub(crate) const fn start(self, block: usize) -> usize {
        block / self.together() * self.together() * (self.scales + self.weights)
    }

    /// The offset of a block's scales.
    pub(crate) const fn scales(self, block: usize) -> usize {
        self.start(block) + block % self.together() * self.scales
    }

    /// The offset of a block's weights.
    pub(crate) const fn weights(self, block: usize) -> usize {
        self.start(block) + self.together() * self.scales + block % self.together() * self.weights
    }

    /// Bytes of `blocks` blocks.
    pub(crate) const fn bytes(self, blocks: usize) -> usize {
        match blocks {
            0 => 0,
            _ => self.weights(blocks - 1) + self.weights,
        }
    }
}

/// Scales of a superblock: `subs` rows of 16 integers, then 16 f16 `d`, then 16 f16 `dmin` if the format has minimums. With
/// 8 sub-blocks, the integer minimums are 8 more rows; with 16, scale (low nibble) and minimum share a byte.
pub(crate) struct SuperScales;

impl SuperScales {
    pub(crate) const INTEGERS: usize = 256;

    pub(crate) const fn integers(subs: usize, mins: bool) -> usize {
        if mins { Self::INTEGERS } else { subs * PANEL }
    }

    pub(crate) const fn bytes(subs: usize, mins: bool) -> usize {
        Self::integers(subs, mins) + if mins { 64 } else { 32 }
    }
}

/// A stack of [`Segment`]s with the same columns.
pub struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) segments: Vec<MatrixSegment>,
}

/// Consecutive panels, for prefetching.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    /// The address of the first panel.
    pub(super) start: usize,
    /// Bytes of a panel.
    pub(super) stride: usize,
}

/// Consecutive output features in one format.
pub(crate) struct MatrixSegment {
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) format: Format,
    /// Bytes from one panel to the next.
    pub(crate) stride: usize,
    pub(crate) bytes: Allocation,
    /// Only for [`Format::Bf16Packed12`].
    uncommon: Option<Box<Outliers>>,
}

impl Matrix {
    pub(crate) fn pack(
        parts: &[MatrixSource<'_>],
        arena: &Arena,
        pool: &Pool,
        level: Level,
    ) -> Result<Self, BackendError> {
        let cols = parts.first().map_or(0, |part| part.cols);
        let (mut rows, mut segments) = (0, Vec::with_capacity(parts.len()));
        for part in parts {
            part.check()?;
            assert_eq!(part.cols, cols, "parts of a stack have the same columns");
        }
        for parts in merge_segments(parts) {
            let segment = MatrixSegment::pack(parts, rows, arena, pool, level)?;
            rows += segment.rows;
            segments.push(segment);
        }
        Ok(Self { rows, cols, segments })
    }

    /// An upper bound of the bytes that `pack` would allocate.
    pub(crate) fn packed_bytes(parts: &[MatrixSource<'_>], level: Level) -> usize {
        let bytes = |parts: &[MatrixSource<'_>]| {
            let format = MatrixSegment::format(parts, level);
            let panels = |part: &MatrixSource<'_>| format.panels_bytes(part.rows, part.cols);
            let uncommon = |part: &MatrixSource<'_>| match format {
                Format::Bf16Packed12 => packed12::uncommon_bytes_max(part.rows.div_ceil(PANEL), part.cols),
                _ => 0,
            };
            parts.iter().map(|part| panels(part) + uncommon(part)).sum::<usize>()
        };
        merge_segments(parts).map(bytes).sum()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.segments.iter().map(MatrixSegment::all_bytes).sum()
    }

    pub(crate) fn is_quantised(&self) -> bool {
        self.segments.iter().any(MatrixSegment::is_quantised)
    }

    /// Dequantises row `row`.
    pub(crate) fn unpack_row(&self, row: usize, out: &mut [f32]) {
        let segment = self.segments.iter().rfind(|segment| segment.first <= row).expect("row is in range");
        segment.unpack_row(row - segment.first, out);
    }
}

/// Groups adjacent parts of the same format into one segment, so that kernels process them as one. Exactly two parts stay
/// separate: they may be the gate and up projections, which are processed side by side.
fn merge_segments<'a, 'b>(parts: &'a [MatrixSource<'b>]) -> impl Iterator<Item = &'a [MatrixSource<'b>]> {
    parts.chunk_by(|part, next| parts.len() > 2 && part.keep == next.keep && part.rows.is_multiple_of(PANEL))
}

impl MatrixSegment {
    /// The packed format of parts that have the same `keep`.
    fn format(parts: &[MatrixSource<'_>], level: Level) -> Format {
        match Format::of(parts[0].keep) {
            Format::Bf16 if level == Level::Amx && parts.iter().all(|part| should_pack12(part, level)) => {
                Format::Bf16Packed12
            }
            format => format,
        }
    }

    /// Packs parts that have the same `keep`. All parts but the last are whole panels.
    fn pack(
        parts: &[MatrixSource<'_>],
        first: usize,
        arena: &Arena,
        pool: &Pool,
        level: Level,
    ) -> Result<Self, BackendError> {
        match Self::pack_as(Self::format(parts, level), parts, first, arena, pool, level)? {
            Some(packed) => Ok(packed),
            // The sample that `should_pack12` looked at was not representative.
            None => Ok(Self::pack_as(Format::Bf16, parts, first, arena, pool, level)?.expect("Bf16 holds any weights")),
        }
    }

    /// Packs parts in `format`; `None` if the format does not suit the weights.
    fn pack_as(
        format: Format,
        parts: &[MatrixSource<'_>],
        first: usize,
        arena: &Arena,
        pool: &Pool,
        level: Level,
    ) -> Result<Option<Self>, BackendError> {
        let (cols, panels) = (parts[0].cols, parts.iter().map(|part| part.rows.div_ceil(PANEL)).sum());
        let (stride, rows) = (format.stride(cols), parts.iter().map(|part| part.rows).sum());
        let mut bytes = arena.zeroed("weights", format.panels_bytes(rows, cols))?;
        let mut rest = &mut *bytes;
        let (mut before, found) = (0, Found::in_all(panels, cols));
        for part in parts {
            let (packed, others) = rest.split_at_mut(format.panels_bytes(part.rows, cols));
            let start = SendPtr(packed.as_mut_ptr());
            pool.run(part.rows.div_ceil(PANEL), &|_, panel| {
                // SAFETY: panels are disjoint ranges of `packed`, each taken by one chunk.
                let out = unsafe { std::slice::from_raw_parts_mut(start.get().add(panel * stride), stride) };
                match format {
                    Format::Bf16Packed12 => {
                        let plain = plain_panel(part, panel, level);
                        super::pack::packed12_panel(level, &plain, out, before + panel, cols, &found);
                    }
                    _ => super::pack::panel(part, panel, format, out, level),
                }
            });
            before += part.rows.div_ceil(PANEL);
            rest = others;
        }
        let uncommon = match format {
            Format::Bf16Packed12 if found.within_limit() => Some(Box::new(found.sorted(panels, cols)?)),
            Format::Bf16Packed12 => return Ok(None),
            _ => None,
        };
        Ok(Some(Self { first, rows, cols, format, stride, bytes, uncommon }))
    }

    fn all_bytes(&self) -> usize {
        self.bytes.len() + self.uncommon.as_ref().map_or(0, |uncommon| uncommon.bytes())
    }

    /// The uncommon quarters of a [`Format::Bf16Packed12`] panel and of the panels after it: see [`Outliers::from`].
    pub(super) fn uncommon(&self, panel: usize) -> (&[u32], &[u8]) {
        self.uncommon.as_ref().expect("a Bf16Packed12 segment").from(panel)
    }

    pub(crate) fn is_quantised(&self) -> bool {
        matches!(self.format, Format::Group { .. } | Format::Super { .. })
    }

    pub(crate) fn is_bf16(&self) -> bool {
        matches!(self.format, Format::Bf16 | Format::Bf16Packed12)
    }

    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    pub(crate) fn panel(&self, panel: usize) -> &[u8] {
        &self.bytes[panel * self.stride..(panel + 1) * self.stride]
    }

    /// The panels from `panel` on, for prefetching.
    pub(super) fn from(&self, panel: usize) -> Panels {
        Panels { start: self.panel(panel).as_ptr().addr(), stride: self.stride }
    }

    fn unpack_row(&self, row: usize, out: &mut [f32]) {
        let (panel, feature, out) = (row / PANEL, row % PANEL, &mut out[..self.cols]);
        match self.format {
            Format::Bf16Packed12 => {
                let (first, uncommon) = (packed12::first(panel, self.cols), self.uncommon(panel));
                packed12::unpack_feature(self.panel(panel), first, uncommon, feature, out);
            }
            format => unpack_feature(format, self.panel(panel), feature, out),
        }
    }
}

/// A panel of unpacked bf16 weights.
fn plain_panel(part: &MatrixSource<'_>, panel: usize, level: Level) -> Vec<u8> {
    let mut plain = vec![0; Format::Bf16.stride(part.cols)];
    super::pack::panel(part, panel, Format::Bf16, &mut plain, level);
    plain
}

/// Whether bf16 weights should be packed in 12 bits, judged from a sample of panels.
fn should_pack12(part: &MatrixSource<'_>, level: Level) -> bool {
    const SAMPLES: usize = 2;
    let (panels, cols) = (part.rows.div_ceil(PANEL), part.cols);
    let samples = (0..panels).step_by(panels.div_ceil(SAMPLES).max(1));
    let (found, mut out) = (Found::in_sample(samples.len(), cols), vec![0; packed12::stride(cols)]);
    for panel in samples {
        super::pack::packed12_panel(level, &plain_panel(part, panel, level), &mut out, panel, cols, &found);
    }
    let quarters = packed12::first(panels, cols);
    (1..u32::MAX as usize).contains(&quarters) && found.within_limit()
}

/// Dequantises one feature of a panel. This function defines the meaning of the packed layout.
fn unpack_feature(format: Format, panel: &[u8], feature: usize, out: &mut [f32]) {
    let half_at = |bytes: &[u8], at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
    match format {
        Format::F32 => {
            for (k, value) in out.iter_mut().enumerate() {
                let at = (k * PANEL + feature) * 4;
                *value = f32::from_le_bytes(panel[at..at + 4].try_into().expect("four bytes"));
            }
        }
        Format::F16 => {
            for (k, value) in out.iter_mut().enumerate() {
                *value = half_at(panel, (k * PANEL + feature) * 2);
            }
        }
        Format::Bf16 => {
            for (k, value) in out.iter_mut().enumerate() {
                let at = (k / 2 * PANEL + feature) * 4 + k % 2 * 2;
                *value = f32::from_bits(u32::from(u16::from_le_bytes([panel[at], panel[at + 1]])) << 16);
            }
        }
        Format::Bf16Packed12 => unreachable!("`packed12::unpack_feature` handles this format"),
        Format::Group { bits, offset, mins } => {
            let blocks = Blocks::groups(bits as usize, mins);
            for (group, values) in out.chunks_exact_mut(GROUP).enumerate() {
                let (record, scales) = (&panel[blocks.weights(group)..], &panel[blocks.scales(group)..]);
                let scale = half_at(scales, feature * 2);
                let min = if mins { half_at(scales, 32 + feature * 2) } else { 0.0 };
                for (k, value) in values.iter_mut().enumerate() {
                    *value = scale * (stored(bits, record, feature, k) - offset) as f32 + min;
                }
            }
        }
        Format::Super { bits, offset, subs, mins } => {
            let blocks = Blocks::superblocks(bits as usize, subs, mins);
            for (k, value) in out.iter_mut().enumerate() {
                let (superblock, within) = (k / SUPER, k % SUPER);
                let record = &panel[blocks.weights(superblock) + within / GROUP * bits.record()..];
                let scales = &panel[blocks.scales(superblock)..];
                let (scale, min) = sub_scale(scales, subs, mins, within / (SUPER / subs), feature);
                let halves = &scales[SuperScales::integers(subs, mins)..];
                let d = half_at(halves, feature * 2);
                let dmin = if mins { half_at(halves, 32 + feature * 2) } else { 0.0 };
                let q = stored(bits, record, feature, k % GROUP) - offset;
                *value = d * (scale * q) as f32 - dmin * min as f32;
            }
        }
    }
}

/// The integer scale and minimum of one sub-block of one feature.
pub(crate) fn sub_scale(scales: &[u8], subs: usize, mins: bool, sub: usize, feature: usize) -> (i32, i32) {
    let byte = scales[sub * PANEL + feature];
    match (subs, mins) {
        (8, true) => (i32::from(byte), i32::from(scales[(8 + sub) * PANEL + feature])),
        (_, true) => (i32::from(byte & 15), i32::from(byte >> 4)),
        (_, false) => (i32::from(byte as i8), 0),
    }
}

/// Weight `k` of a feature in a group's record, as the stored integer: signed for 8 bits, else unsigned.
pub(crate) fn stored(bits: Bits, record: &[u8], feature: usize, k: usize) -> i32 {
    let (line, byte) = (k / 4, feature * 4 + k % 4);
    let nibble = || i32::from(record[line % 4 * LINE + byte] >> (line / 4 * 4) & 15);
    let pair = |at: usize| i32::from(record[at + line / 4 * LINE + byte] >> (line % 4 * 2) & 3);
    let bit = |at: usize| i32::from(record[at + line * 8 + byte / 8] >> (byte % 8) & 1);
    match bits {
        Bits::B2 => pair(0),
        Bits::B3 => pair(0) | bit(2 * LINE) << 2,
        Bits::B4 => nibble(),
        Bits::B5 => nibble() | bit(4 * LINE) << 4,
        Bits::B6 => nibble() | pair(4 * LINE) << 4,
        Bits::B8 => i32::from(record[line * LINE + byte] as i8),
    }
}

/// A pointer that several workers use for disjoint parts.
pub(crate) struct SendPtr<T>(pub(crate) *mut T);
// SAFETY: every dereference is unsafe, and its `SAFETY` comment shows that the accesses are disjoint.
unsafe impl<T> Send for SendPtr<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for SendPtr<T> {}

impl<T> SendPtr<T> {
    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_do_not_overlap_and_weights_begin_with_a_line() {
        let formats = DType::ALL.map(Format::of).map(|format| match format {
            Format::Group { bits, mins, .. } => Some(Blocks::groups(bits as usize, mins)),
            Format::Super { bits, subs, mins, .. } => Some(Blocks::superblocks(bits as usize, subs, mins)),
            Format::F32 | Format::F16 | Format::Bf16 | Format::Bf16Packed12 => None,
        });
        for (blocks, count) in formats.into_iter().flatten().flat_map(|blocks| (0..6).map(move |count| (blocks, count)))
        {
            let mut taken = vec![false; blocks.bytes(count)];
            for block in 0..count {
                assert!(blocks.weights(block).is_multiple_of(LINE));
                for (start, len) in [(blocks.scales(block), blocks.scales), (blocks.weights(block), blocks.weights)] {
                    let place = &mut taken[start..start + len];
                    assert!(place.iter().all(|&byte| !byte), "block {block} of {count}");
                    place.fill(true);
                }
            }
            // The only free bytes are the scales of the missing second block of the last pair.
            let free = taken.iter().filter(|&&byte| !byte).count();
            assert_eq!(free, count % blocks.together() * blocks.scales);
        }
    }
}
