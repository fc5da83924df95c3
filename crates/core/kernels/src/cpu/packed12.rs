//! bf16 weights packed in 12 bits, without loss.
//!
//! The high byte of a bf16 number is its sign and all of its exponent but the last bit (the *power*, seven bits). Nearly all
//! weights of a panel have one of eight powers. So a weight is stored as its low byte and a *code* of four bits: its sign
//! and the index of its power among the panel's eight. Decode is memory-bound, and this reads a quarter fewer bytes.
//!
//! A panel starts with a line whose first 16 bytes are the table from codes to high bytes. Every *quarter* of a group (8
//! inputs of 16 features) is a line of codes and two lines of low bytes. Their order lets vectors interleave high and low
//! bytes to the four lines of [`Format::Bf16`](super::matrix::Format): byte `16 l + 8 i + w` of the low bytes `h` belongs to
//! word `8 l + w` of line `2 h + i`, and its code is the low (`h = 0`) or high nibble of the same byte of the codes. A
//! quarter with a weight that has none of the eight powers is *uncommon*: its high bytes are stored separately in full.

use std::cmp::Reverse;
use std::sync::{Mutex, PoisonError};

use super::matrix::{GROUP, LINE, PANEL};
use super::memory::Aligned;
use crate::BackendError;

pub(crate) const QUARTERS_PER_GROUP: usize = 4;
/// Bytes of a quarter, unpacked and packed, and of its high bytes.
pub(crate) const PLAIN: usize = GROUP / QUARTERS_PER_GROUP * PANEL * 2;
pub(crate) const PACKED: usize = 3 * LINE;
pub(crate) const HIGHS: usize = 2 * LINE;
/// Bytes before the first quarter of a panel.
pub(crate) const HEAD: usize = LINE;
/// Powers in a panel's table.
const POWERS: usize = 8;
/// The sign bit of a high byte.
const SIGN: u8 = 0x80;
/// The code of a power that is not in the table, used only during packing.
const NO_CODE: u8 = 0x40;
/// Weights are packed if at most one in `UNCOMMON_SAMPLED` quarters of the sample is uncommon. Packing is abandoned if more
/// than one in `UNCOMMON_MOST` of all quarters is.
const UNCOMMON_SAMPLED: usize = 8;
const UNCOMMON_MOST: usize = 4;

/// Bytes of a packed panel.
pub(crate) fn stride(cols: usize) -> usize {
    HEAD + cols.div_ceil(GROUP) * QUARTERS_PER_GROUP * PACKED
}

/// The uncommon quarters of all panels, in order.
pub(crate) struct Outliers {
    /// For each panel, the number of uncommon quarters before it.
    starts: Vec<u32>,
    /// Indices of the uncommon quarters, counted across all panels, with `u32::MAX` as the end marker.
    quarters: Vec<u32>,
    /// High bytes, in the same order as the low bytes.
    highs: Aligned<u8>,
}

/// Outliers quarters found by the packing threads, unsorted.
pub(crate) struct Found {
    /// With more than this many, the weights are not packed.
    most: usize,
    quarters: Mutex<Vec<(u32, [u8; HIGHS])>>,
}

impl Found {
    /// For packing all `panels` panels.
    pub(crate) fn in_all(panels: usize, cols: usize) -> Self {
        Self { most: first(panels, cols) / UNCOMMON_MOST, quarters: Mutex::default() }
    }

    /// For a sample of `panels` panels.
    pub(crate) fn in_sample(panels: usize, cols: usize) -> Self {
        Self { most: first(panels, cols) / UNCOMMON_SAMPLED, quarters: Mutex::default() }
    }

    fn add(&self, uncommon: &mut Vec<(u32, [u8; HIGHS])>) {
        let mut quarters = self.quarters.lock().unwrap_or_else(PoisonError::into_inner);
        if quarters.len() <= self.most {
            quarters.append(uncommon);
        }
    }

    pub(crate) fn within_limit(&self) -> bool {
        self.quarters.lock().unwrap_or_else(PoisonError::into_inner).len() <= self.most
    }

    pub(crate) fn sorted(self, panels: usize, cols: usize) -> Result<Outliers, BackendError> {
        let mut found = self.quarters.into_inner().unwrap_or_else(PoisonError::into_inner);
        found.sort_unstable_by_key(|&(quarter, _)| quarter);
        let mut highs = Aligned::zeroed("weights", found.len() * HIGHS)?;
        for (out, (_, bytes)) in highs.chunks_exact_mut(HIGHS).zip(&found) {
            out.copy_from_slice(bytes);
        }
        let before =
            |panel: usize| found.partition_point(|&(quarter, _)| (quarter as usize) < first(panel, cols)) as u32;
        let starts = (0..panels).map(before).collect();
        let quarters = found.iter().map(|&(quarter, _)| quarter).chain([u32::MAX]).collect();
        Ok(Outliers { starts, quarters, highs })
    }
}

/// The index of a panel's first quarter, counted across all panels.
pub(crate) fn first(panel: usize, cols: usize) -> usize {
    panel * cols.div_ceil(GROUP) * QUARTERS_PER_GROUP
}

impl Outliers {
    pub(crate) fn bytes(&self) -> usize {
        size_of::<u32>() * (self.starts.len() + self.quarters.len()) + self.highs.len()
    }

    /// The uncommon quarters of a panel and of all panels after it: their indices and their high bytes.
    pub(crate) fn from(&self, panel: usize) -> (&[u32], &[u8]) {
        let start = self.starts[panel] as usize;
        (&self.quarters[start..], &self.highs[start * HIGHS..])
    }
}

/// The most frequent powers of an unpacked panel, counted in every fourth quarter.
fn powers(plain: &[u8]) -> [u8; POWERS] {
    // Two tables, so that consecutive increments do not depend on each other.
    let mut counts = [[0u32; 128]; 2];
    for words in plain.chunks_exact(PLAIN).step_by(4).flat_map(|quarter| quarter.chunks_exact(4)) {
        counts[0][usize::from(words[1] & 0x7f)] += 1;
        counts[1][usize::from(words[3] & 0x7f)] += 1;
    }
    let mut by_count: [u8; 128] = std::array::from_fn(|power| power as u8);
    by_count.sort_unstable_by_key(|&power| {
        let count = counts.iter().map(|count| count[usize::from(power)]).sum::<u32>();
        (Reverse(count), power)
    });
    std::array::from_fn(|i| by_count[i])
}

/// Packs panel number `panel`.
#[inline(always)]
pub(crate) fn pack(plain: &[u8], out: &mut [u8], panel: usize, cols: usize, found: &Found) {
    let powers = powers(plain);
    let (head, packed) = out.split_at_mut(HEAD);
    for (code, out) in head[..2 * POWERS].iter_mut().enumerate() {
        *out = powers[code % POWERS] | if code < POWERS { 0 } else { SIGN };
    }
    let mut uncommon = Vec::new();
    for (index, (plain, packed)) in plain.chunks_exact(PLAIN).zip(packed.chunks_exact_mut(PACKED)).enumerate() {
        let (nibbles, lows) = packed.split_at_mut(LINE);
        let (mut highs, mut codes) = ([0u8; HIGHS], [0u8; HIGHS]);
        for (at, words) in plain.chunks_exact(16).enumerate() {
            // Lane `at % 4` of line `at / 4`.
            let to = at / 8 * LINE + at % 4 * 16 + at / 4 % 2 * 8;
            for i in 0..8 {
                (lows[to + i], highs[to + i]) = (words[2 * i], words[2 * i + 1]);
            }
        }
        let mut have_none = 0;
        for (code, high) in codes.iter_mut().zip(highs) {
            *code = NO_CODE;
            for (i, power) in powers.into_iter().enumerate() {
                *code = if high & !SIGN == power { i as u8 } else { *code };
            }
            have_none |= *code;
            *code |= (high & SIGN) >> 4;
        }
        for at in 0..LINE {
            nibbles[at] = codes[at] & 15 | codes[LINE + at] << 4;
        }
        if have_none & NO_CODE != 0 {
            uncommon.push(((first(panel, cols) + index) as u32, highs));
        }
    }
    if !uncommon.is_empty() {
        found.add(&mut uncommon);
    }
}

/// The most bytes that uncommon quarters need, if the weights are like the sample that was accepted.
pub(crate) fn uncommon_bytes_max(panels: usize, cols: usize) -> usize {
    first(panels, cols) / UNCOMMON_SAMPLED * (HIGHS + size_of::<u32>()) + (panels + 1) * size_of::<u32>()
}

/// Unpacks one feature of a packed panel. This function defines the meaning of the packed layout.
pub(crate) fn unpack_feature(panel: &[u8], first: usize, uncommon: (&[u32], &[u8]), feature: usize, out: &mut [f32]) {
    let (head, quarters) = panel.split_at(HEAD);
    let (mut numbers, mut highs) = uncommon;
    let mut quarters = quarters.chunks_exact(PACKED).enumerate();
    for values in out.chunks_mut(PLAIN / PANEL / 2) {
        let (index, packed) = quarters.next().expect("a quarter for each eight inputs");
        let is_uncommon = numbers[0] as usize == first + index;
        for (k, value) in values.iter_mut().enumerate() {
            let (half, at) = (k / 4, feature / 4 * 16 + k / 2 % 2 * 8 + feature % 4 * 2 + k % 2);
            let code = packed[at] >> (4 * half) & 15;
            let high = if is_uncommon { highs[half * LINE + at] } else { head[usize::from(code)] };
            *value = f32::from_bits(u32::from_be_bytes([high, packed[LINE + half * LINE + at], 0, 0]));
        }
        if is_uncommon {
            (numbers, highs) = (&numbers[1..], &highs[HIGHS..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All 65,536 bit patterns, panels with few powers, and zeros survive packing bit for bit.
    #[test]
    fn packed_panels_hold_all_bits() {
        let cols = 70_usize;
        let words = cols.next_multiple_of(GROUP) * PANEL;
        let every = |panel: usize| (0..words).map(move |i| ((panel * words + i) * 40_503) as u16).collect::<Vec<_>>();
        let few = |panel: usize| (0..words).map(move |i| 0x3c00 + (i * (panel + 7) % 2000) as u16).collect();
        let mixed = |panel: usize| (0..words).map(move |i| if i % 301 == panel { i as u16 } else { 0xbc80 }).collect();
        let panels: Vec<Vec<u16>> =
            (0..50).map(every).chain((50..53).map(few)).chain((53..56).map(mixed)).chain([vec![0; words]]).collect();
        let mut seen = vec![false; 1 << 16];
        let found = Found { most: usize::MAX, quarters: Mutex::default() };
        let mut packed = vec![0; panels.len() * stride(cols)];
        for (panel, words) in panels.iter().enumerate() {
            words.iter().for_each(|&word| seen[usize::from(word)] = true);
            let plain: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            pack(&plain, &mut packed[panel * stride(cols)..][..stride(cols)], panel, cols, &found);
        }
        assert!(seen.iter().all(|&seen| seen), "the panels contain every bf16 bit pattern");
        let uncommon = found.sorted(panels.len(), cols).unwrap();
        for (panel, words) in panels.iter().enumerate() {
            for feature in 0..PANEL {
                let mut got = vec![0f32; cols];
                let packed = &packed[panel * stride(cols)..][..stride(cols)];
                unpack_feature(packed, first(panel, cols), uncommon.from(panel), feature, &mut got);
                for (k, got) in got.into_iter().enumerate() {
                    let want = u32::from(words[(k / 2 * PANEL + feature) * 2 + k % 2]) << 16;
                    assert_eq!(got.to_bits(), want, "panel {panel}, feature {feature}, input {k}");
                }
            }
        }
    }

    #[test]
    fn weights_with_many_powers_are_not_worth_it() {
        let (cols, mut out) = (256, vec![0; stride(256)]);
        let mut within_limit = |word: fn(usize) -> u16| {
            let plain: Vec<u8> = (0..cols * PANEL).flat_map(|i| word(i).to_le_bytes()).collect();
            let found = Found::in_sample(1, cols);
            pack(&plain, &mut out, 0, cols, &found);
            found.within_limit()
        };
        assert!(within_limit(|_| 0));
        assert!(within_limit(|i| 0x3c00 + (i * 769 % 2048) as u16));
        assert!(!within_limit(|i| (i * 40_503) as u16));
    }
}
